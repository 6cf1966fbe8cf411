"""Peak memory of a piece of work: CUDA's count on a GPU, else the process's resident peak."""

import resource
import sys
from pathlib import Path
from types import TracebackType

import torch


class PeakMemory:
    """A `with` block's highest memory, in `peak_bytes` once the block is left.

    On Linux the kernel's high-water mark is set back when the block is entered, so that an earlier
    peak is not counted. Where that is not possible, the peak is the process's since its start.

    Example:
        >>> with PeakMemory("cpu") as memory:
        ...     x = torch.ones(1000)
        >>> memory.peak_bytes > x.nbytes
        True
    """

    peak_bytes: int

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _reset_resident_peak()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = int(torch.cuda.max_memory_allocated(self.device))
        else:
            self.peak_bytes = _resident_peak()


def _reset_resident_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: VmHWM alone, no page is touched
    except OSError:
        pass  # not Linux, or a container that forbids it: documented above


def _resident_peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
