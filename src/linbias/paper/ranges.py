"""Large text files in ranges of whole lines, which several processes work on at a time.

Results come in the order of the text, and so do not depend on the number of processes.
"""

import io
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

_RANGE_BYTES = 4 << 20  # text that a process takes at a time


class Range(NamedTuple):
    """Whole lines of a file: bytes [start, stop)."""

    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def lines(self) -> Iterator[str]:
        """The lines of the range; a carriage return ends one, too. They must be UTF-8."""
        with open(self.path, "rb") as file:
            offset = file.seek(self.start)
            while offset < self.stop:
                data = file.readline()
                try:
                    yield from io.StringIO(data.decode(), newline=None)
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"prepare: texts must be UTF-8, got 0x{data[error.start]:02x} at byte "
                        f"{offset + error.start} of {self.path}"
                    ) from error
                offset += len(data)


def cut_into_ranges(path: Path) -> list[Range]:
    """All lines of a file, in ranges of a few megabytes."""
    ranges: list[Range] = []
    with open(path, "rb") as file:
        size, start = file.seek(0, os.SEEK_END), 0
        while start < size:
            file.seek(start + _RANGE_BYTES - 1)
            file.readline()
            ranges.append(Range(path, start, min(file.tell(), size)))
            start = file.tell()
    return ranges


@contextmanager
def in_processes(
    function: Callable[[Range], Result], number: int
) -> Iterator[Callable[[Sequence[Range]], Iterable[Result]]]:
    """A function that maps ranges to results in their order, by `number` processes."""
    if number == 1:
        yield partial(map, function)
        return
    pool = ProcessPoolExecutor(number, get_context("spawn"), _start_worker, (function,))
    try:
        yield partial(_map_in_order, pool, 2 * number)
    finally:
        pool.shutdown(cancel_futures=True)


def _map_in_order(pool: Executor, max_waiting: int, ranges: Sequence[Range]) -> Iterator[Any]:
    """Results in the order of the ranges. Only some are computed ahead, to bound the memory."""
    waiting: deque[Future[Any]] = deque()
    for part in ranges:
        waiting.append(pool.submit(_call_function, part))
        if len(waiting) > max_waiting:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_function: Callable[[Range], Any]  # what this worker process computes


def _start_worker(function: Callable[[Range], Any]) -> None:
    global _function  # noqa: PLW0603 (a worker process has one function)
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the main process
    Thread(target=_exit_with_main_process, daemon=True).start()


def _exit_with_main_process() -> None:
    main = parent_process()
    assert main is not None
    main.join()
    os._exit(1)


def _call_function(part: Range) -> Any:
    return _function(part)
