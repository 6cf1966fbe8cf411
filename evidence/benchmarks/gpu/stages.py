"""The stages that measure attention; those of other files are suite.py, training.py and tiles.py."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import linbias
import linbias.torch
import record
from bench_points import grid
from gpu import peers
from gpu.timing import (
    ALLOWED_ERROR,
    BACKWARD,
    FORWARD,
    GRAPH,
    Call,
    Case,
    Makers,
    measure,
)


def ours(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **options: Any) -> Call:
    return partial(linbias.torch.attention, q, k, v, slopes, implementation="triton", **options)


def by_definition(slopes: Tensor, **options: Any) -> Callable[..., Tensor]:
    """Out of the last rows in the inputs' precision."""
    return partial(
        linbias.torch.attention, slopes=slopes.double(), implementation="dense", **options
    )


def work_kept(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **options: Any) -> dict[str, float]:
    """The share of the causal pairs that the Triton kernels read, as a field of the record."""
    found = linbias.torch.visited(q, k, v, slopes, implementation="triton", **options)
    return {"work_kept": round(found.work_kept.mean().item(), 4)}


def slopes_of(H: int, options: argparse.Namespace) -> Tensor:
    return torch.tensor(linbias.slopes(H), dtype=torch.float32, device=options.device)


def random(B: int, H: int, T: int, D: int, options: argparse.Namespace) -> Tensor:
    """q, k and v, random normal."""
    torch.manual_seed(0)
    return torch.randn(3, B, H, T, D, device=options.device, dtype=options.dtype)


# Attention and its peers


def speed(options: argparse.Namespace) -> None:
    """Forward and backward, and what the device reaches in products and copies: limits to hold them against."""
    rates(options)
    for H, D in options.shapes:
        for T in options.lengths:
            compare(random(1, H, T, D, options), slopes_of(H, options), options)
        shortest = random(1, H, min(options.lengths), D, options)
        compare(shortest, slopes_of(H, options) * 0, options)


def warm(options: argparse.Namespace) -> None:
    """Compile what `speed` will time, beside the contract, which computes little: FlexAttention takes seconds for each length."""
    for (H, D), T in product(options.shapes, options.lengths):
        q, k, v = random(1, H, T, D, options).requires_grad_()
        for name, make in peers.biased(q, k, v, slopes_of(H, options)).items():
            if name.startswith("flex"):
                try:
                    torch.autograd.grad(make()().sum(), (q, k, v))
                    torch.cuda.synchronize()
                except Exception as problem:
                    print(f"{T} {H} {D} {name}: {problem!s:.200}", flush=True)


