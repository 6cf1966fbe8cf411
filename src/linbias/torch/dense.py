"""Linear-bias attention with the whole bias in memory: the definition in PyTorch operations.

Computes DESIGN section 1 for any device, any sizes and every option, differentiable any number of times.
Memory: several arrays of [B, H, T, S]. For short sequences, for `torch.func`, and for reading.
"""

import torch
from torch import Tensor

from linbias._checks import Problem
from linbias._dispatch import Abilities
from linbias.torch.dropout import keep_mask
from linbias.torch.operator import Inputs

NAME = "dense"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="the whole score matrix, for reading and checking",
    memory="length x length",
    higher_derivatives=True,
)


def why_not(problem: Problem) -> str | None:
    return ABILITIES.lacks(problem)


def attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return out [B, H, T, E] in q's dtype and lse [B, H, T], wide."""
    weight, lse = attention_weights(inputs)
    if inputs.seed is not None:
        weight = _drop(weight, inputs.seed, inputs.dropout)
    v = _blank_outside(inputs.v, inputs.key_range).to(weight.dtype)
    return (weight @ _per_query_head(v, inputs)).to(inputs.q.dtype), lse


def attention_weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return softmax(score) [B, H, T, S] before dropout, and lse [B, H, T], both wide; an empty row is zeros."""
    wide = inputs.left.dtype
    k = _blank_outside(inputs.k, inputs.key_range).to(wide)
    score = inputs.q.to(wide) @ _per_query_head(k, inputs).mT * inputs.scale
    bias = _bias(inputs)
    # Not a sum alone: NaN in a hidden key would stay NaN.
    score = (score + bias).masked_fill(bias == -torch.inf, -torch.inf)
    # A row without a key has no maximum; pivot and divisor then only have to be finite.
    row_max = (
        score.detach().amax(-1, keepdim=True)
        if score.shape[-1]
        else score.new_zeros(*score.shape[:3], 1)
    )
    unnormalised = torch.exp(score - row_max.masked_fill(row_max == -torch.inf, 0.0))
    row_sum = unnormalised.sum(-1, keepdim=True)
    empty = row_sum == 0
    divisor = row_sum.masked_fill(empty, 1.0)
    lse = (row_max + divisor.log()).masked_fill(empty, -torch.inf)
    return unnormalised / divisor, lse.squeeze(-1)


def _bias(inputs: Inputs) -> Tensor:
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
        inside = _per_query_head(_inside(key_range, S), inputs)
        bias = bias.masked_fill(~inside[:, :, None], -torch.inf)
    return bias


def _inside(key_range: Tensor, S: int) -> Tensor:
    """[B, G, S]: whether a key lies in the range."""
    keys = torch.arange(S, device=key_range.device)
    return (keys >= key_range[..., :1]) & (keys < key_range[..., 1:])


def _blank_outside(array: Tensor, key_range: Tensor | None) -> Tensor:
    """Zero the rows of [B, G, S, size] outside the range: they may hold NaN, and 0 * NaN is NaN."""
    if key_range is None:
        return array
    return array.masked_fill(~_inside(key_range, array.shape[2])[..., None], 0.0)


def _per_query_head(array: Tensor, inputs: Inputs) -> Tensor:
    """[B, G, ...] -> [B, H, ...]."""
    H, G = inputs.q.shape[1], inputs.k.shape[1]
    return array if H == G else array.repeat_interleave(H // G, dim=1)


def _drop(weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    B, H, T, S = weight.shape
    batch_heads, queries, keys = (torch.arange(n, device=weight.device) for n in (B * H, T, S))
    keep = keep_mask(seed, dropout, batch_heads.view(B, H), queries, keys)
    return torch.where(keep, weight / (1 - dropout), 0.0)
