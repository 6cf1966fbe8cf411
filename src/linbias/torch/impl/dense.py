"""Linear-bias attention with the whole bias in memory: the definition in PyTorch operations."""

import torch
from torch import Tensor

from linbias._dispatch import Abilities
from linbias._request import SPECIAL
from linbias.torch.dropout import keep_mask
from linbias.torch.impl.scores import bias_of, blank_outside, per_query_head
from linbias.torch.operators.operator import Inputs

NAME = "dense"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="the whole score matrix, for reading and checking",
    memory="length x length",
    has=tuple(SPECIAL),
    higher_derivatives=True,
)
why_not = ABILITIES.lacks


def attention(inputs: Inputs, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return out [B, H, T, E] in q's dtype and lse [B, H, T], wide."""
    weight, lse = attention_weights(inputs)
    if inputs.seed is not None:
        weight = _drop(weight, inputs.seed, inputs.dropout)
    v = blank_outside(inputs.v, inputs.key_range).to(weight.dtype)
    return (weight @ per_query_head(v, inputs)).to(inputs.q.dtype), lse


def attention_weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return softmax(score) [B, H, T, S] before dropout, and lse [B, H, T], both wide."""
    wide = inputs.left.dtype
    k = blank_outside(inputs.k, inputs.key_range).to(wide)
    score = inputs.q.to(wide) @ per_query_head(k, inputs).mT * inputs.scale
    bias = bias_of(inputs)
    # Not a sum alone: NaN in a hidden key would stay NaN.
    score = (score + bias).masked_fill(bias == -torch.inf, -torch.inf)
    # A row without a key has no maximum; pivot and divisor then only have to be finite.
    no_keys = score.new_zeros(*score.shape[:3], 1)
    row_max = score.detach().amax(-1, keepdim=True) if score.shape[-1] else no_keys
    unnormalised = torch.exp(score - row_max.masked_fill(row_max == -torch.inf, 0.0))
    row_sum = unnormalised.sum(-1, keepdim=True)
    empty = row_sum == 0
    divisor = row_sum.masked_fill(empty, 1.0)
    lse = (row_max + divisor.log()).masked_fill(empty, -torch.inf)
    return unnormalised / divisor, lse.squeeze(-1)


def _drop(weight: Tensor, seed: Tensor, dropout: float) -> Tensor:
    B, H, T, S = weight.shape
    batch_heads, queries, keys = (torch.arange(n, device=weight.device) for n in (B * H, T, S))
    keep = keep_mask(seed, dropout, batch_heads.view(B, H), queries, keys)
    return torch.where(keep, weight / (1 - dropout), 0.0)
