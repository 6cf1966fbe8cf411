"""Time linear-bias attention and the peers that a user can write today, interleaved in one run.

    python evidence/benchmarks/bench_attention.py                       # every case below, records to evidence/records/
    python evidence/benchmarks/bench_attention.py --cases causal-8192 zero-slopes-4096 --repeats 9
    python evidence/benchmarks/bench_attention.py --model output/extrapolate/models/alibi-L128-s0   # its q, k and v

Peers: PyTorch's scaled_dot_product_attention with the bias as a mask, the same causal without a bias (for scale
only: it computes something else), FlexAttention with an ALiBi score_mod, and that with a BlockMask of a window
per head, as wide as a bound from the norms allows. Every result is checked before it is timed.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import linbias
import linbias.torch
import record
from linbias._request import TOLERANCE
from linbias.kernels import core

MASK_LIMIT_BYTES = 3 * 2**30  # beyond this the bias as a mask is left out
ALLOWED_ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class BenchCase:
    name: str
    T: int
    B: int = 1
    dtype: str = "float32"
    backward: bool = False
    causal: bool = True
    zero_slopes: bool = False
    ours: tuple[str, ...] = ("cpu", "blocked")
    peers: tuple[str, ...] = ("sdpa mask", "sdpa, no bias", "flex", "flex, window mask")


CASES = (
    BenchCase("short-256", 256, B=8, ours=("cpu", "blocked", "dense")),
    BenchCase("causal-2048", 2048, ours=("cpu", "blocked", "dense")),
    BenchCase("causal-8192", 8192),
    BenchCase("causal-32768", 32768, ours=("cpu",), peers=("flex", "flex, window mask")),
    BenchCase("causal-16384", 16384, ours=("cpu",), peers=()),
    BenchCase("causal-131072", 131072, ours=("cpu",), peers=()),
    BenchCase("bfloat16-8192", 8192, dtype="bfloat16"),
    BenchCase("symmetric-8192", 8192, causal=False),
    BenchCase("zero-slopes-4096", 4096, zero_slopes=True, ours=("cpu",), peers=("sdpa, no bias",)),
    BenchCase(
        "zero-slopes-bfloat16-4096",
        4096,
        dtype="bfloat16",
        zero_slopes=True,
        ours=("cpu",),
        peers=("sdpa, no bias",),
    ),
    BenchCase("training-4096", 4096, backward=True, peers=("sdpa mask", "sdpa, no bias")),
    BenchCase("training-512", 512, B=4, backward=True, peers=("sdpa mask", "sdpa, no bias")),
)


def functions(
    case: BenchCase, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Everything that can run this case, by name."""
    T, S = q.shape[2], k.shape[2]
    plain = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], Tensor]] = {}
    for name in case.ours:
        if q.device.type == "cpu" or name != "cpu":
            found[name] = lambda name=name: linbias.torch.attention(
                q, k, v, slopes, causal=case.causal, implementation=name
            )
    if "sdpa mask" in case.peers and slopes.numel() * T * S * q.element_size() < MASK_LIMIT_BYTES:
        right = [math.inf] * len(slopes) if case.causal else None
        # Of four axes: with three, PyTorch leaves its fused way and is several times slower.
        bias = torch.from_numpy(linbias.bias(slopes.tolist(), T, S, right)).to(q)[None]
        found["sdpa mask"] = lambda: plain(q, k, v, attn_mask=bias)
    if "sdpa, no bias" in case.peers:
        found["sdpa, no bias"] = lambda: plain(q, k, v, is_causal=case.causal)
    if case.backward and q.device.type == "cpu":
        return found  # FlexAttention has no backward pass on a CPU

    def score(s, b, h, i, j):
        return s - slopes[h] * (i - j).abs()

    window = window_per_head(q, k, slopes)
    compiled, make_mask = torch.compile(flex_attention), torch.compile(create_block_mask)
    masks = {
        "flex": lambda b, h, i, j: i >= j if case.causal else i >= 0,
        "flex, window mask": lambda b, h, i, j: (
            ((i >= j) if case.causal else (i >= 0)) & ((i - j).abs() <= window[h])
        ),
    }
    for name, mask in masks.items():
        if name in case.peers:
            heads = len(slopes) if "window" in name else None
            block_mask = make_mask(mask, None, heads, T, S, device=q.device.type)
            found[name] = lambda m=block_mask: compiled(q, k, v, score_mod=score, block_mask=m)
    return found


