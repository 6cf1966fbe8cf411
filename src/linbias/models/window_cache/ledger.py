"""A bound of constant size on what the keys that the heads of a layer dropped can weigh.

It is `linbias.streams.Dropped`, where the idea is explained, for all rows and heads at once.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from linbias.streams import GRID, SLACK


class Ledger:
    """A bound on what the dropped keys of a layer weigh in a row.

    Args:
        slopes: [H].
        scale: Factor on q . k.
        center: [B, G, D].
    """

    def __init__(self, slopes: Tensor, scale: float, center: Tensor) -> None:
        B, G, _ = center.shape
        self.sharing = len(slopes) // G
        self.slopes, self.scale = slopes.double(), scale
        self.center = center.double()
        self.grid = torch.from_numpy(GRID).to(center.device)
        self.sums = self.center.new_full((B, len(slopes), len(GRID)), -math.inf)
        self.largest = self.center.new_zeros(B, G)
        self.at = [0] * G  # the position after the last key that was dropped
        self.count = [0] * G

    def radius(self, keys: Tensor, heads: Tensor) -> Tensor:
        """[B, n]: at least |k - center| of keys [B, n, D] of heads [n]; inf for a key that is not finite."""
        radius = (keys.double() - self.center[:, heads]).norm(dim=-1) * (1 + SLACK)
        return radius.nan_to_num_(math.inf, math.inf)

    def growth(self, radius: Tensor, behind: Tensor, heads: Tensor, columns: slice) -> Tensor:
        """[B, sharing, J, n]: the logarithms of what keys add to the sums of some columns of the grid.

        Args:
            radius: [B, n], as of `radius`; -inf for keys that weigh nothing.
            behind: [n], how far they lie behind the position that the sums are of.
            heads: [n], the key/value head of each.
            columns: Of the grid.
        """
        slopes = self.slopes.view(-1, self.sharing)[heads].T  # [sharing, n]
        grid = self.grid[columns, None]
        grown = grid * radius[:, None, None] - (slopes * behind)[:, None]
        if radius.isinf().any():  # not 0 times inf: padding weighs nothing, an infinite key all
            grown = torch.where(radius.isinf()[:, None, None], radius[:, None, None], grown)
        return grown

    def add(
        self, keys: Tensor, counts: Sequence[int], oldest: Sequence[int], first: Tensor | None
    ) -> None:
        """Take over keys.

        Args:
            keys: [B, sum(counts), D]: counts[g] keys of each head g, one head after the other.
            counts: [G].
            oldest: [G], the position of the first of them; the others follow.
            first: [B] or None: keys before it are padding.
        """
        device, G = keys.device, len(counts)
        heads = torch.arange(G, device=device).repeat_interleave(
            torch.tensor(counts, device=device)
        )
        both = zip(oldest, counts, strict=True)
        positions = torch.cat([torch.arange(o, o + n, device=device) for o, n in both])
        at = [o + n if n else old for o, n, old in zip(oldest, counts, self.at, strict=True)]
        ends = torch.tensor(at, device=device)
        radius = self.radius(keys, heads)
        if first is not None:
            radius = radius.masked_fill(positions < first[:, None], -math.inf)
        grown = self.growth(radius, ends[heads] - positions, heads, slice(None))
        parts = [part.logsumexp(-1) for part in grown.split(list(counts), -1)]
        since = (ends - torch.tensor(self.at, device=device)).repeat_interleave(self.sharing)
        decayed = self.sums - (self.slopes * since)[:, None]
        self.sums = torch.logaddexp(decayed, torch.cat(parts, 1))
        none = radius.new_zeros(len(radius))
        by_head = radius.split(list(counts), -1)
        largest = [part.amax(-1) if part.shape[-1] else none for part in by_head]
        self.largest = torch.maximum(self.largest, torch.stack(largest, -1))
        self.at, self.count = at, [old + n for old, n in zip(self.count, counts, strict=True)]

    def lengths(self, q: Tensor) -> Tensor:
        """[..., T]: at least |scale q|, of q [..., T, D] in float64."""
        return abs(self.scale) * q.norm(dim=-1) * (1 + SLACK)

    def bound(self, q: Tensor, lse: Tensor, positions: Tensor) -> Tensor:
        """[B, H, T]: log(weight of the dropped keys / weight of those that were read) at most.

        It is -inf where none was dropped.
        """
        q, device = q.double(), q.device
        center = self.center.repeat_interleave(self.sharing, 1)
        at, dropped = (
            torch.tensor(x, device=device).repeat_interleave(self.sharing)[:, None]
            for x in (self.at, self.count)
        )
        largest = self.largest.repeat_interleave(self.sharing, 1)
        most = chord(self.grid, self.sums[..., None], self.lengths(q), largest)[..., 0]
        own = self.scale * (q @ center[..., None])[..., 0]
        bound = own + most - self.slopes[:, None] * (positions - at) - lse.double()
        return torch.where(dropped > 0, bound, -math.inf)

    def select(self, rows: Tensor) -> None:
        """Keep some batch rows, in a new order, and perhaps repeated."""
        self.sums, self.largest, self.center = (
            x[rows] for x in (self.sums, self.largest, self.center)
        )

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.sums, self.largest, self.center))


def chord(grid: Tensor, sums: Tensor, lengths: Tensor, largest: Tensor) -> Tensor:
    """At least the convex function that `sums` are values of: between two columns of the grid the chord.

    Args:
        grid: [J].
        sums: [B, H, J, C], for each of C sets of keys.
        lengths: [B, H, T].
        largest: [B, H], the steepest that the function becomes beyond the grid; inf for keys that are not finite.

    Returns:
        [B, H, T, C].
    """
    right = torch.searchsorted(grid, lengths).clamp_(1, len(grid) - 1)
    low = grid[right - 1]
    share = ((lengths - low) / (grid[right] - low)).clamp_(max=1.0)[..., None]
    C = sums.shape[-1]
    below, above = (
        sums.gather(2, at[..., None].expand(-1, -1, -1, C)) for at in (right - 1, right)
    )
    most = torch.where(below.isneginf(), below, below + share * (above - below))
    largest = largest[..., None, None]
    beyond = (lengths - grid[-1]).clamp_(min=0)[..., None]
    most = most + torch.where(beyond > 0, beyond * largest, 0.0)
    return torch.where(largest.isinf(), math.inf, most)
