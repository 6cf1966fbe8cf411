"""Peak memory of a block of code, and available memory: of a GPU, or of the process."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch


class PeakMemory:
    """The highest memory of a block: `peak_bytes`, of the CUDA device or of the process."""

    peak_bytes: int

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):  # not Linux, or a container that forbids it
                Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM alone
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


def _resident_peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
