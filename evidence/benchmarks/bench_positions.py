"""Time attention whose keys stand at given positions, beside the call that counts them and PyTorch's with the bias as a mask.

    python evidence/benchmarks/bench_positions.py                       # every case below, records to evidence/records/
    python evidence/benchmarks/bench_positions.py --cases counted-8192 --targets avx512 --repeats 21

Positions are those that every call has by default, 0, 1, 2 ..., which shows what it costs to read them; or sums of -log f
over forget gates f = sigmoid(N(4, 1.5)), about 0.98, with slope 1. Every result is checked before it is timed.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linbias
import linbias.torch
import record
from linbias.kernels import core

B, H, D = 1, 8, 64
ALLOWED_ERROR = {"float32": 2e-5, "bfloat16": 2e-2}
COUNTED, PLACED, LEARNED, MASK = "cpu, counted", "cpu, positions", "cpu, learned", "sdpa mask"


@dataclass(frozen=True)
class BenchCase:
    name: str
    T: int
    gates: bool = False
    dtype: str = "float32"
    backward: bool = False

    @property
    def implementations(self) -> tuple[str, ...]:
        if not self.gates:
            return COUNTED, PLACED
        return (PLACED, LEARNED, MASK) if self.backward else (PLACED, MASK)


CASES = tuple(
    BenchCase(f"{kind}-{T}{'-bfloat16' * (dtype != 'float32')}{'-training' * backward}",
              T, kind == "gates", dtype, backward)
    for kind, T in (("counted", 2048), ("counted", 8192), ("gates", 4096), ("gates", 8192))
    for dtype in ("float32", "bfloat16")
    for backward in (False, True)
)  # fmt: skip


def positions_of(case: BenchCase) -> Tensor:
    """[B, H, T] of gates, [B, T] where counted; float64."""
    if not case.gates:
        return torch.arange(case.T, dtype=torch.float64).expand(B, -1)
    gates = torch.randn(B, H, case.T, dtype=torch.float64) * 1.5 + 4
    return -torch.nn.functional.logsigmoid(gates).cumsum(-1)


def functions(
    case: BenchCase, q: Tensor, k: Tensor, v: Tensor, x: Tensor, learned: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Everything that can run this case, by name."""
    options: dict[str, Any] = {"implementation": "cpu"}
    if case.gates:
        options["slopes"] = torch.ones(H)
    found: dict[str, Callable[[], Tensor]] = {
        COUNTED: lambda: linbias.torch.attention(q, k, v, **options),
        PLACED: lambda: linbias.torch.attention(q, k, v, positions=x, **options),
        LEARNED: lambda: linbias.torch.attention(q, k, v, positions=learned, **options),
    }
    if MASK in case.implementations:
        bias = torch.empty(B, H, case.T, case.T, dtype=q.dtype)
        future = torch.ones(case.T, case.T, dtype=torch.bool).triu_(1)
        for h in range(H):  # one at a time, since float64 of all heads would be 4 GB
            distance = x[0, h, :, None] - x[0, h]
            bias[0, h] = (-distance).masked_fill_(future, -torch.inf)
        plain = torch.nn.functional.scaled_dot_product_attention
        found[MASK] = lambda: plain(q, k, v, attn_mask=bias)
    return {name: found[name] for name in case.implementations}


def check(
    case: BenchCase, name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, x: Tensor
) -> None:
    """Compare a few rows with the NumPy definition."""
    slopes = [1.0] * H if case.gates else None
    for t in (0, case.T // 3, case.T - 1):
        seen = slice(0, t + 1)
        arrays = (q[:, :, t : t + 1], k[:, :, seen], v[:, :, seen])
        wide = (y.detach().double().numpy() for y in arrays)
        expected = linbias.attention(*wide, slopes, positions=x[..., seen].numpy())
        error = (out[:, :, t : t + 1].detach().double() - torch.from_numpy(expected)).abs().max()
        # The mask's positions are rounded to bfloat16 with it.
        if not error < ALLOWED_ERROR[case.dtype] * (10 if name == MASK else 1):
            raise SystemExit(f"{case.name}: {name} is wrong: row {t} is off by {error:.3g}")


def bench(case: BenchCase, target: str, options: argparse.Namespace) -> None:
    core.force_target(target)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, case.T, D).to(getattr(torch, case.dtype))
    x = positions_of(case)
    learned = x.clone().requires_grad_()
    runnable = functions(case, q, k, v, x, learned)
    for name, function in runnable.items():
        check(case, name, function(), q, k, v, x)
    timed: dict[str, Callable[[], Any]] = dict(runnable)
    if case.backward:
        dout = torch.randn_like(q)
        leaves = [y.requires_grad_() for y in (q, k, v)]
        of = {name: [*leaves, learned] if name == LEARNED else leaves for name in runnable}
        timed = {n: lambda n=n: torch.autograd.grad(runnable[n](), of[n], dout) for n in runnable}
    with torch.set_grad_enabled(case.backward):
        times = record.interleave(timed, options.repeats)
    slopes = torch.ones(H) if case.gates else None
    kept = linbias.torch.visited(q, k, v, slopes, positions=x, implementation="cpu").work_kept
    medians = {name: record.spread(values)["p50_ms"] for name, values in times.items()}
    for name, values in times.items():
        record.write({
            "case": f"positions-{case.name}", "implementation": name,
            "mode": "forward+backward" if case.backward else "forward",
            "B": B, "H": H, "G": H, "T": case.T, "S": case.T, "D": D, "dtype": case.dtype,
            **record.spread(values), "repeats": options.repeats, "peak_memory_bytes": None,
            "flop": record.flop(B, H, case.T, case.T, D) * (7 if case.backward else 2) // 2,
            "bytes": record.moved_bytes(B, H, H, case.T, case.T, D, q.element_size()) * (3 if case.backward else 1),
            "work_kept": None if name == MASK else round(kept.mean().item(), 4),
            "inputs": "random normal", "target": None if name == MASK else target, **record.here(),
        }, options.records)  # fmt: skip
        ratio = medians[name] / medians[case.implementations[0]]
        print(
            f"{case.name:32} {target:12} {name:16} {medians[name]:10.1f} ms  {ratio:6.2f}"
            + ("" if name == MASK else f"  work kept {kept.mean().item():.1%}"),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--targets", nargs="+", default=[core.target()], choices=core.targets())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--records", type=Path, help="file to append to (default: evidence/records/...)"
    )
    options = parser.parse_args()
    options.records = options.records or record.default_path()
    for case in CASES:
        for target in options.targets if case.name in options.cases else ():
            bench(case, target, options)


if __name__ == "__main__":
    main()
