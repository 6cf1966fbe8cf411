"""A progress bar on standard error, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

# Called with the amount that is done and the total, or None where the total is unknown.
Advance = Callable[[int, int | None], None]


@contextmanager
def progress_bar(task: str, *, visible: bool, console: Console | None = None) -> Iterator[Advance]:
    """A bar that is there for the length of the block, as a function that advances it.

    Args:
        task: Stands before the bar.
        visible: Whether to show anything.
        console: Where to draw; None is standard error. Nothing is drawn where it is no terminal.
    """
    console = console or Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn("{task.percentage:3.0f} %", "{task.completed:,} bytes"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (visible and console.is_terminal),
    )
    with bar:
        number = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)
