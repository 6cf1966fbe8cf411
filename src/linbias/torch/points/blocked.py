"""Attention over points in portable PyTorch operations: from near to far, without a term in N x N.

SIZE tokens in a row on a Hilbert curve make a block with a small box around its points. Blocks of
keys are visited by the distance g of their boxes; for any fixed c no score of one is above
scale * q . c + |scale| * |q| * max |k_s - c| - slope * g. Backward visits the same blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from linbias._dispatch import Abilities
from linbias._request import log_share
from linbias.torch.dropout import keep_mask
from linbias.torch.impl.certificate import norm
from linbias.torch.points.geometry import (
    PointInputs,
    along_a_curve,
    box_distances,
    distances,
    further,
    parts,
)
from linbias.torch.points.operator import Gradients, PointOperators, Results

NAME = "blocked"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="near to far in PyTorch operations",
    memory="linear in length",
    has=("query_points", "dropout"),
)
why_not = ABILITIES.lacks
SIZE = 128  # tokens of a tile of queries, and of a block of keys


@dataclass(frozen=True)
class Tokens:
    """Queries or keys that have the same places in some batch rows, in curve order."""

    points: Tensor  # [tokens - num_global, A]
    order: Tensor  # [tokens], int64: token i of the curve is token order[i] of the caller
    num_global: int  # of those that stand nowhere, and come first

    @staticmethod
    def on_a_curve(points: Tensor, num_global: int) -> "Tokens":
        curve = along_a_curve(points)
        nowhere = torch.arange(num_global, device=points.device)
        return Tokens(points[curve], torch.cat((nowhere, curve + num_global)), num_global)

    @cached_property
    def slices(self) -> list[slice]:
        """The blocks; those of tokens that stand nowhere come first, and apart."""
        first, end_of_all = self.num_global, len(self.order)
        return [
            slice(start, min(end, start + SIZE))
            for begin, end in ((0, first), (first, end_of_all))
            for start in range(begin, end, SIZE)
        ]

    @property
    def num_global_slices(self) -> int:
        return -(-self.num_global // SIZE)

    def stand_at(self, block: slice) -> Tensor | None:
        """The points of a block, [tokens, A]; None where it stands nowhere."""
        start, end = block.start - self.num_global, block.stop - self.num_global
        return None if start < 0 else self.points[start:end]

    @cached_property
    def boxes(self) -> tuple[Tensor, Tensor]:
        """The least and largest coordinates of blocks that stand somewhere, [blocks, A] each."""
        blocks = self.points.split(SIZE) if len(self.points) else ()
        low, high = ([getattr(block, end)(0) for block in blocks] for end in ("amin", "amax"))
        none = self.points.new_empty(0, self.points.shape[1])
        return (torch.stack(low), torch.stack(high)) if blocks else (none, none)


@dataclass(frozen=True)
class Tile:
    """Some tokens as queries, and the blocks of keys in the order in which they visit them."""

    rows: slice
    blocks: list[slice]
    gaps: Tensor  # [blocks]: how far the boxes lie from the tile's, at least
    order: Tensor  # [blocks], int64
    nearest: Tensor | None  # [rows, A]: from whose distances those of keys count; None: all count
    away: Tensor  # [rows]: these distances, or 0


@dataclass(frozen=True)
class Cloud:
    """Batch rows that have the same points: X query and Y key/value heads, in curve order."""

    inputs: PointInputs
    row: slice  # of the batch
    queries: Tokens
    keys: Tokens  # the same as queries where every token is both
    wide: torch.dtype

    def heads(self, array: Tensor, tokens: Tokens) -> Tensor:
        """[B, heads, N, ...] of the call -> [heads of these rows, tokens, ...], wide."""
        return array[self.row].flatten(0, 1)[:, tokens.order].to(self.wide)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q times scale, k, v, and the slopes [X], of these rows."""
        x = self.inputs
        q = self.heads(x.q, self.queries) * x.scale
        k, v = (self.heads(array, self.keys) for array in (x.k, x.v))
        return q, k, v, x.slopes[self.row].flatten()

    def put_back(self, array: Tensor, tokens: Tokens, target: Tensor) -> None:
        """Write [heads of these rows, tokens, ...] into an array of the call."""
        here = target[self.row]
        here[:, :, tokens.order] = array.unflatten(0, here.shape[:2]).to(target.dtype)

    def tiles(self) -> Iterator[Tile]:
        num_global = self.keys.num_global_slices
        lows, highs = self.keys.boxes
        for index, rows in enumerate(self.queries.slices):
            gaps = self.keys.points.new_zeros(len(self.keys.slices))
            if index >= self.queries.num_global_slices:
                here = index - self.queries.num_global_slices
                low, high = (ends[here] for ends in self.queries.boxes)
                gaps[num_global:] = box_distances(low, high, lows, highs, self.inputs.manhattan)
            # Of the blocks at distance 0 those without a place come first, then the tile's own.
            near = gaps.clone()
            near[:num_global] = -2.0
            if self.queries is self.keys:
                near[index] = min(-1.0, near[index].item())
            order = torch.argsort(near, stable=True)
            yield Tile(rows, self.keys.slices, gaps, order, *self.nearest(rows))

    def nearest(self, rows: slice) -> tuple[Tensor | None, Tensor]:
        """For each query the nearest point of all boxes around keys, and how far it is.

        Softmax does not see what all scores lose, but far from all keys it would cost digits.
        """
        asking = self.queries.stand_at(rows)
        if asking is None or self.queries is self.keys or self.keys.num_global:
            return None, self.keys.points.new_zeros(rows.stop - rows.start)
        inside = asking[:, None].clamp(*self.keys.boxes)  # [rows, blocks, A]
        gaps, block = distances(asking[:, None], inside, self.inputs.manhattan).min(-1)
        return torch.take_along_dim(inside, block[..., None], 1)[:, 0], gaps[:, 0]

    def distance(self, tile: Tile, columns: slice) -> Tensor | None:
        """[rows, columns], wide; None where one of them stands nowhere."""
        near, far = self.queries.stand_at(tile.rows), self.keys.stand_at(columns)
        if near is None or far is None:
            return None
        if tile.nearest is None:
            return distances(near, far, self.inputs.manhattan).to(self.wide)
        return further(near, far, tile.nearest, self.inputs.manhattan).to(self.wide)

    def drop(self, weight: Tensor, heads: Tensor, rows: slice, columns: slice) -> Tensor:
        """Apply attention dropout to weight [heads, rows, columns]."""
        x = self.inputs
        if x.seed is None:
            return weight
        first = self.row.start * x.q.shape[1]
        queries, keys = self.queries.order[rows], self.keys.order[columns]
        keep = keep_mask(x.seed, x.dropout, heads + first, queries, keys)
        return torch.where(keep, weight / (1 - x.dropout), 0.0)