def rates(options: argparse.Namespace) -> None:
    """A large matrix product and a large copy, per second."""
    n = 64 if options.dry_run else 8192
    a, b = torch.randn(2, n, n, device=options.device, dtype=options.dtype)
    source = torch.zeros(n * n * 8, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    functions = {"matrix product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    for name, times in record.interleave(functions, options.repeats).items():
        work = {"flop": 2 * n**3} if name != "copy" else {"bytes": 2 * source.numel()}
        line = {"case": "rates", "implementation": name, "dtype": str(options.dtype)[6:], **work}
        line |= {**record.spread(times), "repeats": options.repeats, **record.here(options.device)}
        record.write(line, options.records)
        reached = next(iter(work.values())) / max(line["p50_ms"], 1e-6) / 1e9
        print(f"{name}: {reached:.2f} {'TB/s' if name == 'copy' else 'TFLOP/s'}", flush=True)


def compare(
    arrays: Any, slopes: Tensor, options: argparse.Namespace, inputs: str = "random normal"
) -> None:
    """Every implementation of one case of causal attention, forward and with backward."""
    q, k, v = arrays
    name = f"{'causal' if slopes.any() else 'zero-slopes'}-{q.shape[2]}"
    case = Case(name, q, k, v, by_definition(slopes), inputs)
    case.fields["triton"] = lambda: work_kept(q, k, v, slopes)
    q, k, v = case.leaves
    makers: Makers = {
        "triton": lambda: ours(q, k, v, slopes),
        "triton, tolerance 0": lambda: ours(q, k, v, slopes, tolerance=0.0),
        **peers.biased(q, k, v, slopes),
    }
    measure(case, makers, options)


def decode(options: argparse.Namespace) -> None:
    """One token against a cache, with and without a bound on its norms; each as it is, and as a captured graph without Python."""
    H, D = options.shapes[0]
    for B, S in options.caches:
        torch.manual_seed(0)
        q = torch.randn(B, H, 1, D, device=options.device, dtype=options.dtype)
        k, v = torch.randn(2, B, H, S, D, device=options.device, dtype=options.dtype)
        slopes = slopes_of(H, options)
        bound = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1) * 1.001
        case = Case(f"decode-{S}", q, k, v, by_definition(slopes), modes=(FORWARD,))
        case.fields["triton, key_bound"] = partial(window_bytes, case, slopes)
        makers: Makers = {
            "triton, key_bound": partial(ours, q, k, v, slopes, key_bound=bound),
            "triton": partial(ours, q, k, v, slopes),
            **peers.biased(q, k, v, slopes),
        }
        if options.device == "cuda":
            makers |= {GRAPH + n: lambda make=make: captured(make()) for n, make in makers.items()}
        measure(case, makers, options)


def window_bytes(case: Case, slopes: Tensor) -> dict[str, int]:
    """Keys and values within the window that the norms allow: what is to be read, as a field of the record."""
    B, _, S, D = case.k.shape
    window = peers.window_per_head(case.q, case.k, slopes).clamp(max=S)
    return {"window_bytes": int(window.sum()) * 2 * B * D * case.k.element_size()}


def captured(function: Call) -> Call:
    """The call as a CUDA graph, which returns the tensor that its replays fill."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = function()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


# Other biases


def points(options: argparse.Namespace) -> None:
    """Attention among points of a plane, which has no kernel of its own on a GPU."""
    H, D = options.shapes[-1]
    for N in options.points:
        torch.manual_seed(0)
        q, k, v = random(1, H, N, D, options)
        where, slopes = grid(N).float().to(options.device), slopes_of(H, options)

        def exact(
            q: Tensor, k: Tensor, v: Tensor, where: Tensor = where, slopes: Tensor = slopes
        ) -> Tensor:
            rows = where[-q.shape[2] :].double()
            bias = torch.cdist(rows, where.double()) * -slopes[:, None, None]
            return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v

        case = Case(f"points-{N}", q, k, v, exact, causal=False)
        attend = partial(linbias.torch.attention_points, *case.leaves, where, slopes)
        measure(
            case,
            {
                "blocked": lambda attend=attend: partial(attend, implementation="blocked"),
                **peers.among_points(*case.leaves, where, slopes),
            },
            options,
        )


def gates(options: argparse.Namespace) -> None:
    """Forget gates: keys at the sums of -log f, with slope 1; with gradients of these, too."""
    H, D = options.shapes[-1]
    for T in options.lengths[:2]:
        q, k, v = random(1, H, T, D, options)
        logs = peers.log_gates(1, H, T, options.device)
        at, ones = -logs.double().cumsum(-1), torch.ones(H, device=options.device)

        def exact(q: Tensor, k: Tensor, v: Tensor, at: Tensor = at, ones: Tensor = ones) -> Tensor:
            return by_definition(ones, positions=at)(q, k, v)

        case = Case(f"gates-{T}", q, k, v, exact)
        case.fields["triton"] = partial(work_kept, q, k, v, ones, positions=at)
        learned = at.clone().requires_grad_()
        measure(
            case,
            {
                "triton": partial(ours, *case.leaves, ones, positions=at),
                "triton, learned": partial(ours, *case.leaves, ones, positions=learned),
                **peers.gated(*case.leaves, logs),
            },
            options,
        )


def accuracy(options: argparse.Namespace) -> None:
    """The error at great length beside the form slope * key_index, relative to float64."""
    for S in options.long:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, n, 64, device=options.device) for n in (64, S, S))
        slopes = torch.tensor([0.5, 2.0**-8], device=options.device)
        truth = by_definition(slopes)(*(x.double() for x in (q, k, v)))
        at = torch.arange(S, device=options.device)
        score = q @ k.mT / 8 + slopes[:, None, None] * at
        other = score.masked_fill(at > at[-64:, None], -math.inf).softmax(-1) @ v
        for name, out in (("triton", ours(q, k, v, slopes)()), ("slope * key_index", other)):
            error = ((out - truth).abs().amax((0, 2, 3)) / truth.abs().amax((0, 2, 3))).tolist()
            line = {
                "case": f"accuracy-{S}", "implementation": name, "mode": FORWARD, "S": S,
                "dtype": "float32", **record.here(options.device),
                "relative_error": {"slope 1/2": error[0], "slope 1/256": error[1]},
            }  # fmt: skip
            record.write(line, options.records)
            print(f"{line['case']} {name:20} {error[0]:.2e} {error[1]:.2e}", flush=True)


# Pieces


def pieces(options: argparse.Namespace) -> None:
    """A sequence in pieces on processes that share the device: whether it is right, and what is sent. Its times say nothing."""
    from ranks import Ranks

    (H, D), T = options.shapes[-1], max(options.lengths)
    with Ranks(options.ranks) as ranks:
        given = (H, T, D, options.device, options.dtype)
        found = ranks.run("gpu.piece:attend", [given] * options.ranks)
    errors, sent, whole = zip(*found, strict=True)
    line = {
        "case": f"pieces-{T}", "implementation": "triton", "mode": BACKWARD,
        "B": 1, "H": H, "G": H, "T": T, "S": T, "D": D, "dtype": str(options.dtype)[6:],
        "inputs": "random normal", "num_pieces": options.ranks, "error": max(errors),
        "sent_bytes": sum(sent), "all_gather_bytes": sum(whole), **record.here(options.device),
    }  # fmt: skip
    record.write(line, options.records)
    print(f"off by {max(errors):.2g}, {sum(sent):,} bytes sent, all-gather {sum(whole):,}")
    if not max(errors) < ALLOWED_ERROR:
        raise SystemExit("pieces and the whole differ")
