"""How a measurement is taken and written: one JSON line each (DESIGN section 8).

Fields of a record: case, implementation, mode ("forward" or "forward+backward"), B H G T S D, dtype, device,
threads, p20_ms p50_ms p80_ms, repeats, peak_memory_bytes (above the inputs; null where not measured), flop and
bytes (formulas below), work_kept (share of the visible query-key pairs that the certificate left to do; null
where everything is), inputs, commit (with "+" where the tree had changes), machine, versions, date.
"""

import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from linbias._machine import num_cores, processor

RECORDS = Path(__file__).parents[1] / "records"


def flop(B: int, H: int, T: int, S: int, D: int, causal: bool = True) -> int:
    """Useful work of a dense forward pass: 2 products of 2 * D each per visible pair; exp is not counted."""
    pairs = T * (S - T) + T * (T + 1) // 2 if causal else T * S
    return 4 * B * H * pairs * D


def moved_bytes(B: int, H: int, G: int, T: int, S: int, D: int, itemsize: int) -> int:
    """The least traffic of a forward pass: q and out, k and v, once each."""
    return 2 * B * (H * T + G * S) * D * itemsize


def interleave(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time each function `repeats` times in turn (A B A B), after one warm-up each; milliseconds of one call.

    On a GPU a time is that of several calls in a row, about 10 ms, so that launching hides behind computing.
    """
    calls = {name: _calls_in_a_row(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(_time(function, calls[name]) / calls[name])
    return times


def _calls_in_a_row(function: Callable[[], Any]) -> int:
    function()
    return max(1, min(100, int(10 / _time(function)))) if torch.cuda.is_available() else 1


def _time(function: Callable[[], Any], calls: int = 1) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _wait()
    return (time.perf_counter() - start) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_bytes(peak: bool = False) -> int:
    """What this process has in memory, or the most it ever had.

    Not getrusage: its peak survives fork and exec, and would be that of the parent.
    """
    name = "VmHWM" if peak else "VmRSS"
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def spread(times: list[float]) -> dict[str, float]:
    """p20, p50 and p80."""
    if len(times) < 2:
        return dict.fromkeys(("p20_ms", "p50_ms", "p80_ms"), round(times[0], 4))
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {
        "p20_ms": round(fifths[0], 4),
        "p50_ms": round(statistics.median(times), 4),
        "p80_ms": round(fifths[3], 4),
    }


def write(record: dict[str, Any], path: Path) -> None:
    """Append one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def here(device: str = "cpu") -> dict[str, Any]:
    """Where and with what: the fields that all records of a run share."""
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "machine": _machine(device),
        "versions": {
            "python": platform.python_version(),
            "numpy": numpy.__version__,
            "torch": torch.__version__,
            **({"triton": version("triton")} if device == "cuda" else {}),
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def default_path(device: str = "cpu") -> Path:
    return RECORDS / f"{slug(_machine(device))}-{datetime.now(UTC):%Y-%m-%d}.jsonl"


def slug(machine: str) -> str:
    """The name of a machine as part of a file's."""
    return "-".join(machine.lower().split())


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{processor()} {num_cores()} cores"


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if not git("rev-parse", "HEAD"):  # a copy of the files alone
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
