"""The keys and values that the heads of a layer keep: each head has a region of one pool.

region    | kept keys, oldest first | room |      new keys are written into the room
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias._request import Problem, log_share
from linbias.torch.call import prepare, run
from linbias.torch.decoding import FEW_QUERIES
from linbias.torch.operators.operator import Inputs

CHUNK = 512  # tokens that are written and read at once
_SPARE = 0.25  # of the kept keys: room for new ones, so that moving costs few copies a key


class Scores(NamedTuple):
    """What scores are made of, and the share that both unread and dropped keys may weigh."""

    slopes: Tensor  # [H]
    scale: float
    tolerance: float

    @property
    def most_missed(self) -> float:
        return log_share(self.tolerance)


class Pool:
    """Regions for the key/value heads of k [B, G, T, D] and v [B, G, T, E], empty at first."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.keys = k.new_empty(len(k), 0, k.shape[-1])
        self.values = v.new_empty(len(v), 0, v.shape[-1])
        self.counts = [0] * k.shape[1]
        self._norms: Tensor | None = None  # [G], the largest of the keys that are kept
        self._lay_out([0] * k.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        """All but the calls, which look into the pool: a copy has its own."""
        return self.__dict__ | {"_calls": {}}

    def _lay_out(self, capacities: list[int]) -> None:
        """Where each head's region begins, and where its next key goes."""
        self._capacities = capacities
        self.starts = [sum(capacities[:g]) for g in range(len(capacities))]
        spans = [[start, start + n] for start, n in zip(self.starts, self.counts, strict=True)]
        self._spans = torch.tensor(spans, device=self.keys.device)  # [G, 2]
        self._calls: dict[int, tuple[Inputs, Problem]] = {}  # by number of queries

    def newest(self, g: int, count: int) -> slice:
        """The rows of the last keys of a head."""
        end = self.starts[g] + self.counts[g]
        return slice(end - count, end)

    def full(self, num_tokens: int) -> list[int]:
        """The heads whose regions have no room for so many more tokens."""
        both = enumerate(zip(self.counts, self._capacities, strict=True))
        return [g for g, (n, capacity) in both if n + num_tokens > capacity]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens into the room of each region."""
        T, ends = k.shape[2], self._spans[:, 1]
        rows = (ends[:, None] + torch.arange(T, device=k.device)).flatten() if T > 1 else ends
        self.keys.index_copy_(1, rows, k.flatten(1, 2))
        self.values.index_copy_(1, rows, v.flatten(1, 2))
        ends.add_(T)
        self.counts = [n + T for n in self.counts]

    def take_back(self, num_tokens: int) -> None:
        self.counts = [n - num_tokens for n in self.counts]
        self._lay_out(self._capacities)

    def keep(self, kept: list[int]) -> None:
        """Move the newest keys of each head to the front of its region."""
        for g, keep in enumerate(kept):
            if keep < self.counts[g]:
                for pool in (self.keys, self.values):
                    front = slice(self.starts[g], self.starts[g] + keep)
                    pool[:, front] = pool[:, self.newest(g, keep)].clone()
        self.counts, self._norms = list(kept), None
        self._lay_out(self._capacities)

    def make_room(self, num_tokens: int, heads: list[int], is_first: bool) -> None:
        """Let the regions of heads have room for the next tokens; far too large ones shrink."""
        capacities = list(self._capacities)
        for g in heads:
            room = num_tokens if is_first else max(num_tokens, 2 * CHUNK)
            need = self.counts[g] + max(room, int(self.counts[g] * _SPARE))
            if need > capacities[g] or need < 0.7 * capacities[g]:
                capacities[g] = need
        if capacities == self._capacities:
            return
        before = [self.newest(g, n) for g, n in enumerate(self.counts)]
        self._lay_out(capacities)
        self.keys, self.values = (self._moved(pool, before) for pool in (self.keys, self.values))

    def _moved(self, pool: Tensor, before: list[slice]) -> Tensor:
        new = pool.new_empty(len(pool), sum(self._capacities), pool.shape[-1])
        for g, rows in enumerate(before):
            new[:, self.newest(g, self.counts[g])] = pool[:, rows]
        return new

    def select(self, rows: Tensor) -> None:
        self.keys, self.values, self._calls = self.keys[rows], self.values[rows], {}

    def read(
        self, q: Tensor, new: Tensor, scores: Scores, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention over what is kept: [B, H, T, E] and lse [B, H, T].

        `new` [B, G, T, D] are the keys of the same tokens, `padding` [B, G] how many kept keys are
        padding.
        """
        (B, H, T, D), G = q.shape, len(self.counts)
        q, spans = q.reshape(B * G, H // G, T, D), self._spans_of_rows(B, padding)
        if T > FEW_QUERIES:
            self._norms = None
            out, lse = run(*self._prepare(q, spans, None, scores), "auto", True)
        else:
            # A call like the last one, whose pool it shares, need not be checked again.
            bound = self._key_bound(new)
            if T not in self._calls:
                self._calls[T] = self._prepare(q, spans, bound, scores)
            inputs, problem = self._calls[T]
            start = spans[:, 1] - T
            inputs = inputs._replace(
                q=q, key_range=spans[:, None], query_start=start, key_bound=bound
            )
            out, lse = run(inputs, problem, "auto", True)
        return out.reshape(B, H, T, -1), lse.reshape(B, H, T)

    def _spans_of_rows(self, B: int, padding: Tensor | None) -> Tensor:
        """[B * G, 2]: the rows of the flat pool with the keys of each batch row and head."""
        if B == 1 and padding is None:
            return self._spans
        rows = torch.arange(B, device=self._spans.device) * self.keys.shape[1]
        spans = self._spans + rows[:, None, None]
        if padding is not None:
            spans[..., 0] += padding
        return spans.flatten(0, 1)

    def _prepare(
        self, q: Tensor, spans: Tensor, bound: Tensor | None, scores: Scores
    ) -> tuple[Inputs, Problem]:
        """A call in which heads are batch rows of one flat pool: no key is copied."""
        rows, sharing = q.shape[:2]
        pools = (pool.flatten(0, 1)[None, None] for pool in (self.keys, self.values))
        keys, values = (pool.expand(rows, 1, -1, -1) for pool in pools)
        slopes = scores.slopes.view(-1, sharing)
        slopes = slopes.expand(rows // len(slopes), -1, -1) if rows > len(slopes) else slopes
        how: Any = {"scale": scores.scale, "tolerance": scores.tolerance, "lse": True}
        slopes = slopes.reshape(rows, sharing)
        return prepare(
            "attention", q, keys, values, slopes, key_range=spans, key_bound=bound, **how
        )

    def _key_bound(self, new: Tensor) -> Tensor:
        """[B * G, 1]: at least the norms of the kept keys, `new` the last of them."""
        wide = torch.promote_types(new.dtype, torch.float32)
        if self._norms is None:
            parts = [self.keys[:, self.newest(g, n)] for g, n in enumerate(self.counts)]
            self._norms = torch.stack([part.norm(dim=-1, dtype=wide).amax() for part in parts])
        else:
            norm = torch.linalg.vector_norm(new, dim=-1, dtype=wide).amax((0, 2))
            torch.maximum(self._norms, norm, out=self._norms)
        # More than the rounding of the norm, and than the squares that vanish in it.
        bound = torch.add(2**-56, self._norms, alpha=1 + 2**-16)
        return bound.expand(len(new), -1).reshape(-1, 1)
