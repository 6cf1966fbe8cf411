"""Time attention over the points of a plane and what a user can write today, interleaved in one run.

    python evidence/benchmarks/bench_points.py                                # 7,000 and 28,000 points, forward
    python evidence/benchmarks/bench_points.py --points 7000 --backward
    python evidence/benchmarks/bench_points.py --points 100000 --memory       # one layer, forward and backward, in a fresh process

The points are cells of a square grid, 70% of it and in any order, as tiles of tissue on a slide; the slopes are the
paper's. Peers: PyTorch's scaled_dot_product_attention without a bias (for scale: it computes something else), and with the bias
as its mask, made before the call and in it, where that has room. Results are checked against `dense` in a few rows. Records go to records, or where --records says.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import linbias
import linbias.torch
import record
from linbias._request import TOLERANCE
from linbias.kernels import core
from linbias.torch.points import blocked as points_blocked
from linbias.torch.points import cpu as points_cpu
from linbias.torch.points import functional

MASK_LIMIT_BYTES = 3 * 2**30  # beyond this the bias as a mask is left out
ALLOWED_ERROR = 2e-5
NEAR_TO_FAR = {"cpu": points_cpu, "blocked": points_blocked}


def grid(num_points: int) -> Tensor:
    """[num_points, 2]: cells of the smallest square grid that is at most 70% full."""
    side = math.ceil((num_points / 0.7) ** 0.5)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return cells[torch.randperm(len(cells))[:num_points]]


def functions(
    q: Tensor, k: Tensor, v: Tensor, points: Tensor, ours: list[str]
) -> dict[str, Callable[[], Tensor]]:
    """Everything that can run this case, by name."""
    plain = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], Tensor]] = {
        name: lambda name=name: linbias.torch.attention_points(
            q, k, v, points, implementation=name
        )
        for name in ours
    }
    found["sdpa, no bias"] = lambda: plain(q, k, v)
    H, N = q.shape[1:3]
    if H * N * N * q.element_size() < MASK_LIMIT_BYTES:
        bias = bias_of(points, points, H)[None]
        found["sdpa mask"] = lambda: plain(q, k, v, attn_mask=bias)
        slopes, at = -torch.tensor(linbias.slopes(H), dtype=torch.float32), points.float()
        found["sdpa mask, made"] = lambda: plain(
            q, k, v, attn_mask=(torch.cdist(at, at) * slopes[:, None, None])[None]
        )
    return found


def bias_of(rows: Tensor, columns: Tensor, num_heads: int) -> Tensor:
    """[H, rows, columns]"""
    slopes = torch.tensor(linbias.slopes(num_heads), dtype=torch.float32)
    apart = torch.cdist(
        rows.double(), columns.double(), compute_mode="donot_use_mm_for_euclid_dist"
    )
    return apart.float() * -slopes[:, None, None]


def check(name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, points: Tensor) -> None:
    """Compare a few rows with the definition."""
    N = len(points)
    rows = torch.tensor([0, N // 3, N - 1])
    bias = bias_of(points[rows], points, q.shape[1]).double()
    scores = q[:, :, rows].double() @ k.double().mT * q.shape[3] ** -0.5 + bias
    error = (out[:, :, rows] - scores.softmax(-1) @ v.double()).abs().max().item()
    if not error < ALLOWED_ERROR:
        raise SystemExit(f"{name} is wrong at {N} points: off by {error:.3g}")


def work_kept(name: str, q: Tensor, k: Tensor, v: Tensor, points: Tensor) -> float | None:
    """The share of blocks that one of our implementations reads."""
    if name not in NEAR_TO_FAR:
        return None
    inputs, _ = functional._prepare("bench", (q, k, v), points, None, "euclidean", 0, None, None)
    visited = NEAR_TO_FAR[name].operators.run(inputs).visited
    size = core.BLOCK_KEYS if name == "cpu" else points_blocked.SIZE
    return round(visited.double().mean().item() / -(-len(points) // size), 4)


def work_needed(q: Tensor, k: Tensor, points: Tensor) -> float:
    """The share of pairs that no choice can do without, each row losing at most the tolerance of its weights."""
    H, N, D = q.shape[1:]
    needed = 0
    for rows in torch.arange(N).split(500):
        bias = bias_of(points[rows], points, H)
        for h in range(H):
            weights = (q[0, h, rows] @ k[0, h].T * D**-0.5 + bias[h]).softmax(-1)
            dropped = weights.sort(-1).values.double().cumsum(-1) <= TOLERANCE["float32"]
            needed += int((~dropped).sum())
    return needed / (H * N * N)


def describe(q: Tensor, name: str, backward: bool, times: list[float]) -> dict[str, object]:
    """The fields that every record has."""
    B, H, N, D = q.shape
    return {
        "case": f"points-{N}", "implementation": name,
        "mode": "forward+backward" if backward else "forward",
        "B": B, "H": H, "G": H, "T": N, "S": N, "D": D, "dtype": "float32",
        **record.spread(times), "repeats": len(times), "peak_memory_bytes": None,
        "flop": record.flop(B, H, N, N, D, False) * (7 if backward else 2) // 2,
        "bytes": record.moved_bytes(B, H, H, N, N, D, 4) * (3 if backward else 1),
        "work_kept": None, "inputs": "random normal, 70% of a square grid",
        "target": core.target() if name == "cpu" else None, **record.here(),
    }  # fmt: skip


def bench(num_points: int, options: argparse.Namespace, path: Path) -> None:
    """Time everything that can run a number of points, and write the records."""
    q, k, v = torch.randn(3, 1, options.heads, num_points, options.head_size)
    points = grid(num_points)
    runnable = functions(q, k, v, points, options.implementations)
    for name, function in runnable.items():
        if name != "sdpa, no bias":
            check(name, function(), q, k, v, points)
    kept = {name: work_kept(name, q, k, v, points) for name in runnable}
    needed = round(work_needed(q, k, points), 4) if "sdpa mask" in runnable else None
    timed = runnable
    if options.backward:
        dout = torch.randn_like(v)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        timed = {
            name: lambda f=f: torch.autograd.grad(f(), leaves, dout)
            for name, f in runnable.items()
        }
    times = record.interleave(timed, options.repeats)
    first = record.spread(next(iter(times.values())))["p50_ms"]
    for name, values in times.items():
        line = describe(q, name, options.backward, values) | {
            "work_kept": kept[name],
            "work_needed": needed,
        }
        record.write(line, path)
        share = "" if kept[name] is None else f"  work kept {kept[name]:.1%}"
        print(
            f"{line['case']:14} {name:15} {line['p50_ms']:10.1f} ms  {line['p50_ms'] / first:6.2f}{share}",
            flush=True,
        )


def layer(name: str, num_points: int, heads: int, size: int, results) -> None:
    """One forward and backward pass; report its time, the most that the process had in memory, and what it had before."""
    small = [torch.randn(1, heads, 64, size, requires_grad=True) for _ in "qkv"]
    linbias.torch.attention_points(*small, grid(64), implementation=name).sum().backward()
    q, k, v, dout = torch.randn(4, 1, heads, num_points, size)
    points = grid(num_points)
    for x in (q, k, v):
        x.requires_grad_()
    before = record.memory_bytes()
    start = time.perf_counter()
    linbias.torch.attention_points(q, k, v, points, implementation=name).backward(dout)
    elapsed = (time.perf_counter() - start) * 1e3
    results.put((elapsed, record.memory_bytes(peak=True), before))


def measure_memory(num_points: int, options: argparse.Namespace, path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for name in options.implementations:
        results = context.Queue()
        arguments = (name, num_points, options.heads, options.head_size, results)
        process = context.Process(target=layer, args=arguments)
        process.start()
        elapsed, peak, before = results.get()
        process.join()
        shape = torch.empty(1, options.heads, num_points, options.head_size, device="meta")
        line = describe(shape, name, True, [elapsed])
        line |= {"case": f"points-memory-{num_points}", "peak_memory_bytes": peak - before}
        record.write(line, path)
        print(
            f"{name}: {elapsed / 1e3:.1f} s forward + backward of {num_points:,} points, at most {peak / 2**30:.2f} GiB"
            f" in memory, of which {before / 2**30:.2f} GiB were there with the inputs"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, nargs="+", default=[7000, 28000])
    parser.add_argument("--implementations", nargs="+", default=["cpu", "blocked"])
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    parser.add_argument("--memory", action="store_true", help="the memory of one layer instead")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--records", type=Path, help="file to append to (default: evidence/records/...)"
    )
    options = parser.parse_args()
    path = options.records or record.default_path()
    torch.manual_seed(0)
    for num_points in options.points:
        (measure_memory if options.memory else bench)(num_points, options, path)


if __name__ == "__main__":
    main()