def _clouds(inputs: PointInputs) -> Iterator[Cloud]:
    """Split a call by batch row where their points, or the numbers of them, differ."""
    places, asking = inputs.points, inputs.query_points
    shared = len(places) == 1 and (asking is None or len(asking) == 1)
    for rows, num_keys in parts(inputs):
        first = min(inputs.global_tokens, num_keys)
        for row in [rows] if shared else [slice(b, b + 1) for b in range(rows.start, rows.stop)]:
            keys = Tokens.on_a_curve(_of_row(places, row)[: num_keys - first], first)
            queries = keys
            if asking is not None:
                queries = Tokens.on_a_curve(_of_row(asking, row), 0)
            yield Cloud(inputs, row, queries, keys, inputs.slopes.dtype)


def _of_row(points: Tensor, row: slice) -> Tensor:
    return points[row.start if len(points) > 1 else 0]


class Certificate:
    """When may a head of a tile stop? Never before a key or value that is not finite."""

    def __init__(self, cloud: Cloud, k: Tensor, v: Tensor, slopes: Tensor) -> None:
        # Relative rounding of norms, of dot products over D terms, and of the scores in the sums.
        self.slack = (k.shape[-1] + 8) * torch.finfo(k.dtype).eps
        self.precise = cloud.keys.points.dtype  # of the sums over blocks
        n = len(slopes) // len(k)
        center = k.mean(1)
        radius = norm(k - center[:, None]) * (1 + self.slack) + 0.0 * v.sum(-1)
        reach = torch.stack([radius[:, b].amax(1) for b in cloud.keys.slices], 1)
        self.largest = (norm(center) + reach.amax(1)).repeat_interleave(n, 0)
        self.center = center.repeat_interleave(n, 0)  # [X, D]
        self.reach = reach.repeat_interleave(n, 0).to(self.precise)  # [X, blocks]
        sizes = torch.tensor([b.stop - b.start for b in cloud.keys.slices], device=k.device)
        self.log_sizes = sizes.to(self.precise).log()
        self.slopes = slopes.to(self.precise)
        self.log_tolerance = log_share(cloud.inputs.tolerance)

    def about(self, q: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """For rows q [X, rows, D]: [X, blocks] and [X, rows], whose sum bounds a log from above.

        That at i is of what all blocks from the i-th on weigh together.
        """
        q_norm = norm(q) * (1 + self.slack)
        aligned = (q @ self.center[:, :, None]).squeeze(-1)
        base = aligned + self.slack * q_norm * self.largest[:, None]
        base = base.to(self.precise) + self.slopes[:, None] * tile.away
        most = q_norm.amax(1, keepdim=True).to(self.precise)
        bias = self.slopes[:, None] * tile.gaps * (1 - self.slack)
        each = self.log_sizes + most * self.reach - bias
        return each[:, tile.order].flip(1).logcumsumexp(1).flip(1), base


@dataclass
class Running:
    """The online softmax of one tile: [X, rows, ...], sums of exp(score - row_max)."""

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor

    def add(
        self,
        heads: Tensor | slice,
        score: Tensor,
        values: Tensor,
        drop: Callable[[Tensor], Tensor],
    ) -> None:
        before = self.row_max[heads]
        new_max = torch.maximum(before, score.amax(-1, keepdim=True))
        weight = score.sub_(new_max).exp_()
        shrink = (before - new_max).exp_()
        self.row_max[heads] = new_max
        self.row_sum[heads] = self.row_sum[heads] * shrink + weight.sum(-1, keepdim=True)
        self.acc[heads] = torch.baddbmm(self.acc[heads] * shrink, drop(weight), values)


def _fill(inputs: PointInputs, results: Results) -> None:
    for cloud in _clouds(inputs):
        q, k, v, slope = cloud.arrays()
        certificate = Certificate(cloud, k, v, slope)
        out, rest = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(3, *q.shape[:2])
        for index, tile in enumerate(cloud.tiles()):
            counts = _forward_tile(cloud, tile, certificate, (q, k, v, slope), out, rest)
            results.visited[cloud.row, :, index] = counts.view(-1, inputs.q.shape[1])
        for array, target in zip((out, *rest), (*results[:3], results.away), strict=True):
            cloud.put_back(array, cloud.queries, target)


def _num_tiles(inputs: PointInputs) -> int:
    """As many as a row without padding has."""
    first = inputs.global_tokens if inputs.query_points is None else 0
    return sum(-(-n // SIZE) for n in (first, inputs.q.shape[2] - first))


def _forward_tile(
    cloud: Cloud,
    tile: Tile,
    certificate: Certificate,
    arrays: tuple[Tensor, ...],
    out: Tensor,
    rest: Tensor,
) -> Tensor:
    """Fill the tile's rows of out, row_max, log_sum and away; count the blocks visited."""
    q, k, v, slope = arrays
    q = q[:, tile.rows]
    left, base = certificate.about(q, tile)
    X, rows, _ = q.shape
    running = Running(
        q.new_zeros(X, rows, v.shape[2]),
        q.new_full((X, rows, 1), -torch.inf),
        q.new_zeros(X, rows, 1),
    )
    visited = torch.zeros(X, dtype=torch.int32)
    heads = torch.arange(X, device=q.device)
    for step, block in enumerate(tile.order.tolist()):
        if step:
            # The sum in hand, in the row that has least of it beside what it could still get.
            row_max, row_sum = (
                x[heads].to(base.dtype) for x in (running.row_max, running.row_sum)
            )
            sums = row_max + row_sum.log()
            room = (sums.squeeze(-1) - base[heads]).amin(1) + certificate.log_tolerance
            # A comparison with NaN is False: what cannot be bounded is visited.
            heads = heads[~(left[heads, step] <= room)]
            if not heads.numel():
                break
        visited[heads.cpu()] = step + 1
        chosen = heads if heads.numel() < X else slice(None)
        columns = tile.blocks[block]
        score = _score(cloud, tile, columns, q[chosen], k, slope, heads, chosen)[0]
        drop = partial(cloud.drop, heads=heads, rows=tile.rows, columns=columns)
        running.add(chosen, score, _of_heads(v, heads, X)[:, columns], drop)
    out[:, tile.rows] = running.acc / running.row_sum
    rest[0, :, tile.rows] = running.row_max.squeeze(-1)
    rest[1, :, tile.rows] = running.row_sum.squeeze(-1).log()
    rest[2, :, tile.rows] = tile.away.to(rest.dtype)
    return visited


def _score(
    cloud: Cloud,
    tile: Tile,
    columns: slice,
    q: Tensor,
    k: Tensor,
    slope: Tensor,
    heads: Tensor,
    chosen: Tensor | slice,
) -> tuple[Tensor, Tensor | None]:
    """Score [heads, rows, columns], and the distances [rows, columns] in it."""
    keys = _of_heads(k, heads, len(slope))[:, columns]
    score = q @ keys.mT
    apart = cloud.distance(tile, columns)
    if apart is not None:
        score.addcmul_(slope[chosen][:, None, None], apart, value=-1)
    return score, apart


def _of_heads(array: Tensor, heads: Tensor, X: int) -> Tensor:
    """Of keys or values [Y, N, size] those that these of the X query heads read."""
    n = X // len(array)
    return array if n == 1 and len(heads) == X else array[heads // n]


def _find_gradients(inputs: PointInputs, dout: Tensor, dlse: Tensor, saved: Results) -> Gradients:
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    dslopes = torch.zeros_like(inputs.slopes)
    for cloud in _clouds(inputs):
        arrays = cloud.arrays()
        # Weights are exp(score - row_max) times this.
        row_max, log_sum, out, given, given_lse = (
            cloud.heads(x, cloud.queries)
            for x in (saved.row_max, saved.log_sum, saved.out, dout, dlse)
        )
        per_sum, pivot = (-log_sum).exp(), row_max[..., None]
        delta = ((given * out).sum(-1) - given_lse) * per_sum
        given *= per_sum[..., None]
        rows_given = pivot, given, delta[..., None]
        sums = tuple(map(torch.zeros_like, arrays))
        visited = saved.visited[cloud.row].flatten(0, 1)
        for index, tile in enumerate(cloud.tiles()):
            _backward_tile(cloud, tile, visited[:, index], arrays, rows_given, sums)
        cloud.put_back(sums[0] * inputs.scale, cloud.queries, dq)
        cloud.put_back(sums[1], cloud.keys, dk)
        cloud.put_back(sums[2], cloud.keys, dv)
        dslopes[cloud.row] = sums[3].view_as(dslopes[cloud.row])
    return dq, dk, dv, dslopes


def _backward_tile(
    cloud: Cloud,
    tile: Tile,
    visited: Tensor,
    arrays: tuple[Tensor, ...],
    rows_given: tuple[Tensor, ...],
    sums: tuple[Tensor, ...],
) -> None:
    """Add one tile's part to dq (over scale), dk, dv and dslope.

    dout and delta come divided by the row sums, so that unnormalised weights serve.
    """
    q, k, v, slope = arrays
    dq, dk, dv, dslope = sums
    q = q[:, tile.rows]
    pivot, given, delta = (x[:, tile.rows] for x in rows_given)
    X, n = len(q), len(q) // len(k)
    for step, block in enumerate(tile.order[: int(visited.max())].tolist()):
        heads = (visited > step).nonzero().squeeze(-1).to(q.device)
        chosen = heads if heads.numel() < X else slice(None)
        columns = tile.blocks[block]
        score, apart = _score(cloud, tile, columns, q[chosen], k, slope, heads, chosen)
        weight = score.sub_(pivot[chosen]).exp_()
        drop = partial(cloud.drop, heads=heads, rows=tile.rows, columns=columns)
        dv[:, columns].index_add_(0, heads // n, drop(weight).mT @ given[chosen])
        dweight = drop(given[chosen] @ _of_heads(v, heads, X)[:, columns].mT)
        dscore = weight.mul_(dweight.sub_(delta[chosen]))
        dq[:, tile.rows].index_add_(0, heads, dscore @ _of_heads(k, heads, X)[:, columns])
        dk[:, columns].index_add_(0, heads // n, dscore.mT @ q[chosen])
        if apart is not None:
            dslope.index_add_(0, heads, -(dscore * apart).sum((-1, -2)))


operators = PointOperators(NAME, _fill, _find_gradients, _num_tiles)
attention = operators.attention
