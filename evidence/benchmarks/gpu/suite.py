"""The stages that run the contract's tests, and a plugin of pytest that records outcomes."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import record

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = max(1, (os.cpu_count() or 1) - 3)  # that compile and test at once
PYTEST = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
PYTEST += ["-p", "gpu.suite", "tests/gpu/test_triton_gpu.py"]
RECORDS, STAGE = "LINBIAS_OUTCOMES", "LINBIAS_STAGE"  # environment variables for the plugin


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        line = {"case": os.environ[STAGE], "test": report.nodeid.rpartition("::")[2]}
        with open(os.environ[RECORDS], "a") as file:
            file.write(json.dumps({**line, "outcome": report.outcome}) + "\n")


def contract(options: argparse.Namespace) -> None:
    """The contract suite, in several processes: most of the time goes into compiling."""
    os.environ |= {RECORDS: str(options.records), STAGE: "contract"}
    if options.dry_run:
        raise SystemExit(subprocess.call([*PYTEST, "-k", "cannot_run"], cwd=ROOT))
    listing = [*PYTEST, "-m", "gpu", "--collect-only"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    tests = [line for line in done.stdout.splitlines() if "::" in line and " " not in line]
    record.write({"case": "contract", "num_tests": len(tests)}, options.records)
    print(f"{len(tests)} tests" if tests else done.stdout, flush=True)
    shares = [tests[n::PROCESSES] for n in range(PROCESSES)]
    started = [subprocess.Popen([*PYTEST[:-1], *share], cwd=ROOT) for share in shares if share]
    raise SystemExit(max((process.wait() for process in started), default=1))


def sanitizer(options: argparse.Namespace) -> None:
    """A few cases of the contract under memcheck, each array an allocation of its own."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if options.dry_run or not Path(tool).exists():
        print("compute-sanitizer is not here")
        return
    cases = "T-below-S range-symmetric range-per-head start-far-away dropout long-cache"
    names = f"on_a_gpu and bfloat16 and ({' or '.join(cases.split())})"
    os.environ |= {RECORDS: str(options.records), STAGE: "sanitizer"}
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *PYTEST]
    raise SystemExit(subprocess.call([*command, "-x", "-m", "gpu", "-k", names], cwd=ROOT))
