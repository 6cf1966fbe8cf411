"""How the kernel's time grows with length, how near its visited tiles come to the rate of plain products, and what training does.

    python runs/kernel_rates.py                # rewrites three tables in docs/kernels.md, appends records
    python runs/kernel_rates.py training       # one of them

B=1, H=8, D=64, causal, random normal inputs; everything in one table is interleaved in one run.
"""

import sys
from collections.abc import Callable
from functools import partial
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
TRAINING_LENGTHS = (1024, 2048, 4096)
PRODUCTS = 7 / 2  # of forward and backward, for each of forward's two
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
        cases = {
            f"{name}, 8,192 tokens": (inputs(8192, dtype), slopes),
            f"{name}, 4,096 tokens, slopes 0": (inputs(4096, dtype), slopes * 0),
        }
        functions = {
            case: lambda x=x, s=s: linbias.torch.attention(*x, s) for case, (x, s) in cases.items()
        }
        times = record.interleave(functions | plain_products(dtype), repeats=15)
        product = plain_rate(times)
        for case, (x, s) in cases.items():
            length, taken = x[0].shape[2], record.spread(times[case])
            kept = work_kept(x, s)
            rate = visited_flop(length, kept) / taken["p50_ms"] / 1e6
            lines.append(f"| {case} | {rate:,.0f} | {product:,.0f} | {rate / product:.0%} |")
            note(f"rate-{case}", length, name, taken, kept)
    return "\n".join(lines)


def plain_products(dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """A product of two square matrices by each of PyTorch's libraries."""
    a, b = torch.randn(2, PRODUCT, PRODUCT).to(dtype)
    return {
        "MKL": lambda: a @ b,
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""),
    }


def plain_rate(times: dict[str, list[float]]) -> float:
    """GFLOP/s of the faster library."""
    return (
        2
        * PRODUCT**3
        / min(record.spread(times[name])["p50_ms"] for name in ("MKL", "oneDNN"))
        / 1e6
    )


def training(slopes: torch.Tensor) -> str:
    """Forward and backward of 4,096 tokens in all: how the lead over PyTorch's attention is made up."""
    lines = [
        "| tokens | ms | PyTorch, no bias, ms | times as fast | work kept | pairs computed for one seen | GFLOP/s in visited tiles "
        "| PyTorch's | plain products |",
        "|---" * 9 + "|",
    ]
    plain = torch.nn.functional.scaled_dot_product_attention
    products = plain_products(torch.float32)
    for length in TRAINING_LENGTHS:
        arrays = torch.randn(3, 4096 // length, HEADS, length, SIZE)
        leaves = [x.clone().requires_grad_() for x in arrays]
        dout = torch.randn_like(arrays[0])
        ours = partial(linbias.torch.attention, *leaves, slopes, implementation="cpu")
        theirs = partial(plain, *leaves, is_causal=True)
        functions = {
            "ours": lambda ours=ours, x=leaves, d=dout: torch.autograd.grad(ours(), x, d),
            "theirs": lambda theirs=theirs, x=leaves, d=dout: torch.autograd.grad(theirs(), x, d),
        }
        with torch.no_grad():
            found = linbias.torch.visited(*arrays, slopes, implementation="cpu")
        kept = found.work_kept.mean().item()
        tiles = (found.end - found.first).sum().item() * found.tile_rows  # the last tile is short
        computed = tiles / (found.work_kept.sum().item() * length * (length + 1) / 2)
        times = record.interleave(functions | products, repeats=15)
        taken = {name: record.spread(found)["p50_ms"] for name, found in times.items()}
        flop = record.flop(len(arrays[0]), HEADS, length, length, SIZE) * PRODUCTS
        product = plain_rate(times)
        ours_rate, their_rate = flop * kept / taken["ours"] / 1e6, flop / taken["theirs"] / 1e6
        lines.append(
            f"| {length:,} | {taken['ours']:.0f} | {taken['theirs']:.0f} | {taken['theirs'] / taken['ours']:.2f}"
            f" | {kept:.0%} | {computed:.2f} | {ours_rate:.0f} | {their_rate:.0f} | {product:.0f} |"
        )
        spread = record.spread(times["ours"])
        note(f"training-rate-{length}", length, "float32", spread, kept, mode="backward", B=4096 // length)  # fmt: skip
    return "\n".join(lines)


def note(
    case: str,
    length: int,
    dtype: str,
    spread: dict[str, float],
    kept: float,
    mode: str = "forward",
    B: int = 1,
) -> None:
    line = {
        "case": case, "implementation": "cpu", "mode": mode, "B": B, "H": HEADS, "G": HEADS, "T": length,
        "S": length, "D": SIZE, "dtype": dtype, **spread, "peak_memory_bytes": None,
        "flop": record.flop(B, HEADS, length, length, SIZE), "work_kept": round(kept, 4),
        "bytes": record.moved_bytes(B, HEADS, HEADS, length, length, SIZE, 4 if dtype == "float32" else 2),
        "inputs": "random normal", "target": core.target(), **record.here(),
    }  # fmt: skip
    record.write(line, record.default_path())


def main() -> None:
    torch.manual_seed(0)
    slopes = torch.tensor(linbias.slopes(HEADS), dtype=torch.float32)
    here = record.here()
    source = f"\n\n{here['machine']}, {here['date']}, `python runs/kernel_rates.py`."
    tables = {"growth": growth, "rates": rates, "training": training}
    for name in sys.argv[1:] or tables:
        make = tables[name]
        content = make(slopes) + source
        print(content, flush=True)
        fill("docs/kernels.md", {name: content})


if __name__ == "__main__":
    main()
