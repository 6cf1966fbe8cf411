"""The stages that measure attention; others are in suite.py, training.py and tiles.py."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import linbias
import linbias.torch
import record
from bench_points import grid
from gpu import as_on_a_gpu, peers
from gpu.timing import ALLOWED_ERROR, GRAPH, Call, Case, Makers, measure
from linbias.torch import context_parallel
from record import BACKWARD, FORWARD


def ours(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **options: Any) -> Call:
    return partial(linbias.torch.attention, q, k, v, slopes, implementation="triton", **options)


def by_definition(slopes: Tensor, **options: Any) -> Callable[..., Tensor]:
    """Out of the last rows in the inputs' precision."""
    options |= {"slopes": slopes.double(), "implementation": "dense"}
    return partial(linbias.torch.attention, **options)


def work_kept(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **options: Any) -> dict[str, float]:
    """The share of the causal pairs that the Triton kernels read, as a field of the record."""
    seen = linbias.torch.visited(q, k, v, slopes, implementation="triton", **options)
    return {"work_kept": round(seen.work_kept.mean().item(), 4)}


def slopes_of(H: int, options: argparse.Namespace) -> Tensor:
    return torch.tensor(linbias.slopes(H), dtype=torch.float32, device=options.device)


def random(B: int, H: int, T: int, D: int, options: argparse.Namespace) -> Tensor:
    """q, k and v, random normal."""
    torch.manual_seed(0)
    return torch.randn(3, B, H, T, D, device=options.device, dtype=options.dtype)


def speed(options: argparse.Namespace) -> None:
    """Forward and backward, and the limits: what the device reaches in products and copies."""
    rates(options)
    for H, D in options.shapes:
        for T in options.lengths:
            compare(random(1, H, T, D, options), slopes_of(H, options), options)
        shortest = random(1, H, min(options.lengths), D, options)
        compare(shortest, slopes_of(H, options) * 0, options)


def warm(options: argparse.Namespace) -> None:
    """Compile what `speed` will time: FlexAttention takes seconds for each length."""
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
    more = {"matrix product": {"flop": 2 * n**3}, "copy": {"bytes": 2 * source.numel()}}
    fields = {"case": "rates", "dtype": str(options.dtype).removeprefix("torch.")}
    record.compare(fields, functions, options, more)


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
    """One token against a cache, with and without a bound on its norms; also as a graph."""
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
    """A field of the record: keys and values within the window that the norms allow."""
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


def points(options: argparse.Namespace) -> None:
    """Attention among points of a plane, which has no kernel of its own on a GPU."""
    H, D = options.shapes[-1]
    for N in options.points:
        torch.manual_seed(0)
        q, k, v = random(1, H, N, D, options)
        where, slopes = grid(N).float().to(options.device), slopes_of(H, options)

        case = Case(f"points-{N}", q, k, v, partial(exact_points, where, slopes), causal=False)
        attend = partial(linbias.torch.attention_points, *case.leaves, where, slopes)
        makers: Makers = {
            "blocked": lambda attend=attend: partial(attend, implementation="blocked")
        }
        measure(case, makers | peers.among_points(*case.leaves, where, slopes), options)


def exact_points(where: Tensor, slopes: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Out of the last rows in the inputs' precision."""
    bias = torch.cdist(where[-q.shape[2] :].double(), where.double()) * -slopes[:, None, None]
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def gates(options: argparse.Namespace) -> None:
    """Forget gates: keys at the sums of -log f, with slope 1; with gradients of these, too."""
    H, D = options.shapes[-1]
    for T in options.lengths[:2]:
        q, k, v = random(1, H, T, D, options)
        logs = peers.log_gates(1, H, T, options.device)
        at, ones = -logs.double().cumsum(-1), torch.ones(H, device=options.device)
        case = Case(f"gates-{T}", q, k, v, by_definition(ones, positions=at))
        case.fields["triton"] = partial(work_kept, q, k, v, ones, positions=at)
        learned = at.clone().requires_grad_()
        makers: Makers = {
            "triton": partial(ours, *case.leaves, ones, positions=at),
            "triton, learned": partial(ours, *case.leaves, ones, positions=learned),
        }
        measure(case, makers | peers.gated(*case.leaves, logs), options)


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


def pieces(options: argparse.Namespace) -> None:
    """A sequence on processes that share the device: whether it is right, and what is sent."""
    from ranks import Ranks

    (H, D), T = options.shapes[-1], max(options.lengths)
    with Ranks(options.ranks) as ranks:
        given = (H, T, D, options.device, options.dtype)
        results = ranks.run("gpu.stages:attend_on_a_rank", [given] * options.ranks)
    errors, sent, whole = zip(*results, strict=True)
    shape, dtype = (1, H, T, D), str(options.dtype).removeprefix("torch.")
    line = {
        **record.fields(f"pieces-{T}", shape, shape, dtype, BACKWARD), "implementation": "triton",
        "num_pieces": options.ranks, "error": max(errors), "sent_bytes": sum(sent),
        "all_gather_bytes": sum(whole),
    }  # fmt: skip
    record.write(line | record.here(options.device), options.records)
    print(f"off by {max(errors):.2g}, {sum(sent):,} bytes sent, all-gather {sum(whole):,}")
    if not max(errors) < ALLOWED_ERROR:
        raise SystemExit("pieces and the whole differ")


def attend_on_a_rank(
    H: int, T: int, D: int, device: str, dtype: torch.dtype
) -> tuple[float, int, int]:
    """A rank's relative error, the bytes that it sends, and those of all-gather."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, H, T, D, device=device, dtype=dtype)
    sent = 0
    exchange = dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *rest: object, **options: object) -> object:
        nonlocal sent
        sent += given.nbytes
        return exchange(received, given, *rest, **options)

    def results(attention: Callable[..., Tensor], *arrays: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in arrays[:3]]
        out = attention(*leaves, implementation="triton")
        return [out, *torch.autograd.grad(out, leaves, arrays[3])]

    with as_on_a_gpu():
        own = [context_parallel.shard(x, 2) for x in (q, k, v, dout)]
        with mock.patch.object(dist, "all_to_all_single", counted):
            ours = results(context_parallel.attention, *own)
        whole = results(linbias.torch.attention, q, k, v, dout)
    pairs = zip(ours, (context_parallel.shard(x, 2) for x in whole), strict=True)
    error = max(((x - true).abs().max() / true.abs().max()).item() for x, true in pairs)
    others = dist.get_world_size() - 1
    return error, sent, 2 * others * (own[1].nbytes + own[2].nbytes)
