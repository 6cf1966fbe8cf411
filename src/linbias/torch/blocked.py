"""Near-to-far linear-bias attention in portable PyTorch operations: exact to rounding, at a cost of T x window.

Computes DESIGN section 1 on any device that PyTorch has. Each tile of query rows visits key blocks from the
nearest outwards with an online softmax, left and right in turn, and leaves a side of a head when the certificate
(docs/math.md) says that the keys not yet visited there, all together, cannot hold more than `tolerance` of any
row's probability. Backward visits the same blocks: the exact gradient of the function that forward computed.

Order: batch rows together (one by one under a key_range); key/value heads one after the other, the query heads
that read one of them folded into the rows of its matrix products; tiles; blocks near to far (`tiles.py`).
Memory: a wide copy of one key/value head's keys and values, tiles of [B, heads x rows, BLOCK], `out` in the wide
dtype, and in backward the gradients of k and v; no term in T x S.
Measured: docs/LOG.md (tile sizes), benchmarks/results.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from linbias._checks import Problem
from linbias.torch import operator
from linbias.torch.certificate import Certificate
from linbias.torch.operator import Gradients, Inputs, Results
from linbias.torch.tiles import Group, backward_tile, forward_tile, tile_rows

NAME = "blocked"


def why_not(problem: Problem) -> str | None:
    return None


def _fill(inputs: Inputs, results: Results) -> None:
    out, row_max, log_sum, visited = results
    for group in _groups(inputs):
        certificate = Certificate(
            group.k, group.v, group.left, group.right, inputs.scale, inputs.tolerance
        )
        for index, tile in enumerate(group.tiles):
            here = group.rows, group.heads, tile.rows
            out[here], row_max[here], log_sum[here], counts = forward_tile(
                group, tile, certificate
            )
            visited[group.rows, group.heads, index] = counts


def _fill_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
) -> None:
    out, row_max, log_sum, visited = saved
    dq, dk, dv, dleft, dright = gradients
    # Weights are exp(score - row_max) times this; a row without a key has none.
    per_sum = torch.exp(-log_sum).masked_fill(log_sum == -torch.inf, 0.0)
    delta = ((dout * out).sum(-1) - dlse) * per_sum
    dout = dout * per_sum[..., None]
    for group in _groups(inputs):
        sums = torch.zeros_like(group.k), torch.zeros_like(group.v)
        for index, tile in enumerate(group.tiles):
            here = group.rows, group.heads, tile.rows
            counts = visited[group.rows, group.heads, index][0]  # the same for all rows of a group
            dq[here], dleft_tile, dright_tile = backward_tile(
                group, tile, counts, dout[here], row_max[here], delta[here], *sums
            )
            dleft[group.rows, group.heads] += dleft_tile
            dright[group.rows, group.heads] += dright_tile
        there = group.rows, group.kv_head, group.keys
        dk[there], dv[there] = sums


operators = operator.define(NAME, _fill, _fill_gradients, tile_rows)
attention = operators.attention


def _groups(inputs: Inputs) -> Iterator[Group]:
    """Split a call by key/value head, and by batch row where each has a key range of its own."""
    q, k, v, left, right, key_range = inputs[:6]
    (B, H), (G, S) = q.shape[:2], k.shape[1:3]
    if B == 0:
        return
    n = H // max(1, G)
    batch_heads = torch.arange(B * H, device=q.device).view(B, H)
    if key_range is None:
        parts = [(slice(None), slice(0, S))]
    else:
        limits = enumerate(key_range[:, 0].tolist())
        parts = [(slice(b, b + 1), slice(first, end)) for b, (first, end) in limits]
    for rows, keys in parts:
        for g in range(G):
            heads = slice(g * n, (g + 1) * n)
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
            )


def _of_group(slope: Tensor, rows: slice, heads: slice) -> Tensor:
    """[H] or [B, H] -> [1 or B, n, 1, 1]."""
    own = slope[None, heads] if slope.dim() == 1 else slope[rows, heads]
    return own[..., None, None]
