"""`attention_varlen` as an operator: what `torch.compile` and `torch.export` are given of it.

Which packed sequences share a batch depends on their offsets, values that a compiler does not know. So it gets one
opaque step, which runs the function itself. Backward runs forward once more, as activation checkpointing does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., tuple[Tensor, Tensor]]


def define(run: Run) -> Run:
    """Make the operators linbias::varlen_forward and linbias::varlen_backward of a function.

    Args:
        run: Takes the arguments of `forward` below but for the seed; gives out and lse.

    Returns:
        The forward operator, differentiable.
    """

    def seeded(seed: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        if seed is None:
            return run(*arguments)
        device = arguments[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(seed))
            return run(*arguments)

    @torch.library.custom_op("linbias::varlen_forward", mutates_args=())
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        seed: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        key_range: Tensor | None,
        query_start: Tensor | None,
        causal: bool,
        scale: float | None,
        dropout: float,
        tolerance: float | None,
        implementation: str,
    ) -> tuple[Tensor, Tensor]:
        numbers = causal, scale, dropout, tolerance, implementation
        offsets = cu_seqlens_q, cu_seqlens_k, key_range, query_start
        with torch.no_grad():
            return seeded(seed, q, k, v, left, right, *offsets, *numbers)

    @torch.library.custom_op("linbias::varlen_backward", mutates_args=())
    def backward(
        dout: Tensor,
        dlse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        seed: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        key_range: Tensor | None,
        query_start: Tensor | None,
        causal: bool,
        scale: float | None,
        dropout: float,
        tolerance: float | None,
        implementation: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        numbers = causal, scale, dropout, tolerance, implementation
        offsets = cu_seqlens_q, cu_seqlens_k, key_range, query_start
        with torch._C._ForceDispatchKeyGuard(*_ABOVE_AUTOGRAD), torch.enable_grad():
            leaves = [
                q.new_zeros(0) if x is None else x.detach().requires_grad_()
                for x in (q, k, v, left, right)
            ]
            sides = (
                None if x is None else leaf
                for x, leaf in zip((left, right), leaves[3:], strict=True)
            )
            results = seeded(seed, *leaves[:3], *sides, *offsets, *numbers)
            given = [leaf for leaf in leaves if leaf.requires_grad]
            # Where nothing is packed there is nothing to differentiate.
            gradients = iter(
                torch.autograd.grad(results, given, (dout, dlse), materialize_grads=True)
                if results[0].requires_grad
                else [torch.zeros_like(leaf) for leaf in given]
            )
            dq, dk, dv, dleft, dright = (
                next(gradients).contiguous() if leaf.requires_grad else leaf for leaf in leaves
            )
            return dq, dk, dv, dleft, dright

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=wide)

    def fake_backward(dout: Tensor, dlse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(
            dout.new_empty(0)
            if x is None
            else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in arguments[:5]
        )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:10])
        ctx.numbers = inputs[10:]

    def differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        arrays = ctx.saved_tensors
        gradients = backward(dout.contiguous(), dlse.contiguous(), *arrays, *ctx.numbers)
        given = [None if x is None else g for x, g in zip(arrays, gradients, strict=False)]
        return *given, *[None] * 10

    forward.register_fake(fake_forward)
    backward.register_fake(fake_backward)
    forward.register_autograd(differentiate, setup_context=save)
    return forward


# The kernel of an operator runs below autograd; to differentiate in one means to go back above it.
_ABOVE_AUTOGRAD = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)
