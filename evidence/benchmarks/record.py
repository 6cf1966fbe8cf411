"""How a measurement is taken and written: one JSON line each (DESIGN section 8).

Fields of a record: case, implementation, mode ("forward" or "forward+backward"), B H G T S D,
dtype, device, threads, p20_ms p50_ms p80_ms, repeats, peak_memory_bytes (above the inputs; null
where not measured), flop and bytes (formulas below), work_kept (share of the visible query-key
pairs that the certificate left to do; null where everything is), inputs, commit (with "+" where
the tree had changes), machine, versions, date.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import torch

from linbias._machine import num_cores, processor

RECORDS = Path(__file__).parents[1] / "records"
FORWARD, BACKWARD = "forward", "forward+backward"
Fields = dict[str, Any]


def parser(words: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """The options that all measurements have; `words` is the docstring of the script."""
    form = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=words, formatter_class=form)
    options.add_argument("--repeats", type=int, default=repeats)
    options.add_argument("--records", type=Path, default=default_path(), help="to append to")
    options.set_defaults(device="cpu")
    return options


def fields(
    case: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    dtype: str,
    mode: str = FORWARD,
    causal: bool = True,
    inputs: str = "random normal",
) -> Fields:
    """What is known of a call of attention before it is timed, from the shapes of q and k."""
    (B, H, T, D), (G, S) = q, k[1:3]
    pairs = T * (S - T) + T * (T + 1) // 2 if causal else T * S
    # Two products of 2 * D each per visible pair; exp is not counted.
    flop = 4 * B * H * pairs * D * (7 if mode == BACKWARD else 2) // 2
    # The least traffic: q and out, k and v, once each.
    moved = 2 * B * (H * T + G * S) * D * getattr(torch, dtype).itemsize
    return {
        **{"case": case, "mode": mode},
        **{"B": B, "H": H, "G": G, "T": T, "S": S, "D": D, "dtype": dtype},
        "peak_memory_bytes": None,
        "flop": flop,
        "bytes": moved * (3 if mode == BACKWARD else 1),
        "work_kept": None,
        "inputs": inputs,
    }


def compare(
    given: Fields,
    functions: dict[str, Callable[[], Any]],
    options: argparse.Namespace,
    more: dict[str, Fields] | None = None,
) -> dict[str, float]:
    """Time functions in turn, and write and print each beside the first; returns the medians.

    `more` are fields by the name of a function.
    """
    times = interleave(functions, options.repeats)
    medians = {name: spread(values)["p50_ms"] for name, values in times.items()}
    for name, values in times.items():
        line = {**given, "implementation": name, **spread(values), "repeats": len(values)}
        line |= {**here(options.device), **(more or {}).get(name, {})}
        write(line, options.records)
        ratio = medians[name] / max(next(iter(medians.values())), 1e-9)
        kept = line.get("work_kept")
        kept = "" if kept is None else f"  work kept {kept:.1%}"
        what = f"{line['case']} {line.get('mode', '')} {line.get('inputs', '')}"
        print(f"{what:56} {name:28} {medians[name]:9.3f} ms {ratio:6.2f}{kept}", flush=True)
    return medians


def measure_memory(
    given: Fields,
    options: argparse.Namespace,
    prepare: Callable[[str, int], Callable[[], Any]],
    names: Iterable[str],
    length: int,
    more: Fields | None = None,
) -> None:
    """Run what `prepare(name, length)` returns once, in a fresh process, and record its memory.

    `prepare` makes the inputs, and loads what would be loaded later; `more` are fields of all
    records.
    """
    for name in names:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            milliseconds, peak = pool.submit(_run_alone, prepare, name, length).result()
        line = {**given, "implementation": name, **spread([milliseconds]), "repeats": 1}
        line |= {"peak_memory_bytes": peak, **here(), **(more or {})}
        write(line, options.records)
        took = f"{milliseconds / 1e3:.1f} s, {peak / 2**30:.2f} GiB above its inputs"
        print(f"{line['case']} {name}: {took}", flush=True)


def _run_alone(
    prepare: Callable[[str, int], Callable[[], Any]], name: str, length: int
) -> tuple[float, int]:
    run = prepare(name, length)
    before, start = memory_bytes(), time.perf_counter()
    run()
    milliseconds = (time.perf_counter() - start) * 1e3
    return milliseconds, max(0, memory_bytes(peak=True) - before)


def interleave(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time each function `repeats` times in turn (A B A B), after a warm-up; ms of one call.

    On a GPU a time is that of several calls in a row, about 10 ms, so that launching hides behind
    computing.
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
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def synchronize() -> None:
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
    fifths = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
    found = {"p20_ms": fifths[0], "p50_ms": statistics.median(times), "p80_ms": fifths[3]}
    return {name: round(value, 4) for name, value in found.items()}


def write(record: Fields, path: Path) -> None:
    """Append one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def here(device: str = "cpu") -> Fields:
    """Where and with what: the fields that all records of a run share."""
    versions = {"numpy": numpy.__version__, "torch": torch.__version__}
    if device == "cuda":
        versions["triton"] = version("triton")
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "machine": _machine(device),
        "versions": {"python": platform.python_version(), **versions},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
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
    """The hash, with "+" where src/ has changes; "unknown" without git, or in a bare copy."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
    except FileNotFoundError:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../src")
    return f"{commit}{'+' * bool(changed)}" if commit else "unknown"
