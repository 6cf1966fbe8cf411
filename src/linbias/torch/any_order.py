"""Keys in any order, and queries that stand anywhere among them: one sort, and one call.

Implementations take keys that never fall, and queries that come in the order of the keys at which
they stand (`Inputs.own_key`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linbias._request import Problem
from linbias.torch.operators.operator import Inputs


class InOrder(NamedTuple):
    """A call whose keys and queries are sorted, and where those of the caller went."""

    inputs: Inputs
    queries: Tensor  # [B, 1 or H, T]: the place of each query in the order
    keys: Tensor  # [B, 1 or H, S], likewise


def sort(inputs: Inputs, problem: Problem) -> InOrder:
    """Sort a call that is not causal by the positions of its keys and queries."""
    q, k, v, x, xq = inputs.q, inputs.k, inputs.v, inputs.positions, inputs.query_positions
    assert x is not None and xq is not None, "whoever has positions has both"
    (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
    ranges, bound = inputs.key_range, inputs.key_bound
    if ranges is None:
        ranges = torch.tensor([0, S], device=q.device).expand(B, G, 2)
    one_order = x.shape[1] == xq.shape[1] == 1 and bool((ranges == ranges[:, :1]).all())
    if one_order:
        ranges = ranges[:, :1]
    else:
        n = H // max(1, G)
        k, v, ranges = (y.repeat_interleave(n, dim=1) for y in (k, v, ranges))
        bound = None if bound is None else bound.repeat_interleave(n, dim=1)
    place = torch.arange(S, device=q.device)
    first, end = ranges.split(1, dim=2)
    inside = (place >= first) & (place < end)
    known = torch.where(inside, x.double(), torch.inf)  # [B, 1 or H, S]
    order = known.argsort(dim=-1, stable=True)
    if not bool((order == place).all()):
        k, v = _taken(k, order), _taken(v, order)
    known = known.take_along_dim(order, -1)
    count = inside.sum(-1, keepdim=True)
    keys = _inverse(order)
    if problem.query_positions:
        stands = xq.detach().double().expand(*order.shape[:2], T)
        own = torch.searchsorted(known, stands.contiguous(), right=True) - 1
    else:  # each at the key that the caller gave it
        start = S - T if inputs.query_start is None else inputs.query_start[:, None, None]
        at = torch.arange(T, device=q.device) + start
        at = torch.minimum(torch.maximum(at, first), end - 1).clamp(0, max(0, S - 1))
        own = stands = keys.take_along_dim(at, -1) if S else at - 1
    queries = stands.argsort(dim=-1, stable=True)
    taken = torch.where(place < count, x.take_along_dim(order, -1), 0)
    mask = inputs.mask
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask.take_along_dim(queries[..., None], 2)
        mask = mask if mask.shape[3] == 1 else mask.take_along_dim(order[:, :, None], 3)
    ordered = inputs._replace(
        q=_taken(q, queries),
        k=k,
        v=v,
        key_range=torch.cat([torch.zeros_like(count), count], -1).expand(B, k.shape[1], 2),
        query_start=None,
        key_bound=bound,
        mask=mask,
        positions=taken,
        query_positions=xq.take_along_dim(queries, -1),
        own_key=own.take_along_dim(queries, -1),
    )
    return InOrder(ordered, _inverse(queries), keys)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Rows [B, n, length, size] in another order [B, 1 or n, length]."""
    rows, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return x[rows[:, None, None], heads[:, None], order]


def _inverse(order: Tensor) -> Tensor:
    """The place of each number in an order [B, 1 or H, n]."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def as_given(rows: Tensor, place: Tensor, axis: int = 2) -> Tensor:
    """Rows [B, H, n, ...] in order, by the places of those of the caller."""
    shape = [*place.shape[:2], *[1] * (rows.dim() - 2)]
    shape[axis] = place.shape[2]
    return rows.take_along_dim(place.reshape(shape), axis)
