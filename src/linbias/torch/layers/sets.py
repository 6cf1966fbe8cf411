"""Sets of points with padding, as `attention_points` takes them: the padding of each row last.

The order of points means nothing, so that padding may lie anywhere.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias.torch.layers import masks
from linbias.torch.operators import transforms
from linbias.torch.operators.values import may_read, readable
from linbias.torch.points.functional import attention_points, weights_among_points


class Sets(NamedTuple):
    """The real tokens of each batch row, in an order that begins with them."""

    num_points: Tensor  # [B]
    order: Tensor | None  # [B, N], int64: token i of the order is token order[i]; None: they do

    def sort(self, x: Tensor, axis: int) -> Tensor:
        """Bring the tokens along an axis of [B, ...] into the order."""
        return x if self.order is None else _take(x, self.order, axis)

    def undo(self, x: Tensor, axis: int) -> Tensor:
        return x if self.order is None else _take(x, self.order.argsort(1), axis)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Tensor,
    query_points: Tensor | None,
    padding: Tensor | None,
    need_weights: bool,
    dropout: float,
    implementation: str,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The results of `attention_points`, and the weights or None, where padding [B, N] may lie
    anywhere.
    """
    options |= {"query_points": query_points}
    sets = None
    if padding is not None:
        B, N = k.shape[0], k.shape[2]
        sets = _read(padding, (B, N), options["global_tokens"])
        options |= {"num_points": sets.num_points}
        k, v = sets.sort(k, 2), sets.sort(v, 2)
        points = sets.sort(points.expand(B, -1, -1), 1)
        if query_points is None:
            q = sets.sort(q, 2)
    out = attention_points(
        q, k, v, points, **options, dropout=dropout, implementation=implementation
    )
    weights = weights_among_points(q, k, points, **options) if need_weights else None
    if sets is None:
        return out, weights
    if weights is not None:
        weights = sets.undo(weights, 3)
    if query_points is not None:
        return out, weights
    return sets.undo(out, 2), None if weights is None else sets.undo(weights, 2)


def _read(padding: Tensor, shape: tuple[int, int], global_tokens: int) -> Sets:
    """What a key_padding_mask [B, N] of `MultiheadAttention` says of its sets."""
    masks.check_one("key_padding_mask", padding, "[B, S]", shape)
    hidden = masks.is_hidden(padding)
    some = ~hidden.all(1, keepdim=True)
    _require(
        ~(hidden[:, :global_tokens] & some).any(),
        f"key_padding_mask must not hide the {global_tokens} global tokens of a row that has"
        " others",
    )
    if padding.dtype != torch.bool:
        _require(
            ((padding == 0) | hidden).all(),
            "key_padding_mask must be bool with points, or hold 0 and -inf alone",
        )
    if may_read(padding) and not (hidden[:, :-1] & ~hidden[:, 1:]).any():
        order = None
    else:
        order = hidden.to(torch.uint8).argsort(dim=1, stable=True)
    return Sets((~hidden).sum(1), order)


def _require(condition: Tensor, rule: str) -> None:
    """Check what the values tell: at once, in a compiled program when it runs."""
    if may_read(condition):
        if not condition:
            raise ValueError(f"MultiheadAttention: {rule}")
    elif readable(condition) is None and not transforms.active():
        torch._assert_async(condition, f"MultiheadAttention: {rule}")


def _take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Take index [B, N] along an axis of x [B, ...]."""
    shape = [1] * x.dim()
    shape[0], shape[axis] = index.shape
    # Not take_along_dim, which makes constants of sizes that are symbols.
    return x.gather(axis, index.view(shape).expand(*x.shape[:axis], -1, *x.shape[axis + 1 :]))
