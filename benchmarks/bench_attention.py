"""Time linear-bias attention and the peers that a user can write today, interleaved in one run.

    python benchmarks/bench_attention.py                      # the default suite, records to benchmarks/results
    python benchmarks/bench_attention.py --lengths 2048 --repeats 3
    python benchmarks/bench_attention.py --model output/extrapolate/models/alibi-L128-s0

Peers: PyTorch's scaled_dot_product_attention with the bias as a mask, the same causal without a bias (for scale
only: it computes something else), FlexAttention with an ALiBi score_mod, and that with a BlockMask of a window
per head, as wide as a bound from the norms allows. Every result is checked before it is timed.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import linbias
import linbias.torch
import record
from linbias._checks import TOLERANCE
from linbias.torch import blocked

MASK_LIMIT_BYTES = 3 * 2**30  # beyond this the bias as a mask is left out


def peers(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, backward: bool
) -> dict[str, Callable[[], Tensor]]:
    """Everything that can run this call, by name."""
    T, S = q.shape[2], k.shape[2]
    plain = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], Tensor]] = {
        name: lambda name=name: linbias.torch.attention(q, k, v, slopes, implementation=name)
        for name in ("dense", "blocked")
        if name == "blocked" or slopes.numel() * T * S * 4 * 4 < MASK_LIMIT_BYTES
    }
    if slopes.numel() * T * S * q.element_size() < MASK_LIMIT_BYTES:
        infinite = [math.inf] * len(slopes)
        bias = torch.from_numpy(linbias.bias(slopes.tolist(), T, S, infinite)).to(q)
        found["sdpa mask"] = lambda: plain(q, k, v, attn_mask=bias)
    found["sdpa causal, no bias"] = lambda: plain(q, k, v, is_causal=True)
    if backward and q.device.type == "cpu":
        return found  # FlexAttention has no backward pass on a CPU

    def score(s, b, h, i, j):
        return s - slopes[h] * (i - j)

    window = window_per_head(q, k, slopes)
    compiled, make_mask = torch.compile(flex_attention), torch.compile(create_block_mask)
    for name, mask in (
        ("flex", lambda b, h, i, j: i >= j),
        ("flex, window mask", lambda b, h, i, j: (i >= j) & (i - j <= window[h])),
    ):
        heads = len(slopes) if "window" in name else None
        block_mask = make_mask(mask, None, heads, T, S, device=q.device.type)
        found[name] = lambda m=block_mask: compiled(q, k, v, score_mod=score, block_mask=m)
    return found


def window_per_head(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    """The window that a bound from the largest norms allows: 2 |q| |k| scale + ln(S / tolerance) nats."""
    largest = (torch.linalg.vector_norm(x.float(), dim=-1).amax() for x in (q, k))
    score = math.prod(float(x) for x in largest) * q.shape[-1] ** -0.5
    nats = 2 * score + math.log(k.shape[2] / TOLERANCE[str(q.dtype).removeprefix("torch.")])
    return (nats / slopes).ceil().clamp(max=k.shape[2]).long()


def check(name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> None:
    """Compare a few rows with the NumPy definition; the peer without a bias computes something else."""
    if "no bias" in name:
        return
    for t in (0, q.shape[2] // 3, q.shape[2] - 1):
        rows = (
            x.detach().double().cpu().numpy()
            for x in (q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        )
        expected = torch.from_numpy(linbias.attention(*rows, slopes.tolist()))
        error = (out[:, :, t : t + 1].detach().double().cpu() - expected).abs().max().item()
        allowed = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[q.dtype]
        if not error < allowed:
            raise SystemExit(f"{name} is wrong: row {t} is off by {error:.3g}")


def bench(
    case: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    mode: str,
    options: argparse.Namespace,
) -> None:
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    backward = mode == "forward+backward"
    functions = peers(q, k, v, slopes, backward)
    for name, function in functions.items():
        with torch.no_grad():
            check(name, function(), q, k, v, slopes)
    work = blocked.work_kept(
        blocked.forward(
            *(x.detach() for x in (q, k, v)), slopes, None, None, None, D**-0.5, 0.0,
            TOLERANCE[str(q.dtype).removeprefix("torch.")], False,
        )[3], T, S, H // G,
    ).mean().item()  # fmt: skip
    if backward:
        dout = torch.randn_like(q)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        timed = {
            n: lambda f=f: torch.autograd.grad(f(), leaves, dout) for n, f in functions.items()
        }
    else:
        timed = functions
    with torch.set_grad_enabled(backward):
        times = record.interleave(timed, options.repeats)
    best = record.spread(times["blocked"])["p50_ms"]
    for name, values in times.items():
        line = {
            "case": case, "implementation": name, "mode": mode,
            "B": B, "H": H, "G": G, "T": T, "S": S, "D": D, "dtype": str(q.dtype).removeprefix("torch."),
            **record.spread(values), "repeats": options.repeats, "peak_memory_bytes": None,
            "flop": record.flop(B, H, T, S, D) * (7 if backward else 2) // 2,
            "bytes": record.moved_bytes(B, H, G, T, S, D, q.element_size()) * (3 if backward else 1),
            "work_kept": round(work, 4) if name == "blocked" else None,
            "inputs": options.inputs, **record.here(options.device),
        }  # fmt: skip
        record.write(line, options.records)
        print(
            f"{case:24} {mode:17} {name:22} {line['p50_ms']:10.1f} ms  {line['p50_ms'] / best:6.2f} x blocked"
        )


def trained_inputs(folder: Path, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the middle layer of a model trained here, reading its own corpus."""
    import linbias.lm
    from linbias.lm import positions
    from linbias.lm.corpus import load_corpus

    caught = []

    def catch(q, k, v, *args, **kwargs):
        caught.append((q, k, v))
        return linbias.torch.attention(q, k, v, *args, **kwargs)

    model = linbias.lm.LinbiasForCausalLM.from_pretrained(folder).eval()
    ids = torch.from_numpy(load_corpus("stdlib").test[:length].astype("int64"))[None]
    positions.attention = catch
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    return caught[len(caught) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--backward-lengths", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model", type=Path, help="take q, k, v from this trained ALiBi model instead of noise"
    )
    parser.add_argument(
        "--records", type=Path, help="file to append to (default: benchmarks/results/...)"
    )
    options = parser.parse_args()
    options.records = options.records or record.default_path(options.device)
    options.inputs = "trained model" if options.model else "random normal"
    torch.manual_seed(0)
    for mode, lengths in (
        ("forward", options.lengths),
        ("forward+backward", options.backward_lengths),
    ):
        for length in lengths:
            if options.model:
                q, k, v = (x.detach().clone() for x in trained_inputs(options.model, length))
            else:
                shape = (3, 1, options.heads, length, options.head_size)
                q, k, v = torch.randn(shape, device=options.device).to(
                    getattr(torch, options.dtype)
                )
            slopes = torch.tensor(linbias.slopes(q.shape[1]), dtype=torch.float32, device=q.device)
            bench(
                f"causal-{length}",
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                slopes,
                mode,
                options,
            )


if __name__ == "__main__":
    main()
