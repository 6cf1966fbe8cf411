"""Memory that is freed in one step of training and wanted in the next."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from linbias.lm.memory import keep_freed_memory

def step():  # 48 MiB in arrays of 16: larger than any that importing PyTorch frees, which would be kept without our help
    arrays = [torch.empty(1 << 22) for _ in range(3)]
    for x in arrays:
        x.fill_(1.0)

if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    def faults(*options: str) -> int:
        command = [sys.executable, "-c", STEPS, *options]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert faults("keep") < faults("give back") / 4
