"""Progress on standard error: a bar where that is a terminal, elsewhere a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# Called with the amount that is done and the total, or None where the total is unknown.
Advance = Callable[[int, int | None], None]

# The time between two lines grows by this factor, from the shortest to the longest.
_GROWTH, _SHORTEST_SECONDS, _LONGEST_SECONDS = 1.25, 10.0, 600.0


class Pace:
    """Says when a line of a log is due: after 10 seconds, then ever more rarely, to 10 minutes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._interval = now, _SHORTEST_SECONDS
        self._last = now()

    def is_due(self) -> bool:
        now = self._now()
        if now - self._last < self._interval:
            return False
        self._last, self._interval = now, min(self._interval * _GROWTH, _LONGEST_SECONDS)
        return True


def duration(seconds: float) -> str:
    """A time in hours, minutes and seconds: 1:15, 1:01:15."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


@contextmanager
def progress_bar(task: str, *, visible: bool, console: Console | None = None) -> Iterator[Advance]:
    """A bar behind a task, or lines at a `Pace` if this is no terminal, as a function to call."""
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
    pace = Pace()

    def advance(done: int, total: int | None) -> None:
        bar.update(number, completed=done, total=total)
        if bar.disable and visible and pace.is_due():
            amount = f"{done / total:.0%}" if total else f"{done:,} bytes"
            console.print(f"{task.strip()}: {amount}", markup=False, highlight=False)

    with bar:
        number = bar.add_task(task, total=None)
        yield advance
