"""What rows of a text may miss of their weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linbias.models.window_cache.ledger import Ledger
from linbias.models.window_cache.pool import CHUNK, Scores


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


class Uncertified(RuntimeError):
    """A row may miss more than the tolerance, and the cache was told to raise."""


@dataclass(frozen=True)
class Settings:
    reach: Sequence[float]  # [G], beyond which keys need no certificate, whatever the text; or inf
    windows: Sequence[float] | None  # [G], how many keys to keep; None to follow the ledger
    tolerance: float | None  # None takes that of the keys' type
    on_uncertified: str  # as of `WindowCache`


class Certified:
    """Rows of a text that wait for their certificates, and what is known of the others."""

    settings: Settings
    _scores: Scores

    def forget(self) -> None:
        """Begin a text."""
        self.seen = 0  # tokens that were read, dropped ones included
        self.first: Tensor | None = None  # [B], the first position that is no padding
        self.ledger: Ledger | None = None  # of the dropped keys, once there are any
        self._waiting: list[Rows] = []  # rows that are not certified yet
        self._recent: Rows | None = None  # the last rows that were: windows follow them
        self._uncertified, self._largest_dropped = 0, -math.inf
        self._choose_anew()

    def _bound(self, rows: Rows) -> Tensor:
        """[B, H, T]: the logarithm of what a row may miss, as a share of what it read."""
        ledger, positions = self.ledger, rows.positions
        assert ledger is not None
        bound = ledger.bound(rows.q, rows.lse, positions)
        if self.first is not None:  # nobody reads what padding gathers
            bound = bound.masked_fill((positions < self.first[:, None])[:, None], -math.inf)
        # Whatever the text, what lies beyond the reach weighs nothing, but for infinite keys.
        near = [at + n - 1 for at, n in zip(ledger.at, self.settings.reach, strict=True)]
        beyond = positions >= torch.tensor(near, device=positions.device)[:, None]
        capped = beyond.repeat_interleave(ledger.sharing, 0) & (bound < math.inf)
        return bound.masked_fill(capped, -math.inf)

    def _misses(self, bound: Tensor) -> Tensor:
        """Whether a row may miss more than its half of the tolerance; NaN does."""
        return ~(bound <= self._scores.most_missed)

    def certify(self) -> None:
        """Compare what each waiting row may miss with the tolerance."""
        if self._waiting:
            rows, self._waiting = Rows.joined(self._waiting), []
            self._remember(rows, None if self.ledger is None else self._bound(rows))

    def _remember(self, rows: Rows, bound: Tensor | None) -> None:
        """Count the rows that miss something, and let the windows follow all."""
        if self.settings.windows is None:
            recent = [rows] if self._recent is None else [self._recent, rows]
            self._recent = Rows.joined(recent).last(CHUNK)
        if bound is None:
            return
        count, most = int(self._misses(bound).sum()), float(bound.nan_to_num(math.inf).max())
        self._largest_dropped = max(self._largest_dropped, most)
        if count and self.settings.on_uncertified == "raise":
            raise Uncertified(
                f"WindowCache: {count} rows of heads may miss more than tolerance "
                f"{2 * self._scores.tolerance:.2g} of their weight, up to exp({most:.1f}) of what "
                "was read"
            )
        self._uncertified += count
        if count:
            self._choose_anew()

    def _choose_anew(self) -> None:
        """Let adaptive windows follow the last rows as soon as a key would leave."""
        self._next_choice = [0] * len(self.settings.reach)  # positions from which on to choose

    @property
    def uncertified(self) -> int:
        """Rows of heads that may have missed more than the tolerance."""
        self.certify()
        return self._uncertified

    @property
    def largest_dropped(self) -> float:
        """The logarithm of the most that a row may have missed."""
        self.certify()
        return self._largest_dropped

    def take_back(self, num_tokens: int) -> None:
        self.certify()
        self.seen -= num_tokens
        if self._recent is not None:  # rows that were taken back say nothing of those to come
            left = self.seen - self._recent.start
            self._recent = self._recent.first(left) if left > 0 else None

    def select(self, rows: Tensor) -> None:
        self.certify()
        self.first = None if self.first is None else self.first[rows]
        self._recent = None if self._recent is None else self._recent.select(rows)
        if self.ledger is not None:
            self.ledger.select(rows)
