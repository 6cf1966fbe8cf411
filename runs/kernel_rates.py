"""How the kernel's time grows with length, and how near its visited tiles come to the rate of plain products.

    python runs/kernel_rates.py            # rewrites two tables in docs/kernels.md, appends records

B=1, H=8, D=64, causal, random normal inputs; everything in one table is interleaved in one run.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from markers import fill  # noqa: E402

import linbias  # noqa: E402
import record  # noqa: E402
from linbias.kernels import core  # noqa: E402

HEADS, SIZE = 8, 64
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
PRODUCT = 2048  # rows, columns and depth of the plain product


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, HEADS, length, SIZE).to(dtype))


def work_kept(arrays: tuple[torch.Tensor, ...], slopes: torch.Tensor) -> float:
    found = linbias.torch.visited(*arrays, slopes, implementation="cpu")
    return found.work_kept.mean().item()


def visited_flop(length: int, kept: float) -> float:
    """Of both products, in the blocks that are visited."""
    return record.flop(1, HEADS, length, length, SIZE) * kept


def growth(slopes: torch.Tensor) -> str:
    arrays = {length: inputs(length) for length in LENGTHS}
    times = record.interleave(
        {n: lambda a=a: linbias.torch.attention(*a) for n, a in arrays.items()}, repeats=7
    )
    kept = {n: work_kept(a, slopes) for n, a in arrays.items()}
    spreads = {str(n): record.spread(times[n]) for n in LENGTHS}
    lines = ["| tokens | ms | ns per token | keys visited per query and head | work kept |"]
    lines.append("|---" * 5 + "|")
    for n in LENGTHS:
        s = spreads[str(n)]
        lines.append(
            f"| {n:,} | {s['p50_ms']:,.1f} ({s['p20_ms']:,.1f} to {s['p80_ms']:,.1f})"
            f" | {s['p50_ms'] * 1e6 / n:,.0f} | {kept[n] * (n + 1) / 2:,.0f} | {kept[n]:.1%} |"
        )
        note(f"growth-{n}", n, "float32", s, kept[n])
    ratio = spreads["131072"]["p50_ms"] / spreads["16384"]["p50_ms"]
    lines += [
        "",
        f"From 16,384 to 131,072 tokens the time grows {ratio:.2f} times (8 would be linear).",
    ]
    return "\n".join(lines)


def rates(slopes: torch.Tensor) -> str:
    lines = ["| case | GFLOP/s in visited tiles | plain products | share |", "|---" * 4 + "|"]
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        a, b = torch.randn(2, PRODUCT, PRODUCT).to(dtype)
        cases = {
            f"{name}, 8,192 tokens": (inputs(8192, dtype), slopes),
            f"{name}, 4,096 tokens, slopes 0": (inputs(4096, dtype), slopes * 0),
        }
        functions = {
            case: lambda x=x, s=s: linbias.torch.attention(*x, s) for case, (x, s) in cases.items()
        }
        times = record.interleave(functions | {"product": lambda a=a, b=b: a @ b}, repeats=15)
        product = 2 * PRODUCT**3 / record.spread(times["product"])["p50_ms"] / 1e6
        for case, (x, s) in cases.items():
            length, taken = x[0].shape[2], record.spread(times[case])
            kept = work_kept(x, s)
            rate = visited_flop(length, kept) / taken["p50_ms"] / 1e6
            lines.append(f"| {case} | {rate:,.0f} | {product:,.0f} | {rate / product:.0%} |")
            note(f"rate-{case}", length, name, taken, kept)
    return "\n".join(lines)


def note(case: str, length: int, dtype: str, spread: dict[str, float], kept: float) -> None:
    line = {
        "case": case, "implementation": "cpu", "mode": "forward", "B": 1, "H": HEADS, "G": HEADS, "T": length,
        "S": length, "D": SIZE, "dtype": dtype, **spread, "peak_memory_bytes": None,
        "flop": record.flop(1, HEADS, length, length, SIZE), "work_kept": round(kept, 4),
        "bytes": record.moved_bytes(1, HEADS, HEADS, length, length, SIZE, 4 if dtype == "float32" else 2),
        "inputs": "random normal", "target": core.target(), **record.here(),
    }  # fmt: skip
    record.write(line, record.default_path())


def main() -> None:
    torch.manual_seed(0)
    slopes = torch.tensor(linbias.slopes(HEADS), dtype=torch.float32)
    here = record.here()
    source = f"\n\n{here['machine']}, {here['date']}, `python runs/kernel_rates.py`."
    for name, make in (("growth", growth), ("rates", rates)):
        content = make(slopes) + source
        print(content, flush=True)
        fill("docs/kernels.md", {name: content})


if __name__ == "__main__":
    main()
