"""The stages that run the contract's tests on the device."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import record
from gpu.outcomes import FILE

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = max(1, (os.cpu_count() or 1) - 3)  # that compile and test at once
PYTEST = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
PYTEST += ["-p", "gpu.outcomes"]


def contract(options: argparse.Namespace) -> None:
    """The contract suite, compiled for the device, in several processes: most of the time goes into compiling."""
    os.environ |= {FILE: str(options.records), "LINBIAS_STAGE": "contract"}
    if options.dry_run:
        raise SystemExit(run([*PYTEST, "tests/torch/test_triton_gpu.py", "-k", "cannot_run"]))
    listed = subprocess.run(
        [*PYTEST, "tests/torch/test_triton_gpu.py", "-m", "gpu", "--collect-only"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    tests = [line for line in listed.splitlines() if "::" in line and " " not in line]
    record.write({"case": "contract", "num_tests": len(tests)}, options.records)
    print(f"{len(tests)} tests" if tests else listed, flush=True)
    shares = [tests[n::PROCESSES] for n in range(PROCESSES)]
    processes = [subprocess.Popen([*PYTEST, *share], cwd=ROOT) for share in shares if share]
    codes = [process.wait() for process in processes]
    raise SystemExit(max(codes, default=1))


def sanitizer(options: argparse.Namespace) -> None:
    """A few cases of the contract under memcheck, each array an allocation of its own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if options.dry_run or not Path(tool).exists():
        print("compute-sanitizer is not here")
        return
    cases = (
        "T-below-S or range-symmetric or range-per-head or start-far-away or dropout or long-cache"
    )
    names = f"on_a_gpu and bfloat16 and ({cases})"
    tests = [*PYTEST, "-x", "tests/torch/test_triton_gpu.py", "-m", "gpu", "-k", names]
    os.environ |= {FILE: str(options.records), "LINBIAS_STAGE": "sanitizer"}
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    raise SystemExit(run([tool, "--tool", "memcheck", "--error-exitcode", "9", *tests]))


def run(command: list[str]) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode
