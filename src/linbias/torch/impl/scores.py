"""What implementations with the whole score matrix share: bias, keys and values of a call."""

import torch
from torch import Tensor

from linbias.torch.operators.operator import Inputs


def bias_of(inputs: Inputs) -> Tensor:
    """[B or 1, H, T, S]: minus slope * distance, -inf where a key is hidden."""
    left, key_range, query_start = inputs.left, inputs.key_range, inputs.query_start
    T, S = inputs.q.shape[2], inputs.k.shape[2]
    keys = torch.arange(S, device=left.device)
    own_key = inputs.own_key
    if own_key is None:
        start = S - T if query_start is None else query_start.to(keys.dtype)[:, None, None]
        own_key = torch.arange(T, device=left.device)[None, None] + start
    order = own_key[..., None] - keys  # [B or 1, 1 or H, T, S]
    if inputs.positions is None:
        bias = _bias_of_order(inputs, order)
    else:
        bias = _bias_of_distance(inputs, order, _distance(inputs))
    if key_range is not None:
        inside = per_query_head(_inside(key_range, S), inputs)
        bias = bias.masked_fill(~inside[:, :, None], -torch.inf)
    if inputs.query_range is not None:
        bias = bias.masked_fill(~_inside(inputs.query_range, S)[:, None], -torch.inf)
    if inputs.mask is None:
        return bias
    if inputs.mask.dtype != torch.bool:
        return bias + inputs.mask.to(bias.dtype)
    return bias.masked_fill(~inputs.mask, -torch.inf)


def _bias_of_order(inputs: Inputs, order: Tensor) -> Tensor:
    """The bias where key s stands at s, and order [B or 1, 1 or H, T, S] is the distance."""
    bias = inputs.left.new_zeros(())
    for slope, reach in ((inputs.left, order), (inputs.right, -order)):
        if slope is None:
            bias = bias.masked_fill(reach > 0, -torch.inf)
        else:
            # 0 * inf would be NaN: a query always sees its own position.
            bias = bias - torch.where(reach > 0, _per_pair(slope) * reach, 0.0)
    return bias


def _bias_of_distance(inputs: Inputs, order: Tensor, distance: Tensor) -> Tensor:
    """The bias where keys have positions: order says which side a key is on."""
    bias = distance.new_zeros(())
    for slope, here, reach in (
        (inputs.left, order >= 0, distance),
        (inputs.right, order < 0, -distance),
    ):
        if slope is None:
            bias = bias.masked_fill(here, -torch.inf)
            continue
        hidden = _per_pair(slope) == torch.inf
        finite = _per_pair(slope).masked_fill(hidden, 0.0)  # 0 * inf would be NaN
        bias = bias - torch.where(here, finite * reach, 0.0)
        bias = bias.masked_fill(hidden & here & (order != 0), -torch.inf)
    return bias


def _distance(inputs: Inputs) -> Tensor:
    """[B, 1 or H, T, S], wide: how far each key lies back of each query; float64 differences."""
    x, xq = inputs.positions, inputs.query_positions
    assert x is not None and xq is not None, "whoever has positions has both"
    return (xq.double()[..., None] - x.double()[..., None, :]).to(inputs.left.dtype)


def _per_pair(slope: Tensor) -> Tensor:
    """[H] or [B, H] -> [1 or B, H, 1, 1]."""
    return (slope if slope.dim() == 2 else slope[None])[..., None, None]


def _inside(key_range: Tensor, S: int) -> Tensor:
    """Ranges [..., 2] -> [..., S]: whether a key lies in each."""
    keys = torch.arange(S, device=key_range.device)
    return (keys >= key_range[..., :1]) & (keys < key_range[..., 1:])


def blank_outside(array: Tensor, key_range: Tensor | None) -> Tensor:
    """Zero the rows of [B, G, S, size] outside the range: they may hold NaN."""
    if key_range is None:
        return array
    return array.masked_fill(~_inside(key_range, array.shape[2])[..., None], 0.0)


def per_query_head(array: Tensor, inputs: Inputs) -> Tensor:
    """[B, G, ...] -> [B, H, ...]."""
    H, G = inputs.q.shape[1], inputs.k.shape[1]
    return array if H == G else array.repeat_interleave(H // G, dim=1)
