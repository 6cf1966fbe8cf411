"""Time what sharing a call out costs: its time, less the time on one thread divided by the cores that can take part.

    python evidence/benchmarks/bench_threads.py                             # 1 to 64 threads, a minute on 2 quiet cores
    python evidence/benchmarks/bench_threads.py --threads 1 32 64 128       # on a machine of many cores

The cases are forward calls of many tasks that take about 2, 30 and 500 us each, on threads that the core keeps ("kept"), on
PyTorch's own ("PyTorch's"), and by linbias.torch.attention ("attention"), which takes no more threads than there are cores.
Numbers of threads take turns, so that drift hits all; the calls of the first 50 ms on each are not timed. Records go to records, or where
--records says.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import record
from linbias._machine import num_cores
from linbias.kernels import core
from linbias.torch import addresses, attention
from linbias.torch.call import prepare
from linbias.torch.impl import cpu
from linbias.torch.operators.operator import Results

# B, H, T, D
CASES = {"2 us": (8, 64, 16, 16), "30 us": (4, 64, 128, 32), "500 us": (1, 64, 256, 256)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2, 8, 16, 64))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=20, help="timed in a row; in every round")
    parser.add_argument("--records", type=Path, help="default: evidence/records/...")
    options = parser.parse_args()
    if 1 not in options.threads:
        parser.error("--threads must name 1, which the others are compared with")
    torch.manual_seed(0)
    with torch.inference_mode():
        for case, (B, H, T, D) in CASES.items():
            q, k, v = torch.randn(3, B, H, T, D)
            calls = 1 + options.calls // (5 if case == "500 us" else 1)
            times = measure(q, k, v, options.threads, options.rounds, calls)
            write(case, (B, H, T, D), times, options.records or record.default_path())


def measure(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    numbers: list[int],
    rounds: int,
    calls: int,
) -> dict[tuple[str, int], list[float]]:
    """Milliseconds of every call, by whose threads they are and how many."""
    times: dict[tuple[str, int], list[float]] = {}
    before = torch.get_num_threads()
    for _ in range(rounds):
        for threads in numbers:
            torch.set_num_threads(threads)
            for whose, run in ways(q, k, v, threads).items():
                time.sleep(0.05)  # PyTorch's threads spin for milliseconds after their last call
                warm(run)
                found = record.interleave({whose: run}, calls)[whose]
                times.setdefault((whose, threads), []).extend(found)
    torch.set_num_threads(before)
    return times


def warm(run: Callable[[], Any], seconds: float = 0.05) -> None:
    """Call until threads that slept while others ran are where the scheduler wants them."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        run()


def ways(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, threads: int
) -> dict[str, Callable[[], Any]]:
    """The same call on the core's threads, on PyTorch's, and as users call it."""
    inputs = prepare("attention", q, k, v, None)[0]
    results, (B, H, T, D) = Results(*cpu.operators.forward(*inputs)), q.shape
    arrays = {name: core.Array(x.data_ptr(), *x.stride()[:3]) for name, x in zip("qkv", (q, k, v), strict=True)}  # fmt: skip

    def run(team: int) -> None:
        sizes = {"B": B, "H": H, "G": H, "T": T, "S": T, "D": D, "E": D}
        numbers = {"scale": inputs.scale, "tolerance": inputs.tolerance, "num_threads": threads}
        dtype = core.DTYPES["float32"]
        core.forward(
            core.Call(
                dtype=dtype, left=inputs.left.data_ptr(), team=team, **sizes, **numbers, **arrays
            ),
            cpu._forward(results),
        )

    found: dict[str, Callable[[], Any]] = {"kept": lambda: run(0)}
    if addresses.TEAM:
        found["PyTorch's"] = lambda: run(addresses.TEAM)
    found["attention"] = lambda: attention(q, k, v, implementation="cpu")
    return found


def write(
    case: str,
    sizes: tuple[int, int, int, int],
    times: dict[tuple[str, int], list[float]],
    records: Path,
) -> None:
    for (whose, threads), found in times.items():
        line: dict[str, Any] = {"case": f"threads, tasks of {case}", "implementation": whose, "mode": "forward"}  # fmt: skip
        line |= dict(zip("BHTD", sizes, strict=True)) | record.spread(found) | record.here()
        line["threads"], line["repeats"] = threads, len(found)
        alone = record.spread(times[whose, 1])["p50_ms"] / min(threads, num_cores())
        line["over_ms"] = round(line["p50_ms"] - alone, 4)
        record.write(line, records)
        print(
            f"{line['case']:24} {whose:10} {threads:4} threads {line['p50_ms']:9.3f} ms, "
            f"{line['over_ms'] * 1e3:7.0f} us over ideal",
            flush=True,
        )


if __name__ == "__main__":
    main()
