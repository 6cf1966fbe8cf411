"""Time attention over the points of a plane and what a user can write today, interleaved.

    python evidence/benchmarks/bench_points.py                    # 7,000 and 28,000 points
    python evidence/benchmarks/bench_points.py --points 7000 --backward
    python evidence/benchmarks/bench_points.py --points 100000 --memory   # of one layer

The points are cells of a square grid, 70% of it and in any order, as tiles of tissue on a slide;
the slopes are the paper's. Peers: PyTorch's scaled_dot_product_attention without a bias (for
scale: it computes something else), and with the bias as its mask, made before the call and in it,
where that has room. A few rows of every result are checked.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import linbias
import linbias.torch
import record
from linbias.kernels import core
from linbias.torch.points import cpu, functional

MASK_LIMIT_BYTES = 3 * 2**30  # beyond this the bias as a mask is left out
ALLOWED_ERROR = 2e-5
H, D = 12, 64


def grid(num_points: int) -> Tensor:
    """[num_points, 2]: cells of the smallest square grid that is at most 70% full."""
    side = math.ceil((num_points / 0.7) ** 0.5)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return cells[torch.randperm(len(cells))[:num_points]]


def functions(q: Tensor, k: Tensor, v: Tensor, points: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Everything that can run this case, by name."""
    attend = partial(linbias.torch.attention_points, q, k, v, points)
    plain = partial(scaled_dot_product_attention, q, k, v)
    found: dict[str, Callable[[], Tensor]] = {
        "cpu": partial(attend, implementation="cpu"),
        "sdpa, no bias": plain,
    }
    if H * len(points) ** 2 * q.element_size() < MASK_LIMIT_BYTES:
        found["sdpa mask"] = partial(plain, attn_mask=bias_of(points, points)[None])
        slopes, at = -torch.tensor(linbias.slopes(H), dtype=torch.float32), points.float()
        found["sdpa mask, made"] = lambda: plain(
            attn_mask=(torch.cdist(at, at) * slopes[:, None, None])[None]
        )
    return found


def bias_of(rows: Tensor, columns: Tensor) -> Tensor:
    """[H, rows, columns]"""
    slopes = torch.tensor(linbias.slopes(H), dtype=torch.float32)
    way = "donot_use_mm_for_euclid_dist"
    apart = torch.cdist(rows.double(), columns.double(), compute_mode=way)
    return apart.float() * -slopes[:, None, None]


def check(name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, points: Tensor) -> None:
    """Compare a few rows with the definition."""
    N = len(points)
    rows = torch.tensor([0, N // 3, N - 1])
    scores = q[:, :, rows].double() @ k.double().mT * D**-0.5 + bias_of(points[rows], points)
    error = (out[:, :, rows] - scores.softmax(-1) @ v.double()).abs().max().item()
    if not error < ALLOWED_ERROR:
        raise SystemExit(f"{name} is wrong at {N} points: off by {error:.3g}")


def work_kept(q: Tensor, k: Tensor, v: Tensor, points: Tensor) -> float:
    """The share of blocks that the core reads."""
    inputs, _ = functional._prepare("bench", (q, k, v), points, None)
    visited = cpu.run(inputs).visited
    return round(visited.double().mean().item() / -(-len(points) // core.BLOCK_KEYS), 4)


def bench(num_points: int, given: record.Fields, options: argparse.Namespace) -> None:
    """Time everything that can run a number of points, and write the records."""
    q, k, v = torch.randn(3, 1, H, num_points, D)
    points = grid(num_points)
    timed: dict[str, Callable[[], Any]] = dict(functions(q, k, v, points))
    for name, function in timed.items():
        if name != "sdpa, no bias":
            check(name, function(), q, k, v, points)
    more: dict[str, dict[str, Any]] = {name: {"work_kept": None} for name in timed}
    more["cpu"] = {"work_kept": work_kept(q, k, v, points), "target": core.target()}
    if options.backward:
        dout, leaves = torch.randn_like(v), [x.requires_grad_() for x in (q, k, v)]
        timed = {n: lambda f=f: torch.autograd.grad(f(), leaves, dout) for n, f in timed.items()}
    record.compare(given, timed, options, more)


def prepare_memory(name: str, num_points: int) -> Callable[[], Any]:
    """One forward and backward pass, whose memory is measured."""
    attend = partial(linbias.torch.attention_points, implementation=name)
    small = [torch.randn(1, H, 64, D, requires_grad=True) for _ in "qkv"]
    attend(*small, grid(64)).sum().backward()
    *arrays, dout = torch.randn(4, 1, H, num_points, D)
    leaves, points = [x.requires_grad_() for x in arrays], grid(num_points)
    return lambda: attend(*leaves, points).backward(dout)


def main() -> None:
    parser = record.parser(__doc__, repeats=3)
    parser.add_argument("--points", type=int, nargs="+", default=[7000, 28000])
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    parser.add_argument("--memory", action="store_true", help="the memory of one layer instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    mode = record.BACKWARD if options.backward or options.memory else record.FORWARD
    inputs = "random normal, 70% of a square grid"
    for N in options.points:
        case = f"points-{'memory-' * options.memory}{N}"
        given = record.fields(case, (1, H, N, D), (1, H, N, D), "float32", mode, False, inputs)
        if options.memory:
            record.measure_memory(given, options, prepare_memory, ["cpu"], N)
        else:
            bench(N, given, options)


if __name__ == "__main__":
    main()
