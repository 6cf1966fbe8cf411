"""Keys in any order, and queries with a clock of their own, on both sides of which keys are seen.

Implementations take query t for one at key query_start + t. Where every key is a query, too, both
are sorted, and one call is near to far. Elsewhere the bias, whose sides go by rank, is the mask of
a call without positions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linbias._request import Problem
from linbias.torch.impl.scores import bias_of_distance, with_mask
from linbias.torch.operators.operator import Inputs


def attention(
    inputs: Inputs, problem: Problem, attend: Callable[[Inputs, Problem], Any]
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call that is not causal; attend: of one that implementations take."""
    x = inputs.positions
    assert x is not None
    asked_otherwise = problem.query_positions or problem.key_range or problem.mask
    if problem.T == problem.S and x.shape[1] == 1 and not asked_otherwise:
        order = x.argsort(dim=-1, stable=True)  # [B, 1, S]
        q, k, v = (torch.take_along_dim(y, order[..., None], 2) for y in inputs[:3])
        x = x.gather(2, order)
        own = inputs._replace(q=q, k=k, v=v, positions=x, query_positions=x)
        out, lse = attend(own, replace(problem, any_order=False))
        back = order.argsort(dim=-1)
        return torch.take_along_dim(out, back[..., None], 2), torch.take_along_dim(lse, back, 2)
    inputs, nearest = with_the_bias_as_mask(inputs, problem)
    out, lse = attend(
        inputs, replace(problem, positions=False, query_positions=False, mask=True, added=True)
    )
    return out, lse + nearest


def with_the_bias_as_mask(inputs: Inputs, problem: Problem) -> tuple[Inputs, Tensor]:
    """The call without positions, and what its scores lack, [B, H, T]: the least of the bias.

    Softmax does not see what all scores lose, but far from all keys it would cost digits.
    """
    (B, H, T, _), (G, S), device = inputs.q.shape, inputs.k.shape[1:3], inputs.q.device
    assert inputs.positions is not None and inputs.query_positions is not None
    x, xq = inputs.positions.double(), inputs.query_positions.double()
    keys = torch.arange(S, device=device)
    first, end = torch.zeros(B, 1, 1, device=device), torch.full((B, 1, 1), S, device=device)
    if inputs.key_range is not None:
        first, end = inputs.key_range.repeat_interleave(H // max(1, G), 1).split(1, 2)
    inside = (keys >= first) & (keys < end)
    # Keys by position, those outside the range last.
    stands, order = x.masked_fill(~inside, torch.inf).sort(dim=-1, stable=True)
    rank = order.argsort(dim=-1)
    heads = max(x.shape[1], xq.shape[1], inside.shape[1])
    if problem.query_positions:
        stands, at = (y.expand(-1, heads, -1).contiguous() for y in (stands, xq))
        own = torch.searchsorted(stands, at.detach(), right=True) - 1
    else:
        start = S - T if inputs.query_start is None else inputs.query_start[:, None, None]
        place = (torch.arange(T, device=device) + start).clamp(first, end - 1).clamp(min=0)
        own = rank.expand(-1, heads, -1).gather(2, place.long().expand(B, heads, T))
    sides = own[..., None] - rank[..., None, :]
    bias = bias_of_distance(inputs, sides, xq[..., None] - x[..., None, :])
    bias = with_mask(bias.masked_fill(~inside[:, :, None], -torch.inf), inputs.mask)
    nearest = bias.detach().amax(-1)
    nearest = nearest.masked_fill(nearest == -torch.inf, 0.0)
    wide, flat = inputs.left.dtype, torch.zeros_like(inputs.left)
    mask = (bias - nearest[..., None]).to(wide)
    inputs = inputs._replace(
        left=flat, right=flat, mask=mask, positions=None, query_positions=None, key_bound=None
    )
    return inputs, nearest.to(wide)
