"""Peak memory of a block of code, of a GPU or of the process."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

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


def _resident_peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