def window_per_head(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    """The window that the largest norms allow, in whole keys: [H]."""
    q_norm, k_norm = (float(torch.linalg.vector_norm(x.float(), dim=-1).max()) for x in (q, k))
    window = linbias.near_to_far.window(
        slopes.tolist(),
        q_norm,
        k_norm,
        scale=q.shape[-1] ** -0.5,
        tolerance=TOLERANCE[_dtype(q)],
        num_keys=k.shape[2],
    )
    return torch.from_numpy(window).ceil().clamp(max=k.shape[2]).long()


def check(
    case: BenchCase, name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor
) -> None:
    """Compare a few rows with the NumPy definition; the peer without a bias computes something else."""
    if name == "sdpa, no bias" and not case.zero_slopes:
        return
    T = q.shape[2]
    for t in (0, T // 3, T - 1):
        row = q[:, :, t : t + 1]
        if case.causal:
            arrays, extra = (row, k[:, :, : t + 1], v[:, :, : t + 1]), None
        else:  # a query at t among T keys: as the last one, the keys behind it turned to the other side
            arrays, extra = (row, k, v), -torch.abs(torch.arange(T) - t)
        wide = [x.detach().double().cpu() for x in arrays]
        if extra is None:
            expected = torch.from_numpy(
                linbias.attention(*(x.numpy() for x in wide), slopes.tolist())
            )
        else:
            bias = slopes.double()[:, None, None] * extra
            expected = (
                torch.softmax(wide[0] @ wide[1].mT * q.shape[-1] ** -0.5 + bias, -1) @ wide[2]
            )
        error = (out[:, :, t : t + 1].detach().double().cpu() - expected).abs().max().item()
        if not error < ALLOWED_ERROR[q.dtype]:
            raise SystemExit(f"{case.name}: {name} is wrong: row {t} is off by {error:.3g}")


def bench(
    case: BenchCase, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, options: argparse.Namespace
) -> dict[str, float]:
    """Time everything that can run a case, write the records, and return the medians by name."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    runnable = functions(case, q, k, v, slopes)
    for name, function in runnable.items():
        with torch.no_grad():
            check(case, name, function(), q, k, v, slopes)
    timed = runnable
    if case.backward:
        dout = torch.randn_like(q)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        timed = {
            n: lambda f=f: torch.autograd.grad(f(), leaves, dout) for n, f in runnable.items()
        }
    with torch.set_grad_enabled(case.backward):
        times = record.interleave(timed, options.repeats)
    mode = "forward+backward" if case.backward else "forward"
    first = record.spread(next(iter(times.values())))["p50_ms"]
    for name, values in times.items():
        line = {
            "case": case.name, "implementation": name, "mode": mode,
            "B": B, "H": H, "G": G, "T": T, "S": S, "D": D, "dtype": _dtype(q),
            **record.spread(values), "repeats": options.repeats, "peak_memory_bytes": None,
            "flop": record.flop(B, H, T, S, D, case.causal) * (7 if case.backward else 2) // 2,
            "bytes": record.moved_bytes(B, H, G, T, S, D, q.element_size()) * (3 if case.backward else 1),
            "work_kept": work_kept(case, name, q, k, v, slopes), "inputs": options.inputs,
            "target": core.target() if name == "cpu" else None, **record.here(options.device),
        }  # fmt: skip
        record.write(line, options.records)
        kept = "" if line["work_kept"] is None else f"  work kept {line['work_kept']:.1%}"
        print(
            f"{case.name:26} {name:18} {line['p50_ms']:10.1f} ms  {line['p50_ms'] / first:6.2f}{kept}",
            flush=True,
        )
    return {name: record.spread(values)["p50_ms"] for name, values in times.items()}


def work_kept(
    case: BenchCase, name: str, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor
) -> float | None:
    """The share of visible query-key pairs that our implementations read."""
    if name not in ("blocked", "cpu"):
        return None
    found = linbias.torch.visited(q, k, v, slopes, causal=case.causal, implementation=name)
    return round(found.work_kept.mean().item(), 4)


def trained_inputs(
    folder: Path, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each layer of a model trained here, reading its own corpus."""
    from linbias.data.corpus import load_corpus
    from linbias.models import LinbiasForCausalLM

    model = LinbiasForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ids = torch.from_numpy(load_corpus("stdlib").test[:length].astype("int64"))[None].to(device)
    return inputs_of(model, ids)


def inputs_of(model: torch.nn.Module, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of each layer of a model that reads these tokens."""
    from linbias.models.decoder import positions

    caught = []

    def catch(q, k, v, *args, **kwargs):
        caught.append((q, k, v))
        return linbias.torch.attention(q, k, v, *args, **kwargs)

    positions.attention = catch
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    positions.attention = linbias.torch.attention
    return caught


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", choices=[c.name for c in CASES], default=[c.name for c in CASES]
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model", type=Path, help="take q, k, v from this trained ALiBi model instead of noise"
    )
    parser.add_argument(
        "--records", type=Path, help="file to append to (default: evidence/records/...)"
    )
    options = parser.parse_args()
    options.records = options.records or record.default_path(options.device)
    options.inputs = "trained model" if options.model else "random normal"
    torch.manual_seed(0)
    for case in CASES:
        if case.name not in options.cases:
            continue
        if options.model:
            layers = trained_inputs(options.model, case.T)
            q, k, v = (x.expand(case.B, -1, -1, -1) for x in layers[len(layers) // 2])
        else:
            q, k, v = torch.randn(3, case.B, options.heads, case.T, options.head_size)
        q, k, v = (
            x.detach().to(options.device, getattr(torch, case.dtype)).contiguous()
            for x in (q, k, v)
        )
        slopes = torch.tensor(linbias.slopes(q.shape[1]), dtype=torch.float32, device=q.device)
        bench(case, q, k, v, slopes * 0 if case.zero_slopes else slopes, options)


if __name__ == "__main__":
    main()
