"""What near-to-far implementations share: the form of their custom operators, for autograd, compile and export.

An implementation fills arrays (`Fill`, `FillGradients`); `define` makes of that an operator with a backward
operator, fake kernels and a derivative. `torch.compile` and `torch.export` then take it as one opaque step.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from linbias._checks import Call


class Arguments(NamedTuple):
    """What forward and backward are both given."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, E]
    left: Tensor  # [H] or [B, H], wide: float64 for float64 inputs, else float32
    right: Tensor | None  # likewise; None: causal
    key_range: Tensor | None  # [B, 2]
    key_bound: Tensor | None  # [B, G]; only forward may use it
    seed: Tensor | None  # []; None: no dropout
    scale: float
    dropout: float
    tolerance: float
    precise: bool  # the result will be differentiated
    slopes: bool = False  # backward: their gradients are asked for


class Results(NamedTuple):
    """What forward gives.

    `out` is wide, because backward takes differences from it, unless an implementation mends those in another way.
    lse comes as row_max + log_sum, in the implementation's unit: their rounded sum would cost backward the digits
    of log_sum. `visited` counts the blocks that each tile visited beyond the near ones, to the left and to the
    right; backward visits the same.
    """

    out: Tensor  # [B, H, T, E]
    row_max: Tensor  # [B, H, T], wide
    log_sum: Tensor  # [B, H, T], wide
    visited: Tensor  # [B, H, tiles + 1, 2], int32, zeroed


