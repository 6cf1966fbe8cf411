"""How much of this machine's time others take while something is measured, from what Linux counts."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass
class Load:
    """The share of all cores that others used during a `with` block: other processes, and other machines on this one's cores.

    Linux counts in hundredths of a second, so that blocks below half a second tell little.

    Args:
        own: The processes that are not others; the one that asks is one of them, and so are all their threads.
    """

    own: Iterable[int] = ()
    share: float = 0.0

    def __enter__(self) -> "Load":
        self._before, self._start = self._of_others(), time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        used = (self._of_others() - self._before) / os.sysconf("SC_CLK_TCK")
        self.share = max(0.0, used / seconds)

    def _of_others(self) -> int:
        """Ticks: user, nice, system, interrupts and stolen, less those of our own."""
        user, nice, system, _, _, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        )
        return user + nice + system + irq + softirq + steal - sum(map(_ticks, {os.getpid(), *self.own}))  # fmt: skip


def _ticks(process: int) -> int:
    """Of a process and its threads, and of its children that have ended: one of ours that has ended counts with us."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0
    return sum(map(int, fields[11:15]))
