"""The matrices of `linbias explain` for terminals of any width, with the bias and without."""

import sys
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from linbias._matrix import HIDDEN, Matrix, average_of, of_weights
from linbias.cli.tables import NumberTable
from linbias.example import side_by_side
from linbias.explain import Explanation

MOST_ROWS, MOST_COLUMNS = 64, 64  # more than this is for a file
_LONGEST_NAME = 12


class Pair:
    """Matrices with the same rows, side by side where all fit, else one above the other."""

    def __init__(self, *matrices: Matrix) -> None:
        self.matrices = matrices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *others = self.matrices
        beside = Table.grid(padding=(0, 3, 0, 0))
        beside.add_row(_table(first), *(_table(other._replace(rows=())) for other in others))
        endless = options.update(max_width=sys.maxsize)
        if console.measure(beside, options=endless).maximum <= options.max_width:
            yield beside
            return
        for matrix in self.matrices:
            yield from [Text("")] * (matrix is not first)
            yield _table(matrix)


def too_large(trace: Explanation) -> bool:
    """Whether the matrices have more rows or columns than are printed."""
    T, S = trace.weights.shape[1:]
    return T > MOST_ROWS or S > MOST_COLUMNS


def of(trace: Explanation, plain: Explanation, heads: list[int]) -> RenderableType:
    """Weights per head, their average, and the output: each with the bias and without."""
    H, T, S = trace.weights.shape
    if too_large(trace):
        return (
            f"{T:,} queries and {S:,} keys are too many to print.\n"
            "--query shows one row, --json writes all of them."
        )
    shown: list[RenderableType] = []

    def show(title: str, *pair: Matrix) -> None:
        titles = ("with bias", "without bias")
        named = [m._replace(title=name) for m, name in zip(pair, titles, strict=True)]
        shown.extend([Text(title, style="bold"), Pair(*named), Text("")])

    weights = [of_weights(each) for each in (trace, plain)]
    for h in heads:
        show(f"Weights of {weights[0][h].title}", *(matrices[h] for matrices in weights))
    if len(heads) == H > 1:
        show(f"Weights, average of the {H} heads", *(average_of(each, "") for each in weights))
    outputs = [side_by_side(each.output[heads]) for each in (trace, plain)]
    columns = [str(number) for number in range(outputs[0].shape[1])]
    show(
        "Output, " + ("heads side by side" if len(heads) > 1 else f"head {heads[0]}"),
        *(Matrix("", output, weights[0][0].rows, columns) for output in outputs),
    )
    return Group(*shown)


def _table(matrix: Matrix) -> NumberTable:
    """The numbers, with the names of columns, and of rows where they have any."""
    look: dict[str, Any] = {"title_style": "italic", "header_style": "dim", "padding": 0}
    table = NumberTable(title=f" {matrix.title}", box=None, **look)
    table.title_of_rest = "\n ..."
    heads, texts = [_short(name) for name in matrix.columns], matrix.texts()
    width = 1 + max(6, *map(cell_len, heads), *(len(text) for row in texts for text in row))
    for _ in matrix.rows[:1]:
        table.add_column()
    for head in heads:
        table.add_column(Text(" " * (width - cell_len(head)) + head), justify="right")
    styles = _styles(matrix)
    for t, row in enumerate(texts):
        names = [Text(_short(name)) for name in matrix.rows[t : t + 1]]
        table.add_row(*names, *map(Text, row, styles[t]))
    return table


def _styles(matrix: Matrix) -> list[list[str]]:
    """Rich's words for the colours of each cell."""

    def style(text: str, ground: Any, white: bool) -> str:
        if matrix.scale is None or text == HIDDEN:
            return "dim" if matrix.scale is not None else ""
        letters = "255,255,255" if white else "0,0,0"
        return f"rgb({letters}) on rgb({','.join(map(str, np.rint(ground).astype(int)))})"

    rows = zip(matrix.texts(), matrix.grounds(), matrix.wants_white(), strict=True)
    return [list(map(style, *row)) for row in rows]


def _short(name: str) -> str:
    if cell_len(name) <= _LONGEST_NAME:
        return name
    return set_cell_size(name, _LONGEST_NAME - 1).rstrip() + "\N{HORIZONTAL ELLIPSIS}"
