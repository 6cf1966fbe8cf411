"""Time two versions of linbias, interleaved call by call in one run: what a change cost or gained.

    git worktree add ../before HEAD~1 && make -C ../before run
    python evidence/benchmarks/compare.py --before ../before/.venv/bin/python

Each version runs in a process of its own, with its own installation, and takes turns with the other (A B A B), so that
a busy neighbour or a changing clock hits both. A case that differs is worth a second run: `--cases NAME --repeats 51`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# name: B, H, G, T, S, D, dtype, keywords of attention, whether gradients are taken
CASES: dict[str, tuple[int, int, int, int, int, int, str, dict[str, Any], bool]] = {
    "tiny-16": (1, 4, 4, 16, 16, 32, "float32", {}, False),
    "short-128": (8, 6, 6, 128, 128, 32, "float32", {}, False),
    "short-256": (8, 8, 8, 256, 256, 64, "float32", {}, False),
    "causal-2048": (1, 8, 8, 2048, 2048, 64, "float32", {}, False),
    "causal-8192": (1, 8, 8, 8192, 8192, 64, "float32", {}, False),
    "causal-32768": (1, 8, 8, 32768, 32768, 64, "float32", {}, False),
    "bfloat16-8192": (1, 8, 8, 8192, 8192, 64, "bfloat16", {}, False),
    "symmetric-8192": (1, 8, 8, 8192, 8192, 64, "float32", {"causal": False}, False),
    "zero-slopes-4096": (1, 8, 8, 4096, 4096, 64, "float32", {"slopes": [0.0] * 8}, False),
    "zero-slopes-bfloat16-4096": (1, 8, 8, 4096, 4096, 64, "bfloat16", {"slopes": [0.0] * 8}, False),
    "training-tiny-16": (1, 4, 4, 16, 16, 32, "float32", {}, True),
    "training-128": (8, 6, 6, 128, 128, 32, "float32", {}, True),
    "training-512": (4, 8, 8, 512, 512, 64, "float32", {}, True),
    "training-4096": (1, 8, 8, 4096, 4096, 64, "float32", {}, True),
    "training-bfloat16-2048": (1, 8, 8, 2048, 2048, 64, "bfloat16", {}, True),
    "decode-65536": (1, 8, 8, 1, 65536, 64, "float32", {}, False),
    "decode-bounded-65536": (1, 8, 8, 1, 65536, 64, "float32", {"key_bound": 12.0}, False),
    "blocked-2048": (1, 8, 8, 2048, 2048, 64, "float32", {"implementation": "blocked"}, False),
    "blocked-training-2048": (1, 8, 8, 2048, 2048, 64, "float32", {"implementation": "blocked"}, True),
    "range-2048": (4, 8, 8, 512, 2048, 64, "float32", {"key_range": [[0, 1500], [700, 2048]] * 2}, False),
}  # fmt: skip


def prepare(name: str) -> Callable[[], Any]:
    from linbias.torch import attention

    B, H, G, T, S, D, dtype, options, gradients = CASES[name]
    torch.manual_seed(0)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, D)
    q, k, v = (torch.randn(s).to(getattr(torch, dtype)).requires_grad_(gradients) for s in shapes)
    options = dict(options)
    slopes = options.pop("slopes", None)  # by position: versions differ in its name
    if "key_bound" in options:
        options["key_bound"] = torch.full((B, G), options["key_bound"])
    if "key_range" in options:
        options["key_range"] = torch.tensor(options["key_range"])
    if not gradients:
        return lambda: attention(q, k, v, slopes, **options)
    dout = torch.randn(B, H, T, D).to(q.dtype)
    return lambda: torch.autograd.grad(attention(q, k, v, slopes, **options), (q, k, v), dout)


def work() -> None:
    """The process of one version: a case's name comes in, the milliseconds of one call go out."""
    name, run, calls = "", None, 1
    print(
        json.dumps({"version": str(Path(sys.modules["__main__"].__file__ or "").resolve())}),
        flush=True,
    )
    for line in sys.stdin:
        if line.strip() != name:
            name = line.strip()
            run = prepare(name)
            for _ in range(3):
                run()
            start = time.perf_counter()
            run()
            calls = max(1, int(2e-3 / (time.perf_counter() - start)))
        assert run is not None
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run()
        spent, busy = time.perf_counter() - start, time.process_time() - busy
        print(json.dumps({"ms": spent * 1e3 / calls, "cpu_ms": busy * 1e3 / calls}), flush=True)


class Version:
    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, __file__, "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def call(self, case: str) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", help="the Python that has the version to compare with")
    parser.add_argument("--after", default=sys.executable, help="the Python that has the new one")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument(
        "--records", type=Path, help="file to append to (default: evidence/records/...)"
    )
    options = parser.parse_args()
    if options.worker:
        return work()
    if not options.before:
        parser.error("--before is needed: the Python of the version to compare with")
    import record

    versions = {"before": Version(options.before), "after": Version(options.after)}
    print(
        f"{'case':28}{'before, ms':>12}{'after, ms':>12}{'after / before':>16}{'by CPU time':>14}"
    )
    for case in options.cases:
        times: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
        for _ in range(options.repeats):
            for name, version in versions.items():
                times[name].append(version.call(case))
        wall, busy = (
            {n: statistics.median(t[kind] for t in found) for n, found in times.items()}
            for kind in ("ms", "cpu_ms")
        )
        ratio, busy_ratio = wall["after"] / wall["before"], busy["after"] / busy["before"]
        print(
            f"{case:28}{wall['before']:12.3f}{wall['after']:12.3f}{ratio:16.3f}{busy_ratio:14.3f}",
            flush=True,
        )
        spreads = {name: record.spread([t["ms"] for t in found]) for name, found in times.items()}
        record.write(
            {"case": f"compare-{case}", **spreads, "ratio": round(ratio, 4), "ratio_cpu_time": round(busy_ratio, 4), **record.here()},
            options.records or record.default_path(),
        )  # fmt: skip


if __name__ == "__main__":
    main()
