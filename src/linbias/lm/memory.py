"""Peak memory of a block of code, and available memory: of a GPU, or of the process."""

import resource
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch


class PeakMemory:
    """Measures the highest memory of a `with` block: `peak_bytes`, once the block is left.

    On a CUDA device that is what PyTorch allocated there, else the resident memory of the process.
    On Linux the kernel's high-water mark is set back when the block is entered, so that an earlier
    peak is not counted. Where that is not possible, the peak is that since the process began.

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

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = int(torch.cuda.max_memory_allocated(self.device))
        else:
            self.peak_bytes = _resident_peak()


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: on the CUDA device, or on this machine."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return int(psutil.virtual_memory().available)


def _reset_resident_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM alone
    except OSError:
        pass  # not Linux, or a container that forbids it: see PeakMemory


def _resident_peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
