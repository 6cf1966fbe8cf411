"""Near-to-far attention (DESIGN section 2) in portable PyTorch operations.

Batch rows run together, unless their key ranges or query starts differ; key/value heads one after
the other, with the query heads that read one folded into the rows of its matrix products; then
tiles, which visit blocks near to far (`tiles.py`). No memory grows with T x S.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from linbias._dispatch import Abilities
from linbias.torch.impl.certificate import LEFT, RIGHT, Certificate
from linbias.torch.impl.tiles import BLOCK, Group, backward_tile, forward_tile, tile_rows
from linbias.torch.operators import operator
from linbias.torch.operators.operator import Gradients, Inputs, Results

NAME = "blocked"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="near to far in PyTorch operations",
    memory="linear in length",
)
why_not = ABILITIES.lacks
# Of a start that comes unchecked, as any under a compiler: `arange` counts in float64.
_FARTHEST = 2**52


def _fill(inputs: Inputs, results: Results) -> None:
    out, row_max, log_sum, visited = results
    for group in _groups(inputs):
        certificate = Certificate(
            group.k, group.v, group.left, group.right, inputs.tolerance, group.x, group.xq
        )
        for index, tile in enumerate(group.tiles):
            here = group.rows, group.heads, tile.rows
            *results_of_tile, counts = forward_tile(group, tile, certificate)
            out[here], row_max[here], log_sum[here] = results_of_tile
            visited[group.rows, group.heads, index] = counts


def _fill_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None, saved: Results, gradients: Gradients
) -> None:
    out, row_max, log_sum, visited = saved
    dq, dk, dv, dleft, dright, dx, dxq = gradients
    for sums_of_tiles in gradients[1:]:
        if sums_of_tiles is not None:
            sums_of_tiles.zero_()
    # Weights are exp(score - row_max) times this; a row without a key has none.
    per_sum = torch.exp(-log_sum).masked_fill(log_sum == -torch.inf, 0.0)
    delta = (dout * out).sum(-1)
    delta = (delta if dlse is None else delta - dlse) * per_sum
    dout = dout * per_sum[..., None]
    for group in _groups(inputs):
        sums = torch.zeros_like(group.k), torch.zeros_like(group.v)
        for index, tile in enumerate(group.tiles):
            here = group.rows, group.heads, tile.rows
            counts = visited[group.rows, group.heads, index][0]  # the same for all rows of a group
            pulls = None
            if group.x is not None and dx is not None and dxq is not None:
                pulls = dx[group.rows, group.heads, group.keys], dxq[here]
            dq[here], dleft_tile, dright_tile = backward_tile(
                group, tile, counts, dout[here], row_max[here], delta[here], *sums, pulls
            )
            for total, part in ((dleft, dleft_tile), (dright, dright_tile)):
                if total is not None:
                    total[group.rows, group.heads] += part
        there = group.rows, group.kv_head, group.keys
        dk[there], dv[there] = sums


operators = operator.Operators(NAME, _fill, _fill_gradients, tile_rows)
attention = operators.attention


def visited_keys(inputs: Inputs, visited: Tensor) -> tuple[Tensor, Tensor, int]:
    """The first and one past the last key of each tile, [B, H, tiles] each, and its rows."""
    B, H, T, _ = inputs.q.shape
    step = tile_rows(H // max(1, inputs.k.shape[1]))
    first, end = torch.zeros(2, B, H, -(-T // step), dtype=torch.int64)
    for group in _groups(inputs):
        for index, tile in enumerate(group.tiles):
            here = group.rows, group.heads, index
            low, high = tile.near
            counts = visited[here].long() * BLOCK
            first[here] = (low - counts[..., LEFT]).clamp(min=0) + group.keys.start
            end[here] = (high + counts[..., RIGHT]).clamp(max=tile.num_keys) + group.keys.start
    return first, end, step


def _groups(inputs: Inputs) -> Iterator[Group]:
    """Split a call by key/value head, and by batch row where ranges or starts differ."""
    q, k, v, left, right = inputs[:5]
    (B, H), G = q.shape[:2], k.shape[1]
    if B == 0:
        return
    n = H // max(1, G)
    batch_heads = torch.arange(B * H, device=q.device).view(B, H)
    for g in range(G):
        heads = slice(g * n, (g + 1) * n)
        for rows, keys, shift in _parts(inputs, g):
            yield Group(
                q=q[rows, heads],
                k=k[rows, g, keys].to(left.dtype),
                v=v[rows, g, keys].to(left.dtype),
                left=_of_group(left, rows, heads),
                right=None if right is None else _of_group(right, rows, heads),
                scale=inputs.scale,
                dropout=inputs.dropout,
                seed=inputs.seed,
                batch_heads=batch_heads[rows, heads],
                rows=rows,
                heads=heads,
                kv_head=g,
                keys=keys,
                shift=shift,
                ranges=_of_keys(inputs.query_range, rows, keys),
                x=_of_heads(inputs.positions, rows, heads, keys),
                xq=_of_heads(inputs.query_positions, rows, heads, slice(None)),
            )


def _parts(inputs: Inputs, g: int) -> Iterator[tuple[slice, slice, int]]:
    """Batch rows of key/value head g that run together, the keys they see, and their shift."""
    (B, _, T), S = inputs.q.shape[:3], inputs.k.shape[2]
    ranges = [[0, S]] * B if inputs.key_range is None else inputs.key_range[:, g].tolist()
    starts = [S - T] * B if inputs.query_start is None else inputs.query_start.tolist()
    starts = [min(max(start, -_FARTHEST), _FARTHEST) for start in starts]
    # Traced or mapped values come unchecked: a negative number would count from the end.
    clamped = ((min(max(a, 0), S), min(max(b, 0), S)) for a, b in ranges)
    limits = [(a, max(a, b), start) for (a, b), start in zip(clamped, starts, strict=True)]
    together = len(set(limits)) == 1
    for b, (first, end, start) in enumerate(limits[:1] if together else limits):
        rows = slice(None) if together else slice(b, b + 1)
        yield rows, slice(first, end), start - first


def _of_keys(ranges: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """The ranges [B, T, 2] of some batch rows, counted from the first of these keys."""
    if ranges is None:
        return None
    return ranges[rows].clamp(keys.start, keys.stop) - keys.start


def _of_group(slope: Tensor, rows: slice, heads: slice) -> Tensor:
    """[H] or [B, H] -> [1 or B, n, 1, 1]."""
    own = slope[None, heads] if slope.dim() == 1 else slope[rows, heads]
    return own[..., None, None]


def _of_heads(places: Tensor | None, rows: slice, heads: slice, own: slice) -> Tensor | None:
    """[B, 1 or H, n] -> [B, 1 or n heads, own], float64."""
    if places is None:
        return None
    return places[rows, heads if places.shape[1] > 1 else slice(None), own].double()
