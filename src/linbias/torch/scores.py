"""What implementations with the whole score matrix share: the bias of a call, and its keys and values as queries see them."""

import torch
from torch import Tensor

from linbias.torch.operator import Inputs


def bias_of(inputs: Inputs) -> Tensor:
    """[B or 1, H, T, S]: minus slope * distance, -inf where a key is hidden."""
    left, right, key_range, query_start = inputs[3:7]
    T, S = inputs.q.shape[2], inputs.k.shape[2]
    keys = torch.arange(S, device=left.device)
    if query_start is None:
        query_start = torch.full((1,), S - T, device=left.device)
    position = query_start.to(keys.dtype)[:, None] + torch.arange(T, device=left.device)
    distance = (position[..., None] - keys)[:, None]  # [B or 1, 1, T, S]
    bias = left.new_zeros(())
    for slope, reach in ((left, distance), (right, -distance)):
        if slope is None:
            bias = bias.masked_fill(reach > 0, -torch.inf)
        else:
            slope = (slope if slope.dim() == 2 else slope[None])[..., None, None]
            # 0 * inf would be NaN: a query always sees its own position.
            bias = bias - torch.where(reach > 0, slope * reach, 0.0)
    if key_range is not None:
        inside = per_query_head(_inside(key_range, S), inputs)
        bias = bias.masked_fill(~inside[:, :, None], -torch.inf)
    if inputs.mask is None:
        return bias
    if inputs.mask.dtype != torch.bool:
        return bias + inputs.mask.to(bias.dtype)
    return bias.masked_fill(~inputs.mask, -torch.inf)


def _inside(key_range: Tensor, S: int) -> Tensor:
    """[B, G, S]: whether a key lies in the range."""
    keys = torch.arange(S, device=key_range.device)
    return (keys >= key_range[..., :1]) & (keys < key_range[..., 1:])


def blank_outside(array: Tensor, key_range: Tensor | None) -> Tensor:
    """Zero the rows of [B, G, S, size] outside the range: they may hold NaN, and 0 * NaN is NaN."""
    if key_range is None:
        return array
    return array.masked_fill(~_inside(key_range, array.shape[2])[..., None], 0.0)


def per_query_head(array: Tensor, inputs: Inputs) -> Tensor:
    """[B, G, ...] -> [B, H, ...]."""
    H, G = inputs.q.shape[1], inputs.k.shape[1]
    return array if H == G else array.repeat_interleave(H // G, dim=1)
