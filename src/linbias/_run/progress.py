"""Progress on standard error, as tqdm shows it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Called with the amount that is done and the total, or None where the total is unknown.
Advance = Callable[[int, int | None], None]


def new_bar(task: str, *, visible: bool, **look: Any) -> Any:
    """A bar behind a task; where standard error is no terminal, it is drawn twice a minute."""
    from tqdm import tqdm  # which comes with Transformers

    seconds = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(desc=task, disable=not visible, mininterval=seconds, dynamic_ncols=True, **look)


@contextmanager
def progress_bar(task: str, *, visible: bool) -> Iterator[Advance]:
    """A bar as a function to call, which is gone when the block ends."""
    look = {"leave": False, "unit": "", "unit_scale": True, "delay": 0.5}
    with new_bar(task, visible=visible, **look) as bar:

        def advance(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
