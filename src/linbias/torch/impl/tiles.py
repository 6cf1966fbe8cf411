"""One tile of near-to-far attention, forward and backward, in the wide dtype.

A tile is some rows of the query heads that read one key/value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linbias.torch.dropout import keep_mask
from linbias.torch.impl.certificate import LEFT, RIGHT, Certificate

ROWS = 256  # query rows per tile, counted over the query heads of a group
BLOCK = 256  # keys per block


@dataclass(frozen=True)
class Tile:
    """Query rows start .. stop - 1; row t has position t + shift."""

    start: int
    stop: int
    shift: int
    num_keys: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def near(self) -> tuple[int, int]:
        """The keys visited first: those at the tile's positions, and up to BLOCK in all before."""
        stop = min(max(self.stop + self.shift, 0), self.num_keys)
        start = min(max(self.start + self.shift, 0), stop)
        return max(0, min(start, stop - BLOCK)), stop

    def outwards(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Side, index and keys of every further block from near to far, the sides in turn."""
        first, last = self.near
        counts = -(-first // BLOCK), -(-(self.num_keys - last) // BLOCK)
        for index in range(max(counts)):
            if index < counts[LEFT]:
                yield LEFT, index, (max(0, first - (index + 1) * BLOCK), first - index * BLOCK)
            if index < counts[RIGHT]:
                low = last + index * BLOCK
                yield RIGHT, index, (low, min(self.num_keys, low + BLOCK))


def tile_rows(group_size: int) -> int:
    """Rows of a tile; the more heads share it, the fewer."""
    return max(16, ROWS // max(1, group_size))


@dataclass(frozen=True)
class Group:
    """One key/value head of some batch rows, with the n query heads that read it.

    Row t of q stands at position t + shift, where 0 is the first of `keys`.
    """

    q: Tensor  # [B, n, T, D], input dtype
    k: Tensor  # [B, S, D], wide
    v: Tensor  # [B, S, E], wide
    left: Tensor  # [B or 1, n, 1, 1], wide
    right: Tensor | None  # likewise; None: causal
    scale: float
    dropout: float
    seed: Tensor | None
    batch_heads: Tensor  # [B, n], int64: b * H + h of the call
    rows: slice
    heads: slice
    kv_head: int
    keys: slice
    shift: int
    ranges: Tensor | None  # [B, T, 2]: the keys of each row, from the first of `keys`; None: all
    x: Tensor | None  # [B, 1 or n, S], float64: where keys stand; None: key s at s
    xq: Tensor | None  # [B, 1 or n, T], likewise: queries

    @property
    def tiles(self) -> list[Tile]:
        n, T = self.q.shape[1:3]
        step = tile_rows(n)
        starts = range(0, T, step)
        return [Tile(t, min(T, t + step), self.shift, self.k.shape[1]) for t in starts]

    def seen(self, tile: Tile) -> tuple[int, int]:
        """The first and one past the last key that some row of a tile has in its range."""
        if self.ranges is None:
            return 0, tile.num_keys
        first, end = self.ranges[:, tile.rows].unbind(-1)
        some = first < end
        if not some.any():
            return 0, 0
        return int(first[some].min()), int(end[some].max())

    def mask(self, score: Tensor, tile: Tile, keys: tuple[int, int]) -> Tensor:
        """-inf for keys outside the range of their row, in place: [B, heads, rows, keys]."""
        if self.ranges is None:
            return score
        first, end = self.ranges[:, None, tile.rows].split(1, dim=-1)
        key = torch.arange(*keys, device=score.device)
        return score.masked_fill_((key < first) | (key >= end), -torch.inf)

    def order(self, tile: Tile, keys: tuple[int, int]) -> Tensor:
        """[rows, keys], by how many keys each lies before a row: exact up to 2^24 (or 2^53)."""
        options: dict[str, Any] = {"device": self.k.device, "dtype": self.k.dtype}
        # Both counted from the first of the keys, so that neither is a large number.
        start = tile.start + tile.shift - keys[0]
        position = torch.arange(start, start + tile.stop - tile.start, **options)
        return position[:, None] - torch.arange(keys[1] - keys[0], **options)

    def distance(self, tile: Tile, keys: tuple[int, int], heads: Tensor | slice) -> Tensor:
        """How far each key lies back of a row: [rows, keys], or [B, 1 or heads, rows, keys]."""
        if self.x is None or self.xq is None:
            return self.order(tile, keys)
        x, xq = _of_heads(self.x, heads)[..., slice(*keys)], _of_heads(self.xq, heads)
        xq = xq[..., tile.rows]
        if keys == tile.near:  # on both sides of the rows
            return (xq[..., None] - x[..., None, :]).to(self.k.dtype)
        # Counted from the key nearest to the rows, both are at least 0: no digits are lost.
        anchor = x[..., -1:] if keys[0] < tile.near[0] else x[..., :1]
        to_rows, to_keys = (xq - anchor).to(self.k.dtype), (anchor - x).to(self.k.dtype)
        return to_rows[..., None] + to_keys[..., None, :]

    def near_score(self, q: Tensor, tile: Tile) -> Tensor:
        """Score [B, n, rows, keys] where keys lie on both sides of the rows; -inf where hidden."""
        order = self.order(tile, tile.near)
        score = _rows_times(q, self.k[:, slice(*tile.near)].mT)
        if self.x is not None:
            score.sub_(self.near_slope(order) * self.distance(tile, tile.near, slice(None)))
        for slope, reach in ((self.left, order), (self.right, -order)):
            if slope is None:
                score.masked_fill_(reach > 0, -torch.inf)
                continue
            if self.x is None:
                score.sub_(torch.where(reach > 0, _finite(slope) * reach, 0.0))
            # Not by a bias of -inf: with a key that is not finite that would be NaN.
            score.masked_fill_((reach > 0) & slope.isinf(), -torch.inf)
        return self.mask(score, tile, tile.near)

    def near_slope(self, order: Tensor) -> Tensor:
        """[B or 1, n, rows, keys]: slopes, less than 0 to the right, 0 for a hidden side."""
        right = self.left if self.right is None else self.right
        return torch.where(order >= 0, _finite(self.left), -_finite(right))

    def far_slope(self, side: int, heads: Tensor | slice) -> Tensor:
        """Likewise, [B or 1, heads, 1, 1], where all keys lie on one side of all rows."""
        slope = self.left if side == LEFT else self.right
        assert slope is not None, "nothing lies to the right of a causal row"
        return _finite(slope[:, heads]) * (1 if side == LEFT else -1)

    def far_score(
        self, q: Tensor, tile: Tile, side: int, keys: tuple[int, int], heads: Tensor | slice
    ) -> Tensor:
        """Score [B, heads, rows, keys] where all keys lie on one side of all rows."""
        score = _rows_times(q, self.k[:, slice(*keys)].mT)
        # To the right, distances are negative.
        slope, sign = (self.left, -1) if side == LEFT else (self.right, 1)
        assert slope is not None, "nothing lies to the right of a causal row"
        slope, distance = slope[:, heads], self.distance(tile, keys, heads)
        if self.x is None:
            return self.mask(score.addcmul_(slope, distance, value=sign), tile, keys)
        # A distance may be 0, and 0 * inf would be NaN.
        score.addcmul_(_finite(slope), distance, value=sign)
        return self.mask(score.masked_fill_(slope.isinf(), -torch.inf), tile, keys)

    def drop(
        self, weight: Tensor, tile: Tile, keys: tuple[int, int], heads: Tensor | slice
    ) -> Tensor:
        """Apply attention dropout to weight [B, heads, rows, keys]."""
        if self.seed is None:
            return weight
        device = self.k.device
        queries = torch.arange(tile.start, tile.stop, device=device)
        columns = torch.arange(*keys, device=device) + self.keys.start
        keep = keep_mask(self.seed, self.dropout, self.batch_heads[:, heads], queries, columns)
        return torch.where(keep, weight / (1 - self.dropout), 0.0)


def forward_tile(
    group: Group, tile: Tile, certificate: Certificate
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out [B, n, rows, E], row_max, log_sum, and the visited blocks [n, 2] of one tile."""
    q = group.q[:, :, tile.rows].to(group.k.dtype) * group.scale
    ranges = None if group.ranges is None else group.ranges[:, tile.rows]
    question = certificate.about(q, tile.start, tile.shift, ranges)
    B, n, rows, _ = q.shape
    acc = q.new_zeros(B, n, rows, group.v.shape[2])
    row_max = q.new_full((B, n, rows, 1), -torch.inf)
    row_sum = q.new_zeros(B, n, rows, 1)

    def visit(score: Tensor, keys: tuple[int, int], heads: Tensor | slice) -> None:
        new_max = torch.maximum(row_max[:, heads], score.amax(-1, keepdim=True))
        # While a row has seen no key its maximum is -inf, and any finite pivot will do.
        pivot = new_max.masked_fill(new_max == -torch.inf, 0.0)
        weight = score.sub_(pivot).exp_()
        shrink = (row_max[:, heads] - pivot).exp_()
        row_max[:, heads] = new_max
        row_sum[:, heads] = row_sum[:, heads] * shrink + weight.sum(-1, keepdim=True)
        dropped = group.drop(weight, tile, keys, heads)
        acc[:, heads] = acc[:, heads] * shrink + _rows_times(dropped, group.v[:, slice(*keys)])

    visited, seen = torch.zeros(n, 2, dtype=torch.int32), group.seen(tile)
    if _meet(tile.near, seen):
        visit(group.near_score(q, tile), tile.near, slice(None))
    open_heads = certificate.open_heads()
    for side, index, keys in tile.outwards():
        if not open_heads[side].numel():
            if not open_heads[LEFT].numel() + open_heads[RIGHT].numel():
                break
            continue
        if not _meet(keys, seen):
            continue
        nearest = keys[1] - 1 if side == LEFT else keys[0]
        heads = open_heads[side]
        lse = row_max[:, heads, :, 0] + row_sum[:, heads, :, 0].log()
        heads = open_heads[side] = heads[~question.covered(side, nearest, heads, lse)]
        if not heads.numel():
            continue
        visited[heads.cpu(), side] = index + 1
        selected = heads if heads.numel() < n else slice(None)
        visit(group.far_score(q[:, selected], tile, side, keys, selected), keys, selected)
    out = acc / row_sum.masked_fill(row_sum == 0, 1.0)
    return out, row_max.squeeze(-1), row_sum.log().squeeze(-1), visited


def backward_tile(
    group: Group,
    tile: Tile,
    visited: Tensor,
    dout: Tensor,
    row_max: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    pulls: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one tile's part to dk, dv and `pulls`, of keys and rows; return dq, dleft and dright.

    dout and delta come divided by the row sums, so that unnormalised weights serve.
    """
    wide = group.k.dtype
    q = group.q[:, :, tile.rows].to(wide) * group.scale
    # exp(score - inf) is 0, the weight of every key in a row that sees none.
    pivot = row_max.masked_fill(row_max == -torch.inf, torch.inf)[..., None]
    dq = torch.zeros_like(q)
    dleft, dright = q.new_zeros(2, *q.shape[:2])

    def visit(score: Tensor, keys: tuple[int, int], heads: Tensor | slice) -> Tensor:
        columns = slice(*keys)
        weight = score.sub_(pivot[:, heads]).exp_()
        dout_heads = dout[:, heads].flatten(1, 2)
        dweight = _rows_times(dout[:, heads], group.v[:, columns].mT)
        dv[:, columns] += group.drop(weight, tile, keys, heads).flatten(1, 2).mT @ dout_heads
        dscore = weight.mul_(group.drop(dweight, tile, keys, heads).sub_(delta[:, heads, :, None]))
        dq[:, heads] += _rows_times(dscore, group.k[:, columns])
        dk[:, columns] += dscore.flatten(1, 2).mT @ q[:, heads].flatten(1, 2)
        return dscore

    def pull(dscore: Tensor, slope: Tensor, keys: tuple[int, int], heads: Tensor | slice) -> None:
        if pulls is not None:
            pulled = dscore * slope
            pulls[0][:, heads, slice(*keys)] += pulled.sum(-2)
            pulls[1][:, heads] -= pulled.sum(-1)

    seen = group.seen(tile)
    if _meet(tile.near, seen):
        dscore = visit(group.near_score(q, tile), tile.near, slice(None))
        distance = group.distance(tile, tile.near, slice(None))
        dleft -= (dscore * distance.clamp(min=0)).sum((-1, -2))
        if group.right is not None:
            dright += (dscore * distance.clamp(max=0)).sum((-1, -2))
        pull(dscore, group.near_slope(group.order(tile, tile.near)), tile.near, slice(None))
    most = visited.amax(0).tolist() if visited.numel() else [0, 0]
    for side, index, keys in tile.outwards():
        if index >= max(most):
            break
        if index >= most[side] or not _meet(keys, seen):
            continue
        heads = (visited[:, side] > index).nonzero().squeeze(-1).to(q.device)
        selected = heads if heads.numel() < q.shape[1] else slice(None)
        dscore = visit(group.far_score(q[:, selected], tile, side, keys, selected), keys, selected)
        moment = (dscore * group.distance(tile, keys, selected)).sum((-1, -2))
        if side == LEFT:
            dleft[:, selected] -= moment
        else:
            dright[:, selected] += moment
        pull(dscore, group.far_slope(side, selected), keys, selected)
    return dq * group.scale, dleft, dright


def _meet(keys: tuple[int, int], others: tuple[int, int]) -> bool:
    return max(keys[0], others[0]) < min(keys[1], others[1])


def _rows_times(rows: Tensor, matrix: Tensor) -> Tensor:
    """[B, heads, rows, x] @ [B, x, y] -> [B, heads, rows, y], the heads folded into the rows."""
    product = rows.flatten(1, 2) @ matrix
    return product.unflatten(1, rows.shape[1:3])


def _finite(slope: Tensor) -> Tensor:
    """Slopes with 0 in the place of infinity, which hides its side."""
    return slope.masked_fill(slope.isinf(), 0.0)


def _of_heads(places: Tensor, heads: Tensor | slice) -> Tensor:
    """[B, 1 or n, size] -> [B, 1 or heads, size]."""
    return places[:, heads] if places.shape[1] > 1 else places
