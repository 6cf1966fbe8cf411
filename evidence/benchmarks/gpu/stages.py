"""The stages that measure attention; those that run tests are in suite.py."""

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
from bench_attention import inputs_of
from gpu import peers
from gpu.timing import GRAPH, Call, Case, Makers, measure
from linbias.kernels.triton.sizes import Sizes, Tile, forced
from linbias.torch.impl import triton
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


def training(options: argparse.Namespace) -> None:
    """Attention as the middle layer of a small language model has it, which is trained here."""
    from linbias.data.corpus import load_corpus

    corpus = load_corpus("stdlib")
    splits = (corpus.train, corpus.test)
    train, test = (torch.from_numpy(x.astype("int64")).to(options.device) for x in splits)
    model = trained(train, options)
    for T in options.lengths[::2]:
        layers = inputs_of(model, test[None, :T])
        arrays = [x.contiguous() for x in layers[len(layers) // 2]]
        compare(arrays, slopes_of(arrays[0].shape[1], options), options, "trained model")


def trained(ids: Tensor, options: argparse.Namespace) -> torch.nn.Module:
    """A small language model, trained with the kernels for some seconds."""
    from linbias.models import LinbiasConfig, LinbiasForCausalLM

    (H, D), (B, T, steps) = options.shapes[-1], (1, 8, 2) if options.dry_run else (32, 512, 200)
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "intermediate_size": 2 * H * D}
    config = LinbiasConfig(**sizes, num_hidden_layers=3, attention_implementation="triton")
    torch.manual_seed(0)
    model = LinbiasForCausalLM(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        starts = torch.randint(len(ids) - T, (B, 1), device=ids.device)
        batch = ids[starts + torch.arange(T, device=ids.device)]
        with torch.autocast(options.device, options.dtype, enabled=options.device == "cuda"):
            loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits per byte", flush=True)
    return model.to(options.dtype).eval()


def tiles(options: argparse.Namespace) -> None:
    """Each kernel's tile exchanged for others; the first line is the choice of sizes.py."""
    T = sorted(options.lengths)[len(options.lengths) // 2]
    for H, D in options.shapes:
        q, k, v = random(1, H, T, D, options)
        slopes, chosen = slopes_of(H, options), triton.sizes_for(q, v)
        for kernel, others in tile_choices(chosen, options).items():
            tried = {f"tile {tuple(x)}": chosen._replace(**{kernel: x}) for x in others}
            choices = {"triton, as chosen": chosen, **tried}
            modes = (FORWARD if kernel == "forward" else BACKWARD,)
            case = Case(f"tiles-{kernel}-{T}", q, k, v, by_definition(slopes), modes=modes)
            makers: Makers = dict.fromkeys(choices, partial(ours, *case.leaves, slopes))
            measure(case, makers, options, lambda name, choices=choices: forced(choices[name]))


def tile_choices(chosen: Sizes, options: argparse.Namespace) -> dict[str, list[Tile]]:
    """Other tiles for each kernel, such that those of backward still divide forward's."""
    if options.dry_run:
        return {"forward": [], "dkv": []}
    found = {}
    for kernel, rows in {"forward": (128,), "dq": (64, 128), "dkv": (32, 64)}.items():
        least = chosen.dq.keys if kernel == "forward" else 32
        most = chosen.forward.keys if kernel == "dq" else 128
        sizes = product(rows, (32, 64, 128), (4, 8), (2, 3))
        tiles = [Tile(*size) for size in sizes if least <= size[1] <= most]
        found[kernel] = [tile for tile in tiles if tile != getattr(chosen, kernel)]
    return found
