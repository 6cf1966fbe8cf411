"""How much of this machine's time others take while something is measured, as Linux counts it."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Load:
    """The share of all cores that others than this process and `own` used in a `with` block.

    Linux counts in hundredths of a second, so that blocks below half a second tell little.
    """

    own: Iterable[int] = ()
    share: float = 0.0

    def __enter__(self) -> "Load":
        self._before, self._start = self._of_others(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        used = (self._of_others() - self._before) / os.sysconf("SC_CLK_TCK")
        self.share = max(0.0, used / seconds)

    def _of_others(self) -> int:
        """Ticks: user, nice, system, interrupts and stolen, less those of our own."""
        words = Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, words)
        own = sum(map(_ticks, {os.getpid(), *self.own}))
        return user + nice + system + irq + softirq + steal - own


def _ticks(process: int) -> int:
    """Of a process, its threads, and its children that have ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return sum(map(int, fields[11:15]))
