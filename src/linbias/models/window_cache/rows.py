"""Rows of a text that were read, and how many keys rows like them need."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from linbias.models.window_cache.ledger import Ledger, chord

_STEPS = 32  # numbers of keys to choose from
_MARGIN = 3.0  # nats by which a choice stays on the safe side of the rows before


@dataclass(frozen=True)
class Rows:
    """Queries [B, H, T, D] and their lse [B, H, T], at positions start, start + 1, ..."""

    q: Tensor
    lse: Tensor
    start: int

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.start + self.q.shape[2], device=self.q.device)

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        if len(parts) == 1:
            return parts[0]
        q, lse = (torch.cat([getattr(part, name) for part in parts], 2) for name in ("q", "lse"))
        return cls(q=q, lse=lse, start=parts[0].start)

    def first(self, count: int) -> "Rows":
        return Rows(q=self.q[:, :, :count], lse=self.lse[:, :, :count], start=self.start)

    def last(self, count: int) -> "Rows":
        skipped = max(0, self.q.shape[2] - count)
        start = self.start + skipped
        return Rows(q=self.q[:, :, skipped:], lse=self.lse[:, :, skipped:], start=start)

    def select(self, rows: Tensor) -> "Rows":
        return Rows(q=self.q[rows], lse=self.lse[rows], start=self.start)


def keys_needed(
    g: int, keys: Tensor, end: int, rows: Rows, ledger: Ledger, most: float, first: Tensor | None
) -> int:
    """The fewest keys, in 32nds, with which rows like these will be certified if they come next.

    Args:
        g: The key/value head.
        keys: [B, n, D], that it keeps, the oldest first.
        end: The position after the last of them.
        rows: The last ones, than which those to come may need a little more.
        ledger: Of the keys that left before.
        most: The logarithm of what the dropped keys may weigh.
        first: [B] or None: keys before it are padding.
    """
    n, device = keys.shape[1], keys.device
    heads = slice(g * ledger.sharing, (g + 1) * ledger.sharing)
    q = rows.q[:, heads].double()
    lengths = ledger.lengths(q)
    if not lengths.isfinite().all():
        return n
    # The columns of the grid around these queries, and in them what blocks of keys add.
    last, ends = len(ledger.grid) - 1, torch.stack([lengths.min(), lengths.max()])
    low, high = torch.searchsorted(ledger.grid, ends).tolist()
    columns = slice(min(max(low - 1, 0), last - 1), min(max(high, 1), last) + 1)
    block = -(-n // _STEPS)
    num_blocks = -(-n // block)
    of, positions = torch.full((n,), g, device=device), torch.arange(end - n, end, device=device)
    radius = ledger.radius(keys, of)
    largest = torch.maximum(ledger.largest[:, g], radius.amax(-1))
    if first is not None:
        radius = radius.masked_fill(positions < first[:, None], -math.inf)
    grown = ledger.growth(radius, end - positions, of, columns)
    grown = pad(grown, (0, num_blocks * block - n), value=-math.inf)
    blocks = grown.unflatten(-1, (num_blocks, block)).logsumexp(-1)
    decay = ledger.slopes[heads, None, None] * (end - ledger.at[g])
    before = ledger.sums[:, heads, columns, None] - decay
    sums = torch.cat([before, blocks], -1).logcumsumexp(-1)[..., 1:]  # [B, sharing, J, blocks]
    # [B, sharing, T, blocks]: the bound of such a row, if that many blocks leave
    largest = largest[:, None].expand(-1, ledger.sharing)
    own = ledger.scale * (q @ ledger.center[:, g, :, None].unsqueeze(1))[..., 0]
    own = (own - rows.lse[:, heads].double())[..., None]
    bound = chord(ledger.grid[columns], sums, lengths, largest) + own
    passes = (bound <= most - _MARGIN).all(0).all(0).all(0)
    leave = int(passes.int().cumprod(0).sum())  # the bound grows with every key that leaves
    return n - min(n, leave * block)
