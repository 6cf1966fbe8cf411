"""Linear-bias attention with the whole bias in memory: the definition in PyTorch operations.

Computes DESIGN section 1 for any device, any sizes and every option, differentiable any number of times.
Memory: several arrays of [B, H, T, S]. For short sequences, for `torch.func`, and for reading.
"""

import torch
from torch import Tensor

from linbias._checks import Call
from linbias.torch.dropout import keep_mask

NAME = "dense"


def why_not(call: Call) -> str | None:
    return None


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
    wide = left.dtype
    if key_range is not None:
        k, v = (_blank_outside(array, key_range) for array in (k, v))
    weight, lse = attention_weights(q, k, left, right, key_range, call)
    if seed is not None:
        weight = _drop(weight, seed, call.dropout)
    out = weight @ _per_query_head(v.to(wide), call)
    return out.to(q.dtype), lse


def attention_weights(
    q: Tensor,
    k: Tensor,
    left: Tensor,
    right: Tensor | None,
    key_range: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor]:
    """Return softmax(score) [B, H, T, S] and lse [B, H, T], both in the slopes' dtype; an empty row is zeros."""
    score = q.to(left.dtype) @ _per_query_head(k.to(left.dtype), call).mT * call.scale
    bias = _bias(left, right, key_range, call)
    # Not a sum alone: NaN in a hidden key would stay NaN.
    score = (score + bias).masked_fill(bias == -torch.inf, -torch.inf)
    # A row without a key has no maximum; pivot and divisor then only have to be finite.
    row_max = (
        score.detach().amax(-1, keepdim=True) if call.S else score.new_zeros(*score.shape[:3], 1)
    )
    unnormalised = torch.exp(score - row_max.masked_fill(row_max == -torch.inf, 0.0))
    row_sum = unnormalised.sum(-1, keepdim=True)
    empty = row_sum == 0
    divisor = row_sum.masked_fill(empty, 1.0)
    lse = (row_max + divisor.log()).masked_fill(empty, -torch.inf)
    return unnormalised / divisor, lse.squeeze(-1)


def _bias(left: Tensor, right: Tensor | None, key_range: Tensor | None, call: Call) -> Tensor:
    keys = torch.arange(call.S, device=left.device)
    if key_range is None:
        end = torch.full((1,), call.S, device=left.device)
    else:
        end = key_range[:, 1].to(keys.dtype)
    position = torch.arange(call.T, device=left.device) + (end[:, None] - call.T)
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
        bias = bias.masked_fill(~_inside(key_range, call.S)[:, None, None], -torch.inf)
    return bias


def _inside(key_range: Tensor, S: int) -> Tensor:
    keys = torch.arange(S, device=key_range.device)
    return (keys >= key_range[:, :1]) & (keys < key_range[:, 1:])


def _blank_outside(array: Tensor, key_range: Tensor) -> Tensor:
    """Zero the rows outside: they may hold anything, NaN included, and 0 * NaN is NaN."""
    return array.masked_fill(~_inside(key_range, array.shape[2])[:, None, :, None], 0.0)


def _per_query_head(array: Tensor, call: Call) -> Tensor:
    return array if call.H == call.G else array.repeat_interleave(call.H // call.G, dim=1)


def _drop(weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    B, H, T, S = weight.shape
    batch_heads, queries, keys = (torch.arange(n, device=weight.device) for n in (B * H, T, S))
    keep = keep_mask(seed, dropout, batch_heads.view(B, H), queries, keys)
    return torch.where(keep, weight / (1 - dropout), 0.0)
