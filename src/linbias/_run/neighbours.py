"""OpenMP's threads spin while they wait, which is fastest alone, and sleep while other processes want the cores too.

The threads that PyTorch computes on spin between two operations. Beside a busy process that is waste: a thread spins
away the time that the thread which it waits for would need, and a token takes several times as long as it should. How
long threads spin is fixed when libgomp is loaded (GOMP_SPINCOUNT, OMP_WAIT_POLICY), and no fixed number is good both
alone and beside others. But libgomp's threads hardly spin where they are more than the cores (its manual, GOMP_SPINCOUNT),
and that can be had at any time: by a further team of threads, which does nothing.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PERIOD = 0.25  # seconds from look to look
# Cores that others use at least, and that are idle at most, where threads should sleep.
_BUSY, _IDLE = 0.25, 0.5
_CALM = 4  # looks without others after which threads spin again
_STAT = Path("/proc/stat")


@contextmanager
def considerate() -> Iterator[None]:
    """For the length of the block, look for busy processes beside this one, and have OpenMP's threads sleep while there are any.

    Nothing happens on systems other than Linux, with an OpenMP that is not libgomp, or where the user has set
    GOMP_SPINCOUNT or OMP_WAIT_POLICY.
    """
    if not _STAT.exists() or _set_by_the_user():
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(ended,), daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def waiting() -> str:
    """How the threads that PyTorch computes on wait for each other, in words for `linbias doctor`."""
    if found := _set_by_the_user():
        return "as set by " + ", ".join(f"{name}={os.environ[name]}" for name in found)
    if not _STAT.exists():
        return "as its OpenMP does by default"
    return (
        "spinning; asleep beside busy processes (your own programs: OMP_WAIT_POLICY=PASSIVE halves a token's time beside one,"
        " for a tenth more alone)"
    )


def _set_by_the_user() -> list[str]:
    return [name for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ]


def _watch(ended: threading.Event) -> None:
    cores = len(os.sched_getaffinity(0))
    before, calm, alone = _times(), 0, threading.Event()
    alone.set()
    while not ended.wait(_PERIOD):
        now = _times()
        seconds, used, own = (b - a for a, b in zip(before, now, strict=True))
        before, others = now, (used - own) / seconds
        if others >= _BUSY and alone.is_set() and cores - used / seconds <= _IDLE:
            alone = _outnumber(cores)
        calm = 0 if others >= _BUSY else calm + 1
        if calm >= _CALM:
            alone.set()
    alone.set()


def _times() -> tuple[float, float, float]:
    """Seconds: of the clock, of the cores that this process may use by anyone, and by this process."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in _STAT.read_text().splitlines()]
    # user, nice and system, and interrupts of both kinds: not idle, waiting for a disk, or stolen by another machine
    ticks = sum(int(line[i]) for line in lines if line[0] in cores for i in (1, 2, 3, 6, 7))
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def _outnumber(cores: int) -> threading.Event:
    """Keep more threads than cores in libgomp, where it is loaded, until the event that is returned is set."""
    alone = threading.Event()
    if "torch" not in sys.modules:
        alone.set()
        return alone
    symbols = ctypes.CDLL(None)
    try:
        parallel, anything = symbols.GOMP_parallel, ctypes.cast(symbols.getpid, ctypes.c_void_p)
    except AttributeError:  # not loaded yet, or another OpenMP
        alone.set()
        return alone

    def keep() -> None:
        parallel(anything, None, ctypes.c_uint(cores + 1), ctypes.c_uint(0))
        alone.wait()  # the team sleeps, and ends with this thread

    threading.Thread(target=keep, daemon=True).start()
    return alone