class Gradients(NamedTuple):
    """What backward gives: dk, dv, dleft and dright come zeroed."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dleft: Tensor  # [B, H], wide
    dright: Tensor


class Fill(Protocol):
    def __call__(self, call: Arguments, results: Results) -> None: ...


class FillGradients(Protocol):
    def __call__(
        self, call: Arguments, dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
    ) -> None: ...


class Attention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: Tensor,
        right: Tensor | None,
        key_range: Tensor | None,
        key_bound: Tensor | None,
        seed: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]: ...


def define(
    name: str,
    fill: Fill,
    fill_gradients: FillGradients,
    tile_rows: Callable[[int], int],
    *,
    unit: float = 1.0,
    out_is_wide: bool = True,
    visited_on_device: bool = False,
) -> tuple[Attention, Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Make the operators linbias::<name>_forward and linbias::<name>_backward.

    Args:
        name: Of the implementation.
        fill: Computes forward.
        fill_gradients: Computes backward.
        tile_rows: Query rows per tile, given the query heads per key/value head.
        unit: Of row_max and log_sum, in nats.
        out_is_wide: Forward gives `out` in the wide dtype; otherwise in q's.
        visited_on_device: `visited` lies where q does; otherwise on the CPU.

    Returns:
        The implementation's `attention` as `functional` calls it, and the forward operator itself.
    """

    def empty_results(q: Tensor, k: Tensor, v: Tensor, left: Tensor) -> Results:
        B, H, T, _ = q.shape
        # One more than there are: a size that may be 1 would tie an exported program to short sequences.
        num_tiles = -(-T // tile_rows(H // max(1, k.shape[1]))) + 1
        return Results(
            (left if out_is_wide else q).new_empty(B, H, T, v.shape[3]),
            left.new_empty(B, H, T),
            left.new_empty(B, H, T),
            torch.zeros(
                B,
                H,
                num_tiles,
                2,
                dtype=torch.int32,
                device=q.device if visited_on_device else "cpu",
            ),
        )

    @torch.library.custom_op(f"linbias::{name}_forward", mutates_args=())
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: Tensor,
        right: Tensor | None,
        key_range: Tensor | None,
        key_bound: Tensor | None,
        seed: Tensor | None,
        scale: float,
        dropout: float,
        tolerance: float,
        precise: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results = empty_results(q, k, v, left)
        numbers = scale, dropout, tolerance, precise
        call = Arguments(q, k, v, left, right, key_range, key_bound, seed, *numbers)
        # Inside an operator, autocast would take the wide products back to 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            fill(call, results)
        return results

    @forward.register_fake
    def _(q, k, v, left, right, key_range, key_bound, seed, scale, dropout, tolerance, precise):  # type: ignore[no-untyped-def]
        return empty_results(q, k, v, left)

    @torch.library.custom_op(f"linbias::{name}_backward", mutates_args=())
    def backward(
        dout: Tensor,
        dlse: Tensor,
        out: Tensor,
        row_max: Tensor,
        log_sum: Tensor,
        visited: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: Tensor,
        right: Tensor | None,
        key_range: Tensor | None,
        key_bound: Tensor | None,
        seed: Tensor | None,
        scale: float,
        dropout: float,
        tolerance: float,
        slopes: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        dslopes = left.new_zeros(q.shape[:2])
        gradients = Gradients(
            q.new_empty(q.shape),
            k.new_zeros(k.shape),
            v.new_zeros(v.shape),
            dslopes,
            torch.zeros_like(dslopes),
        )
        numbers = scale, dropout, tolerance, True, slopes
        call = Arguments(q, k, v, left, right, key_range, key_bound, seed, *numbers)
        saved = Results(out, row_max, log_sum, visited)
        with torch.autocast(q.device.type, enabled=False):
            fill_gradients(call, dout, dlse, saved, gradients)
        return gradients

    @backward.register_fake
    def _(dout, dlse, out, row_max, log_sum, visited, q, k, v, left, *_rest):  # type: ignore[no-untyped-def]
        dslopes = left.new_empty(q.shape[:2])
        return (*(x.new_empty(x.shape) for x in (q, k, v)), dslopes, torch.empty_like(dslopes))

    def save(ctx, inputs, output):  # type: ignore[no-untyped-def]
        *arrays, scale, dropout, tolerance, _precise = inputs
        ctx.save_for_backward(*arrays, *output)
        ctx.numbers = scale, dropout, tolerance
        # row_max counts as a constant, so that the gradient of log_sum is that of lse.
        ctx.mark_non_differentiable(output[1], output[3])

    def differentiate(ctx, dout, _drow_max, dlog_sum, _dvisited):  # type: ignore[no-untyped-def]
        saved = (
            ctx.saved_tensors
        )  # once: activation checkpointing recomputes them at the first touch
        arrays, results = saved[:8], saved[8:]
        slopes = any(ctx.needs_input_grad[3:5])
        dq, dk, dv, dleft, dright = backward(
            dout, dlog_sum, *results, *arrays, *ctx.numbers, slopes
        )
        left, right = arrays[3:5]
        # An infinite slope hides its side and has no gradient.
        dleft, dright = (
            None if s is None else torch.where(s.isinf(), 0.0, d if s.dim() == 2 else d.sum(0))
            for s, d in ((left, dleft), (right, dright))
        )
        return dq, dk, dv, dleft, dright, *[None] * 7

    forward.register_autograd(differentiate, setup_context=save)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: Tensor,
        right: Tensor | None,
        key_range: Tensor | None,
        key_bound: Tensor | None,
        seed: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """Return out [B, H, T, E] and lse [B, H, T]. `right=None` is causal; left and right are [B, H] or [H]."""
        leaves = (q, k, v, left, right)
        precise = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in leaves
        )
        numbers = call.scale, call.dropout, call.tolerance, precise
        out, row_max, log_sum, _ = forward(
            q, k, v, left, right, key_range, key_bound, seed, *numbers
        )
        lse = row_max + log_sum
        return out.to(q.dtype), lse if unit == 1 else lse * unit

    return attention, forward


def work_kept(visited: Tensor, T: int, S: int, tile_rows: int, block_keys: int) -> Tensor:
    """Return the share of the causal query-key pairs that lie in visited blocks, float64 [B, H].

    visited [B, H, tiles, 2] counts blocks of `block_keys` beyond those at the positions of a tile's own rows.
    """
    visited = visited.cpu()
    kept = torch.zeros(visited.shape[:2], dtype=torch.float64)
    for index, first in enumerate(range(0, T, tile_rows)):
        stop = min(T, first + tile_rows)
        start = max(first + S - T, 0) // block_keys * block_keys
        far = (visited[:, :, index, 0] * block_keys).clamp(max=start)
        near = sum(min(max(t + S - T + 1 - start, 0), S) for t in range(first, stop))
        kept += (stop - first) * far + near
    return kept / (T * (S - T) + T * (T + 1) / 2)
