"""OpenMP's threads spin while they wait, and sleep while other processes want the cores too.

Spinning is fastest alone, and slow beside a busy process; GOMP_SPINCOUNT fixes one of the two. But
libgomp's threads hardly spin where they are more than the cores: a further, idle team sees to it.
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
    """Within the block, OpenMP's threads sleep while other processes are busy; nothing happens
    without Linux or libgomp, or where the user has set how long they spin.
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
    """How the threads that PyTorch computes on wait for each other, for `linbias doctor`."""
    if names := _set_by_the_user():
        return "as set by " + ", ".join(f"{name}={os.environ[name]}" for name in names)
    if not _STAT.exists():
        return "as its OpenMP does by default"
    return (
        "spinning; asleep beside busy processes (your own programs: OMP_WAIT_POLICY=PASSIVE "
        "halves a token's time beside one, for a tenth more alone)"
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
    """Seconds: of the clock, of our cores by anyone, and of our cores by this process."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in _STAT.read_text().splitlines()]
    # user, nice, system, and interrupts of both kinds: not idle, waiting for a disk, or stolen
    ticks = sum(int(line[i]) for line in lines if line[0] in cores for i in (1, 2, 3, 6, 7))
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def _outnumber(cores: int) -> threading.Event:
    """Keeps more threads than cores in libgomp, if it is loaded, until the event is set."""
    alone = threading.Event()
    libraries = ctypes.CDLL(None)
    if "torch" not in sys.modules or not hasattr(libraries, "GOMP_parallel"):
        alone.set()  # libgomp is not loaded yet, or it is another OpenMP
        return alone
    # GOMP_parallel(function, its argument, number of threads, flags) has every thread of a team
    # call a function. Here that is one without any effect; then the threads sleep, as long as the
    # thread lives that asked for them.
    start_team = libraries.GOMP_parallel
    start_team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    no_effect = ctypes.cast(libraries.getpid, ctypes.c_void_p)

    def keep_team() -> None:
        start_team(no_effect, None, cores + 1, 0)
        alone.wait()

    threading.Thread(target=keep_team, daemon=True).start()
    return alone
