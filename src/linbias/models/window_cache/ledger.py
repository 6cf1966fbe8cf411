"""A ledger of constant size: an upper bound on all weight that dropped keys would have in a row.

For lengths r of |scale q| on a fixed grid it keeps, for each query head,

    sums[r] = log sum over dropped keys s of exp(r |k_s - center| - slope * (at - s))

which a key joins once and which falls by `slope` for every token since, so that a huge key is
forgotten as its distance grows. As a function of r it is convex: between two lengths of the grid
the chord is an upper bound, and beyond the last one the largest |k - center| is its steepest
slope. The proof is in docs/math.md.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

GRID = (0.0, *(2.0 ** (n / 2) for n in range(-8, 13)))  # lengths, up to 64
_SLACK = 1e-6  # more than the rounding of norms in float32
_STEPS = 32  # numbers of keys to choose from
_MARGIN = 3.0  # nats by which a choice stays on the safe side of the rows before


class Ledger:
    """What is known of the dropped keys of a layer.

    The center [B, G, D] is any vector of each head: the bound is tight where keys lie around it.
    """

    def __init__(self, slopes: Tensor, scale: float, center: Tensor) -> None:
        B, G, _ = center.shape
        self.sharing = len(slopes) // G
        self.slopes, self.scale = slopes.double(), scale
        self.center = center.double()
        self.grid = self.center.new_tensor(GRID)
        self.sums = self.center.new_full((B, len(slopes), len(GRID)), -math.inf)
        self.largest = self.center.new_zeros(B, G)
        self.at = [0] * G  # the position after the last key that was dropped
        self.count = [0] * G

    def radius(self, keys: Tensor, heads: Tensor) -> Tensor:
        """[B, n]: at least |k - center| of keys [B, n, D] of heads [n]; inf if not finite."""
        radius = (keys.double() - self.center[:, heads]).norm(dim=-1) * (1 + _SLACK)
        return radius.nan_to_num_(math.inf, math.inf)

    def growth(self, radius: Tensor, behind: Tensor, heads: Tensor, columns: slice) -> Tensor:
        """[B, sharing, J, n]: the logarithms of what keys, so far behind, add to columns."""
        slopes = self.slopes.view(-1, self.sharing)[heads].T  # [sharing, n]
        grid = self.grid[columns, None]
        grown = grid * radius[:, None, None] - (slopes * behind)[:, None]
        if radius.isinf().any():  # not 0 times inf: padding weighs nothing, an infinite key all
            grown = torch.where(radius.isinf()[:, None, None], radius[:, None, None], grown)
        return grown

    def add(
        self, keys: Tensor, counts: Sequence[int], oldest: Sequence[int], first: Tensor | None
    ) -> None:
        """Take over keys [B, sum(counts), D], head by head; before `first` [B] is padding."""
        device, G = keys.device, len(counts)
        both = zip(range(G), counts, strict=True)
        heads = torch.cat([torch.full((n,), g, device=device) for g, n in both])
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
        return abs(self.scale) * q.norm(dim=-1) * (1 + _SLACK)

    def bound(self, q: Tensor, lse: Tensor, positions: Tensor) -> Tensor:
        """[B, H, T]: log(weight of the dropped keys / weight of those that were read) at most."""
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

    def keys_needed(
        self,
        g: int,
        keys: Tensor,
        end: int,
        q: Tensor,
        lse: Tensor,
        most: float,
        first: Tensor | None,
    ) -> int:
        """The fewest of a head's keys, in 32nds, with which rows like q will be certified."""
        n, device = keys.shape[1], keys.device
        heads = slice(g * self.sharing, (g + 1) * self.sharing)
        q = q[:, heads].double()
        lengths = self.lengths(q)
        if not lengths.isfinite().all():
            return n
        # The columns of the grid around these queries, and in them what blocks of keys add.
        last, ends = len(self.grid) - 1, torch.stack([lengths.min(), lengths.max()])
        low, high = torch.searchsorted(self.grid, ends).tolist()
        columns = slice(min(max(low - 1, 0), last - 1), min(max(high, 1), last) + 1)
        block = -(-n // _STEPS)
        num_blocks = -(-n // block)
        of, positions = (
            torch.full((n,), g, device=device),
            torch.arange(end - n, end, device=device),
        )
        radius = self.radius(keys, of)
        largest = torch.maximum(self.largest[:, g], radius.amax(-1))
        if first is not None:
            radius = radius.masked_fill(positions < first[:, None], -math.inf)
        grown = self.growth(radius, end - positions, of, columns)
        grown = pad(grown, (0, num_blocks * block - n), value=-math.inf)
        blocks = grown.unflatten(-1, (num_blocks, block)).logsumexp(-1)
        decay = self.slopes[heads, None, None] * (end - self.at[g])
        before = self.sums[:, heads, columns, None] - decay
        sums = torch.cat([before, blocks], -1).logcumsumexp(-1)[..., 1:]  # [B, sharing, J, blocks]
        # [B, sharing, T, blocks]: the bound of such a row, if that many blocks leave
        largest = largest[:, None].expand(-1, self.sharing)
        own = self.scale * (q @ self.center[:, g, :, None].unsqueeze(1))[..., 0]
        own = (own - lse[:, heads].double())[..., None]
        bound = chord(self.grid[columns], sums, lengths, largest) + own
        passes = (bound <= most - _MARGIN).all(0).all(0).all(0)
        leave = int(passes.int().cumprod(0).sum())  # the bound grows with every key that leaves
        return n - min(n, leave * block)

    def select(self, rows: Tensor) -> None:
        """Keep some batch rows, in a new order, and perhaps repeated."""
        self.sums, self.largest = self.sums[rows], self.largest[rows]
        self.center = self.center[rows]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.sums, self.largest, self.center))


def chord(grid: Tensor, sums: Tensor, lengths: Tensor, largest: Tensor) -> Tensor:
    """[B, H, T, C]: at least the convex functions of lengths [B, H, T] with values sums.

    Between two columns of the grid [J] it is the chord; beyond, functions grow by largest [B, H]
    at most, which is inf for keys that are not finite.
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
