"""Time two versions of linbias, interleaved call by call: what a change cost or gained.

    git worktree add ../before HEAD~1 && make -C ../before run
    python evidence/benchmarks/compare.py --before ../before/.venv/bin/python

Each version runs in a process of its own, with its own installation, and takes turns with the
other (A B A B), so that a busy neighbour or a changing clock hits both. A case that differs is
worth a second run: `--cases NAME --repeats 51`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# The shape of q and keywords of attention; besides S, dtype and whether gradients are taken.
CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "tiny-16": ((1, 4, 16, 32), {}),
    "short-128": ((8, 6, 128, 32), {}),
    "short-256": ((8, 8, 256, 64), {}),
    "causal-2048": ((1, 8, 2048, 64), {}),
    "causal-8192": ((1, 8, 8192, 64), {}),
    "causal-32768": ((1, 8, 32768, 64), {}),
    "bfloat16-8192": ((1, 8, 8192, 64), {"dtype": "bfloat16"}),
    "symmetric-8192": ((1, 8, 8192, 64), {"causal": False}),
    "zero-slopes-4096": ((1, 8, 4096, 64), {"slopes": [0.0] * 8}),
    "zero-slopes-bfloat16-4096": ((1, 8, 4096, 64), {"slopes": [0.0] * 8, "dtype": "bfloat16"}),
    "training-tiny-16": ((1, 4, 16, 32), {"gradients": True}),
    "training-128": ((8, 6, 128, 32), {"gradients": True}),
    "training-512": ((4, 8, 512, 64), {"gradients": True}),
    "training-4096": ((1, 8, 4096, 64), {"gradients": True}),
    "training-bfloat16-2048": ((1, 8, 2048, 64), {"gradients": True, "dtype": "bfloat16"}),
    "decode-65536": ((1, 8, 1, 64), {"S": 65536}),
    "decode-bounded-65536": ((1, 8, 1, 64), {"S": 65536, "key_bound": [[12.0] * 8]}),
    "blocked-2048": ((1, 8, 2048, 64), {"implementation": "blocked"}),
    "blocked-training-2048": ((1, 8, 2048, 64), {"implementation": "blocked", "gradients": True}),
    "range-2048": ((4, 8, 512, 64), {"S": 2048, "key_range": [[0, 1500], [700, 2048]] * 2}),
}


def prepare(shape: tuple[int, int, int, int], options: dict[str, Any]) -> Callable[[], Any]:
    from linbias.torch import attention

    B, H, T, D = shape
    S, dtype = options.pop("S", T), getattr(torch, options.pop("dtype", "float32"))
    gradients, slopes = options.pop("gradients", False), options.pop("slopes", None)
    torch.manual_seed(0)
    shapes = (shape, (B, H, S, D), (B, H, S, D))
    q, k, v = (torch.randn(s).to(dtype).requires_grad_(gradients) for s in shapes)
    options |= {n: torch.tensor(x) for n, x in options.items() if isinstance(x, list)}
    if not gradients:
        return lambda: attention(q, k, v, slopes, **options)
    dout = torch.randn(shape).to(dtype)
    return lambda: torch.autograd.grad(attention(q, k, v, slopes, **options), (q, k, v), dout)


def work() -> None:
    """The process of one version: a case's name comes in, wall and CPU ms of one call go out."""
    name, run, calls = "", lambda: None, 1
    for line in sys.stdin:
        if line.strip() != name:
            name = line.strip()
            run = prepare(*CASES[name])
            for _ in range(3):
                run()
            start = time.perf_counter()
            run()
            calls = max(1, int(2e-3 / (time.perf_counter() - start)))
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run()
        spent = (time.perf_counter() - start, time.process_time() - busy)
        print(json.dumps([seconds * 1e3 / calls for seconds in spent]), flush=True)


def start_version(python: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.Popen([python, __file__, "--worker"], env=environment, **pipes)


def ask(version: subprocess.Popen[str], case: str) -> list[float]:
    version.stdin.write(case + "\n")
    version.stdin.flush()
    return json.loads(version.stdout.readline())


def main() -> None:
    if "--worker" in sys.argv:  # of a version that may lack what measures
        return work()
    import record

    parser = record.parser(__doc__, repeats=21)
    parser.add_argument("--before", required=True, help="the Python of the other version")
    parser.add_argument("--after", default=sys.executable, help="the Python that has the new one")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options: argparse.Namespace = parser.parse_args()
    versions = {"before": start_version(options.before), "after": start_version(options.after)}
    print(f"{'case':28}{'before, ms':>12}{'after, ms':>12}{'after / before':>16}{'by CPU':>14}")
    for case in options.cases:
        times: dict[str, list[list[float]]] = {name: [] for name in versions}
        for _ in range(options.repeats):
            for name, version in versions.items():
                times[name].append(ask(version, case))
        wall, busy = (
            {name: statistics.median(t[kind] for t in found) for name, found in times.items()}
            for kind in (0, 1)
        )
        ratio, busy_ratio = (ms["after"] / ms["before"] for ms in (wall, busy))
        ms = f"{wall['before']:12.3f}{wall['after']:12.3f}"
        print(f"{case:28}{ms}{ratio:16.3f}{busy_ratio:14.3f}")
        line = {name: record.spread([t[0] for t in found]) for name, found in times.items()}
        line |= {"ratio": round(ratio, 4), "ratio_cpu_time": round(busy_ratio, 4)}
        record.write({"case": f"compare-{case}", **line, **record.here()}, options.records)


if __name__ == "__main__":
    main()
