"""Tables for terminals of any width, in which no head and no number is ever cut."""

from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table


class NumberTable(Table):
    """A table of numbers that, where it is wider than the terminal, goes on below with further
    columns after the first, which says which row is which.
    """

    title_of_rest: str | None = None  # above further columns

    def __init__(self, *titles: str, title: str | None = None, **look: Any) -> None:
        usual: dict[str, Any] = {"title_style": "bold", "padding": (0, 1, 0, 0)}
        self._look = {"box": box.SIMPLE_HEAD, **usual, **look}
        super().__init__(title=title, title_justify="left", caption_justify="left", **self._look)
        for name in titles:
            self.add_column(name, justify="right")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._parts(console, options)
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
            return
        for number, part in enumerate(parts):
            title = self.title_of_rest if number else str(self.title or "") or None
            table = NumberTable(title=title, **self._look)
            for index in part:
                column = self.columns[index]
                table.add_column(column.header, justify=column.justify)
            for cells in zip(*(self.columns[index].cells for index in part), strict=True):
                table.add_row(*cells)
            if number == len(parts) - 1:
                table.caption = self.caption
            yield table

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """The columns of each part, as many as the terminal has room for."""
        # With a box there is the left edge, and every column has two spaces on its right.
        edge, gap = (0, 0) if self.box is None else (1, 2)
        room = options.max_width - edge
        widths = [
            gap + max(console.measure(text).maximum for text in (column.header, *column.cells))
            for column in self.columns
        ]
        parts = [[0]]
        for index in range(1, len(widths)):
            taken = sum(widths[other] for other in parts[-1])
            if len(parts[-1]) > 1 and taken + widths[index] > room:
                parts.append([0])
            parts[-1].append(index)
        return parts
