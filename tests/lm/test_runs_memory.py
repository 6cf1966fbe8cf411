"""Memory that is freed in one step of training and wanted in the next."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from linbias.models.prepacked import keep_freed_memory

def step(count):  # three arrays of 16 MiB and a little more each time: larger than any freed before, so that none is kept without our help
    arrays = [torch.empty((1 << 22) + (count << 14)) for _ in range(3)]
    for x in arrays:
        x.fill_(1.0)

if sys.argv[1] == "keep":
    keep_freed_memory()
for count in range(3):
    step(count)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for count in range(3, 13):
    step(count)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    def faults(*options: str) -> int:
        command = [sys.executable, "-c", STEPS, *options]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert faults("keep") < faults("give back") / 4
