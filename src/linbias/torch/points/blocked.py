"""Attention over points in portable PyTorch operations: from near to far, without a term in N x N.

SIZE tokens in a row on a Hilbert curve make a block with a small box around its points. Blocks of
keys are visited by the distance g of their boxes; for any fixed c no score of one is above
scale * q . c + |scale| * |q| * max |k_s - c| - slope * g. Backward visits the same blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from linbias._dispatch import Abilities
from linbias.torch.impl.certificate import norm
from linbias.torch.points.geometry import PointInputs, along_a_curve, box_distances, distances
from linbias.torch.points.operator import Gradients, PointOperators, Results

NAME = "blocked"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="near to far in PyTorch operations",
    memory="linear in length",
    has=("dropout",),
)
why_not = ABILITIES.lacks
SIZE = 128  # tokens of a tile of queries, and of a block of keys


@dataclass(frozen=True)
class Tile:
    """Some tokens as queries, and the blocks of keys in the order in which they visit them."""

    rows: slice
    blocks: list[slice]
    gaps: Tensor  # [blocks]: how far the boxes lie from the tile's, at least
    order: Tensor  # [blocks], int64


@dataclass(frozen=True)
class Cloud:
    """Batch rows that have the same points: X query and Y key/value heads, in curve order."""

    inputs: PointInputs
    row: slice  # of the batch
    points: Tensor  # [N - global_tokens, A], in curve order
    order: Tensor  # [N], int64: token i of the curve is token order[i] of the caller
    wide: torch.dtype

    @property
    def num_tokens(self) -> int:
        return len(self.order)

    @cached_property
    def slices(self) -> list[slice]:
        """The blocks; those of tokens that stand nowhere come first, and apart."""
        first, N = self.inputs.global_tokens, self.num_tokens
        return [
            slice(start, min(end, start + SIZE))
            for begin, end in ((0, first), (first, N))
            for start in range(begin, end, SIZE)
        ]

    @cached_property
    def boxes(self) -> tuple[Tensor, Tensor]:
        """The least and largest coordinates of blocks that stand somewhere, [blocks, A] each."""
        first = self.inputs.global_tokens
        parts = [
            self.points[b.start - first : b.stop - first] for b in self.slices if b.start >= first
        ]
        return torch.stack([p.amin(0) for p in parts]), torch.stack([p.amax(0) for p in parts])

    def heads(self, array: Tensor) -> Tensor:
        """[B, heads, N, ...] of the call -> [heads of these rows, N, ...] in curve order, wide."""
        return array[self.row].flatten(0, 1)[:, self.order].to(self.wide)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q times scale, k, v, and the slopes [X], of these rows."""
        x = self.inputs
        q, k, v = (self.heads(array) for array in (x.q, x.k, x.v))
        return q * x.scale, k, v, x.slopes[self.row].flatten()

    def put_back(self, array: Tensor, target: Tensor) -> None:
        """Write [heads of these rows, N, ...], in curve order, into an array of the call."""
        back = torch.empty_like(array)
        back[:, self.order] = array
        target[self.row] = back.unflatten(0, target[self.row].shape[:2])

    def tiles(self) -> Iterator[Tile]:
        num_global = -(-self.inputs.global_tokens // SIZE)
        for index, rows in enumerate(self.slices):
            gaps = self.points.new_zeros(len(self.slices))
            if index >= num_global:
                lows, highs = self.boxes
                here = index - num_global
                gaps[num_global:] = box_distances(
                    lows[here], highs[here], lows, highs, self.inputs.manhattan
                )
            # Of the blocks at distance 0 those without a place come first, then the tile's own.
            near = gaps.clone()
            near[:num_global] = -2.0
            near[index] = min(-1.0, near[index].item())
            yield Tile(rows, self.slices, gaps, torch.argsort(near, stable=True))

    def distance(self, rows: slice, columns: slice) -> Tensor | None:
        """[rows, columns], wide; None where one of them stands nowhere."""
        first = self.inputs.global_tokens
        if rows.start < first or columns.start < first:
            return None
        near, far = (self.points[s.start - first : s.stop - first] for s in (rows, columns))
        return distances(near, far, self.inputs.manhattan).to(self.wide)


def _clouds(inputs: PointInputs) -> Iterator[Cloud]:
    """Split a call by batch row where their points differ."""
    B, N = inputs.q.shape[0], inputs.q.shape[2]
    if not inputs.q.numel() or not inputs.v.numel():
        return
    shared = inputs.points.shape[0] == 1
    for b, points in enumerate(inputs.points):
        curve = along_a_curve(points)
        order = torch.arange(N, device=points.device)
        order[inputs.global_tokens :] = curve + inputs.global_tokens
        row = slice(0, B) if shared else slice(b, b + 1)
        yield Cloud(inputs, row, points[curve], order, inputs.slopes.dtype)


class Certificate:
    """When may a head of a tile stop? Never before a key or value that is not finite."""

    def __init__(self, cloud: Cloud, k: Tensor, v: Tensor, slopes: Tensor) -> None:
        # Relative rounding of norms, of dot products over D terms, and of the scores in the sums.
        self.slack = (k.shape[-1] + 8) * torch.finfo(k.dtype).eps
        self.precise = cloud.points.dtype  # of the sums over blocks
        n = len(slopes) // len(k)
        center = k.mean(1)
        radius = norm(k - center[:, None]) * (1 + self.slack) + 0.0 * v.sum(-1)
        reach = torch.stack([radius[:, b].amax(1) for b in cloud.slices], 1)
        self.largest = (norm(center) + reach.amax(1)).repeat_interleave(n, 0)
        self.center = center.repeat_interleave(n, 0)  # [X, D]
        self.reach = reach.repeat_interleave(n, 0).to(self.precise)  # [X, blocks]
        sizes = torch.tensor([b.stop - b.start for b in cloud.slices], device=k.device)
        self.log_sizes = sizes.to(self.precise).log()
        self.slopes = slopes.to(self.precise)
        tolerance = cloud.inputs.tolerance
        self.log_tolerance = math.log(tolerance) if tolerance else -math.inf

    def about(self, q: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """For rows q [X, rows, D]: [X, blocks] and [X, rows], whose sum bounds a log from above.

        That at i is of what all blocks from the i-th on weigh together.
        """
        q_norm = norm(q) * (1 + self.slack)
        aligned = (q @ self.center[:, :, None]).squeeze(-1)
        base = aligned + self.slack * q_norm * self.largest[:, None]
        most = q_norm.amax(1, keepdim=True).to(self.precise)
        bias = self.slopes[:, None] * tile.gaps * (1 - self.slack)
        each = self.log_sizes + most * self.reach - bias
        return each[:, tile.order].flip(1).logcumsumexp(1).flip(1), base.to(self.precise)


@dataclass
class Running:
    """The online softmax of one tile: [X, rows, ...], sums of exp(score - row_max)."""

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor

    def add(self, heads: Tensor | slice, score: Tensor, values: Tensor) -> None:
        before = self.row_max[heads]
        new_max = torch.maximum(before, score.amax(-1, keepdim=True))
        weight = score.sub_(new_max).exp_()
        shrink = (before - new_max).exp_()
        self.row_max[heads] = new_max
        self.row_sum[heads] = self.row_sum[heads] * shrink + weight.sum(-1, keepdim=True)
        self.acc[heads] = torch.baddbmm(self.acc[heads] * shrink, weight, values)


def _fill(inputs: PointInputs, results: Results) -> None:
    for cloud in _clouds(inputs):
        q, k, v, slope = cloud.arrays()
        certificate = Certificate(cloud, k, v, slope)
        out, rest = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(2, *q.shape[:2])
        for index, tile in enumerate(cloud.tiles()):
            counts = _forward_tile(cloud, tile, certificate, (q, k, v, slope), out, rest)
            results.visited[cloud.row, :, index] = counts.view(-1, inputs.q.shape[1])
        for array, target in zip((out, *rest), results[:3], strict=True):
            cloud.put_back(array, target)


def _num_tiles(inputs: PointInputs) -> int:
    first, N = inputs.global_tokens, inputs.q.shape[2]
    return sum(-(-n // SIZE) for n in (first, N - first))


def _forward_tile(
    cloud: Cloud,
    tile: Tile,
    certificate: Certificate,
    arrays: tuple[Tensor, ...],
    out: Tensor,
    rest: Tensor,
) -> Tensor:
    """Fill the tile's rows of out, row_max and log_sum; count the blocks visited."""
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
        score = _score(cloud, tile.rows, tile.blocks[block], q[chosen], k, slope, heads, chosen)[0]
        running.add(chosen, score, _of_heads(v, heads, X)[:, tile.blocks[block]])
    out[:, tile.rows] = running.acc / running.row_sum
    rest[0, :, tile.rows] = running.row_max.squeeze(-1)
    rest[1, :, tile.rows] = running.row_sum.squeeze(-1).log()
    return visited


def _score(
    cloud: Cloud,
    rows: slice,
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
    apart = cloud.distance(rows, columns)
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
        per_sum = (-cloud.heads(saved.log_sum)).exp()
        pivot = cloud.heads(saved.row_max)[..., None]
        given = cloud.heads(dout)
        delta = ((given * cloud.heads(saved.out)).sum(-1) - cloud.heads(dlse)) * per_sum
        given *= per_sum[..., None]
        rows_given = pivot, given, delta[..., None]
        sums = tuple(map(torch.zeros_like, arrays))
        visited = saved.visited[cloud.row].flatten(0, 1)
        for index, tile in enumerate(cloud.tiles()):
            _backward_tile(cloud, tile, visited[:, index], arrays, rows_given, sums)
        for array, target in zip((sums[0] * inputs.scale, *sums[1:3]), (dq, dk, dv), strict=True):
            cloud.put_back(array, target)
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
        score, apart = _score(cloud, tile.rows, columns, q[chosen], k, slope, heads, chosen)
        weight = score.sub_(pivot[chosen]).exp_()
        dv[:, columns].index_add_(0, heads // n, weight.mT @ given[chosen])
        dweight = given[chosen] @ _of_heads(v, heads, X)[:, columns].mT
        dscore = weight.mul_(dweight.sub_(delta[chosen]))
        dq[:, tile.rows].index_add_(0, heads, dscore @ _of_heads(k, heads, X)[:, columns])
        dk[:, columns].index_add_(0, heads // n, dscore.mT @ q[chosen])
        if apart is not None:
            dslope.index_add_(0, heads, -(dscore * apart).sum((-1, -2)))


operators = PointOperators(NAME, _fill, _find_gradients, _num_tiles)
attention = operators.attention
