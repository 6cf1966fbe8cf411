"""Keys in any order, and queries with a clock of their own, on both sides of which keys are seen.

Implementations take query t for one at key query_start + t, as tiles of rows need it. So keys and
queries are sorted, and a run of queries sees the keys in three parts, which are merged by lse:
those before all its queries and those after them, near to far, and the few among them, pair by
pair.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias._request import Problem
from linbias.torch.dropout import draw_seed
from linbias.torch.impl import dense
from linbias.torch.merge import merge
from linbias.torch.operators.operator import Inputs
from linbias.torch.operators.values import readable

# Queries of a run, and keys among them, at most: parts are calls, and each packs the keys it has.
_RUN = 256

Indices = NDArray[np.int64]
Attend = Callable[[Inputs, Problem], Any]


class _Clock(NamedTuple):
    """Batch rows and heads whose keys, and whose queries, stand at the same places."""

    rows: slice
    heads: slice
    kv_heads: slice
    keys: Indices  # those in the range, by position
    queries: Indices  # [T], by position
    places: Indices  # [T], sorted: the last of `keys` that does not lie beyond each query, or -1


def attention(inputs: Inputs, problem: Problem, attend: Attend) -> tuple[Tensor, Tensor]:
    """Out and lse of a call that is not causal; attend: of one whose queries stand in order."""
    pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for index, clock in enumerate(_clocks(inputs, problem)):
        own = _sorted(inputs, clock)
        if index and own.seed is not None:
            own = own._replace(seed=draw_seed(own.q.device))
        (B, H), G = own.q.shape[:2], own.k.shape[1]
        asked = replace(problem, B=B, H=H, G=G, any_order=False)
        asked = replace(asked, key_range=False, query_start=True, query_positions=True)
        runs = [_attend_run(own, asked, clock.places, run, attend) for run in _runs(clock.places)]
        back = _tensor(np.argsort(clock.queries), own.q)
        out, lse = (torch.cat(x, 2)[:, :, back] for x in zip(*runs, strict=True))
        pieces.setdefault(clock.rows.start or 0, []).append((out, lse))
    of_rows = [[torch.cat(x, 1) for x in zip(*heads, strict=True)] for heads in pieces.values()]
    out, lse = (torch.cat(x) for x in zip(*of_rows, strict=True))
    return out, lse


def attention_weights(inputs: Inputs, problem: Problem) -> Tensor:
    """The weights [B, H, T, S] of a call that is not causal."""
    pieces: dict[int, list[Tensor]] = {}
    for clock in _clocks(inputs, problem):
        own = _among(_sorted(inputs, clock), clock.places, 0)
        weights = dense.attention_weights(own)[0][:, :, _tensor(np.argsort(clock.queries), own.q)]
        whole = weights.new_zeros(*weights.shape[:3], problem.S)
        whole = whole.index_copy(3, _tensor(clock.keys, own.q), weights)
        pieces.setdefault(clock.rows.start or 0, []).append(whole)
    return torch.cat([torch.cat(heads, 1) for heads in pieces.values()])


def _clocks(inputs: Inputs, problem: Problem) -> Iterator[_Clock]:
    """All batch rows and heads, together where they stand alike; values are read."""
    (B, H, T, _), (G, S) = inputs.q.shape, inputs.k.shape[1:3]
    assert inputs.positions is not None and inputs.query_positions is not None
    x, xq = (_values(y).astype(np.float64) for y in (inputs.positions, inputs.query_positions))
    ranges = np.array([[[0, S]]] * B) if inputs.key_range is None else _values(inputs.key_range)
    starts = S - T if inputs.query_start is None else _values(inputs.query_start)
    own_key = np.broadcast_to(starts, B)[:, None] + np.arange(T)
    of_rows = _alike(0, x, xq, ranges, own_key)
    of_heads = _alike(1, x, xq)
    of_groups = of_heads and _alike(1, ranges)
    n = H // max(1, G)
    for b in range(1 if of_rows and B else B):
        for h in range(0, H, H if of_groups else n if of_heads else 1):
            here = b, h if x.shape[1] > 1 else 0
            g = h // n
            first, end = ranges[b, g if ranges.shape[1] > 1 else 0]
            keys = first + np.argsort(x[here][first:end], kind="stable")
            stands = x[here][keys]
            at = xq[b, h if xq.shape[1] > 1 else 0]
            if problem.query_positions:
                places = np.searchsorted(stands, at, side="right") - 1
            else:
                ranks = np.argsort(keys)
                own = own_key[b].clip(first, max(first, end - 1)) - first
                places = ranks[own] if len(ranks) else np.full(T, -1)
            queries = np.lexsort((at, places))
            yield _Clock(
                rows=slice(None) if of_rows else slice(b, b + 1),
                heads=slice(None) if of_groups else slice(h, h + (n if of_heads else 1)),
                kv_heads=slice(None) if of_groups else slice(g, g + 1),
                keys=keys,
                queries=queries,
                places=places[queries],
            )


def _alike(axis: int, *arrays: NDArray[Any]) -> bool:
    """Whether arrays say the same all along an axis."""
    return all(bool((x == x.take([0], axis)).all()) for x in arrays if x.shape[axis])


def _values(x: Tensor) -> NDArray[Any]:
    known = readable(x)
    assert known is not None, "who asks for any order knows the positions"
    return np.array(known.tolist()).reshape(x.shape)


def _tensor(indices: Indices, like: Tensor) -> Tensor:
    return torch.as_tensor(indices, device=like.device)


def _sorted(inputs: Inputs, clock: _Clock) -> Inputs:
    """The arrays of a clock, its keys and queries in order and nothing outside the range."""
    keys, queries = _tensor(clock.keys, inputs.q), _tensor(clock.queries, inputs.q)
    rows, heads, kv_heads = clock.rows, clock.heads, clock.kv_heads
    x, xq, mask, bound = inputs.positions, inputs.query_positions, inputs.mask, inputs.key_bound
    assert x is not None and xq is not None
    if mask is not None:
        mask = _cut(_cut(mask, 0, rows), 1, heads)
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    return inputs._replace(
        q=inputs.q[rows, heads][:, :, queries],
        k=inputs.k[rows, kv_heads][:, :, keys],
        v=inputs.v[rows, kv_heads][:, :, keys],
        left=_of_slopes(inputs.left, clock),
        right=None if inputs.right is None else _of_slopes(inputs.right, clock),
        key_range=None,
        query_start=None,
        key_bound=None if bound is None else bound[rows, kv_heads],
        mask=mask,
        positions=_cut(x[rows], 1, heads)[..., keys],
        query_positions=_cut(xq[rows], 1, heads)[..., queries],
    )


def _cut(x: Tensor, axis: int, part: slice) -> Tensor:
    """The part of an axis that has it, and is not 1 for all."""
    if x.shape[axis] == 1:
        return x
    return x[part] if axis == 0 else x[:, part]


def _of_slopes(slopes: Tensor, clock: _Clock) -> Tensor:
    return slopes[clock.heads] if slopes.dim() == 1 else slopes[clock.rows, clock.heads]


def _runs(places: Indices) -> Iterator[slice]:
    """Runs of queries in order, of at most `_RUN` and with as many keys among them."""
    if len(places) < 2 or (np.diff(places) == 1).all():
        yield slice(0, len(places))
        return
    start = 0
    while start < len(places):
        stop = min(start + _RUN, int(np.searchsorted(places, places[start] + _RUN)))
        yield slice(start, stop)
        start = stop


def _attend_run(
    inputs: Inputs, problem: Problem, places: Indices, run: slice, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Out and lse of a run of sorted queries over sorted keys."""
    S, places = inputs.k.shape[2], places[run]
    if not S or (np.diff(places) == 1).all():
        return attend(*_part(inputs, problem, run, slice(0, S), places[0] if len(places) else 0))
    first, last = max(0, int(places[0])), int(places[-1]) + 1
    parts = []
    if first:
        parts.append(attend(*_part(inputs, problem, run, slice(0, first), first)))
    if first < last:
        among, _ = _part(inputs, problem, run, slice(first, last), 0)
        out, lse = dense.attention(_among(among, places, first))
        parts.append((out, lse))
    if last < S:
        before = -len(places)
        parts.append(attend(*_part(inputs, problem, run, slice(last, S), before)))
    return merge(*zip(*parts, strict=True)) if len(parts) > 1 else parts[0]


