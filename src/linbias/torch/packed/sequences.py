"""`attention_varlen` as one operator for `torch.compile` and `torch.export`.

Which sequences share a batch depends on the values of their offsets, which a compiler does not
know. Backward runs forward once more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias.torch.operators.operator import parameters, returns, without_autocast


class Packed(NamedTuple):
    """What a call of `attention_varlen` asks for: arrays, then numbers, as in the schemas."""

    q: Tensor  # [total_q, H, D]
    k: Tensor  # [total_k, G, D]
    v: Tensor  # [total_k, G, E]
    left: Tensor | None  # [H] or [B, H]; None: the paper's
    right: Tensor | None
    positions: Tensor | None  # [total_k] or [total_k, H]
    query_positions: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seed: Tensor | None = None  # of dropout; None: drawn from PyTorch's generator as it stands
    key_range: Tensor | None = None
    query_start: Tensor | None = None
    query_range: Tensor | None = None
    causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    tolerance: float | None = None
    window: tuple[int, int] | None = None
    implementation: str = "auto"


class Results(NamedTuple):
    out: Tensor  # [total_q, H, E]
    lse: Tensor  # [total_q, H]


class Gradients(NamedTuple):
    """Of the first seven arrays; an empty array where there is none, or it holds integers."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dleft: Tensor
    dright: Tensor
    dpositions: Tensor
    dquery_positions: Tensor


Run = Callable[[Packed], Results]
_NUM_LEAVES, _NUM_ARRAYS = len(Gradients._fields), Packed._fields.index("causal")


def define(run: Run) -> Callable[..., Any]:
    """Make the operators linbias::varlen_forward, which it gives, and linbias::varlen_backward."""

    def seeded(call: Packed) -> Results:
        if call.seed is None:
            return run(call)
        device = call.q.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(call.seed))
            return run(call)

    def compute(*arguments: Any) -> Results:
        with torch.no_grad():
            return seeded(Packed._make(arguments))

    def compute_gradients(dout: Tensor, dlse: Tensor, *arguments: Any) -> Gradients:
        # An operator's kernel runs below autograd: `inference_mode(False)` goes back above it.
        with without_autocast(dout.device), torch.inference_mode(False), torch.enable_grad():
            leaves = [
                x.detach().requires_grad_() if _is_real(x) else x for x in arguments[:_NUM_LEAVES]
            ]
            results = seeded(Packed._make((*leaves, *arguments[_NUM_LEAVES:])))
            given = [leaf for leaf in leaves if _is_real(leaf)]
            # Where nothing is packed there is nothing to differentiate.
            gradients = iter(
                torch.autograd.grad(results, given, (dout, dlse), materialize_grads=True)
                if results.out.requires_grad
                else [torch.zeros_like(leaf) for leaf in given]
            )
            return Gradients._make(
                next(gradients).contiguous() if _is_real(x) else dout.new_zeros(0) for x in leaves
            )

    forward = torch.library.custom_op(
        "linbias::varlen_forward",
        compute,
        mutates_args=(),
        schema=f"({parameters(Packed)}) -> {returns(Results)}",
    )
    backward = torch.library.custom_op(
        "linbias::varlen_backward",
        compute_gradients,
        mutates_args=(),
        schema=f"(Tensor dout, Tensor dlse, {parameters(Packed)}) -> {returns(Gradients)}",
    )

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Results:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return Results(
            out=q.new_empty((*q.shape[:2], v.shape[2])), lse=q.new_empty(q.shape[:2], dtype=wide)
        )

    def fake_backward(dout: Tensor, dlse: Tensor, *arguments: Any) -> Gradients:
        rows_first = torch.contiguous_format
        return Gradients._make(
            torch.empty_like(x, memory_format=rows_first) if _is_real(x) else dout.new_empty(0)
            for x in arguments[:_NUM_LEAVES]
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:_NUM_ARRAYS])
        ctx.numbers = inputs[_NUM_ARRAYS:]

    def differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        arrays = ctx.saved_tensors
        gradients = backward(dout.contiguous(), dlse.contiguous(), *arrays, *ctx.numbers)
        given = [g if _is_real(x) else None for x, g in zip(arrays, gradients, strict=False)]
        return *given, *[None] * (len(Packed._fields) - _NUM_LEAVES)

    forward.register_fake(fake_forward)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    return forward


def _is_real(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()