def _part(
    inputs: Inputs, problem: Problem, run: slice, keys: slice, start: int
) -> tuple[Inputs, Problem]:
    """The call of a run over some keys, in which query 0 stands at key `start` of these."""
    mask, seed = inputs.mask, inputs.seed
    assert inputs.positions is not None and inputs.query_positions is not None
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, run]
        mask = mask if mask.shape[3] == 1 else mask[..., keys]
    if seed is not None:
        seed = torch.stack([seed, seed.new_tensor(run.start), seed.new_tensor(keys.start)])
    q = inputs.q[:, :, run]
    own = inputs._replace(
        q=q,
        k=inputs.k[:, :, keys],
        v=inputs.v[:, :, keys],
        query_start=torch.full((len(q),), int(start), device=q.device),
        mask=mask,
        seed=seed,
        positions=inputs.positions[..., keys],
        query_positions=inputs.query_positions[..., run],
    )
    return own, replace(problem, T=q.shape[2], S=own.k.shape[2])


def _among(inputs: Inputs, places: Indices, first: int) -> Inputs:
    """A call whose keys, from `first` on, lie on both sides of queries: its bias as a mask."""
    x, xq, right, mask = inputs.positions, inputs.query_positions, inputs.right, inputs.mask
    assert x is not None and xq is not None and right is not None
    order = _tensor(places[:, None] - first - np.arange(x.shape[-1]), x)
    left, right = ((s if s.dim() == 2 else s[None])[..., None, None] for s in (inputs.left, right))
    distance = (xq.double()[..., None] - x.double()[..., None, :]).to(left.dtype)
    slope = torch.where(order >= 0, left, -right)
    # As everywhere, an infinite slope does not hide a query's own key.
    bias = -slope.masked_fill(slope.isinf(), 0.0) * distance
    bias = bias.masked_fill(slope.isinf() & (order != 0), -torch.inf)
    if mask is not None and mask.dtype != torch.bool:
        bias = bias + mask.to(bias.dtype)
    elif mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf)
    flat = torch.zeros_like(inputs.left)
    return inputs._replace(
        left=flat, right=flat, mask=bias, positions=None, query_positions=None, key_bound=None
    )
