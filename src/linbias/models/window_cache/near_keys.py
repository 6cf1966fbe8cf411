"""What a layer of a `WindowCache` does: tokens come, old keys leave, rows are certified."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linbias.models.window_cache.certificate import Certified, Rows
from linbias.models.window_cache.ledger import Ledger
from linbias.models.window_cache.pool import CHUNK, Pool, Scores

FEWEST = 64  # keys that a head keeps at least
_LASTS = 8 * CHUNK  # tokens for which a window is kept


class NearKeys(Certified):
    """The keys that are left of a text, and what is known of the others and of its rows."""

    def forget(self) -> None:
        super().forget()
        nothing = torch.empty(0, 0, 0, 0)
        self.pool = Pool(nothing, nothing)
        windows = self.settings.windows or [FEWEST] * len(self.settings.reach)
        self.windows = [float(w) for w in windows]

    def read(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, may_drop: bool) -> Tensor:
        """Append at most `CHUNK` tokens, and let their queries attend: [B, H, T, D]."""
        self._scores = scores
        self._append(k, v, may_drop)
        out, lse = self.pool.read(q, k, scores, self._padding())
        if self.ledger is None and self.settings.windows is not None:
            return out
        self._waiting.append(Rows(q=q, lse=lse, start=self.seen - q.shape[2]))
        waiting = self.seen - self._waiting[0].start
        if self.settings.on_uncertified == "raise" or waiting >= 2 * CHUNK:
            self.certify()
        return out

    # What is kept

    def _append(self, k: Tensor, v: Tensor, may_drop: bool) -> None:
        """Write new tokens; where a region is full, let its oldest keys leave first."""
        T = k.shape[2]
        if self.pool.full(T):
            self.certify()
            # Heads that will be full soon make room together, which takes hardly longer.
            soon = self.pool.full(max(T, 2 * CHUNK))
            if may_drop:
                self.drop_all_but(self.choose(soon))
            self.pool.make_room(T, soon, is_first=self.seen == 0)
        self.pool.append(k, v)
        self.seen += T

    def choose(self, heads: Sequence[int]) -> list[int]:
        """How many keys each head is to keep, if so many of these heads may leave."""
        kept = list(self.pool.counts)
        for g in heads:
            n, reach = kept[g], self.settings.reach[g]
            if n == 0:
                continue
            if self.settings.windows is None and self.seen >= self._next_choice[g]:
                needed = self._needed(g)
                self.windows[g] = float(min(max(needed, FEWEST), reach))
                if needed < n:  # else as many as there are may still be too few
                    self._next_choice[g] = self.seen + _LASTS
            kept[g] = int(min(n, max(self.windows[g], 1)))
        return kept

    def _needed(self, g: int) -> int:
        """As few keys of a head as rows like the last ones need; all while none was certified."""
        n, rows = self.pool.counts[g], self._recent
        if rows is None:
            return n
        keys, most = self.pool.keys[:, self.pool.newest(g, n)], self._scores.most_missed
        needed = self._make_ledger().keys_needed
        return needed(g, keys, self.seen, rows.q, rows.lse, most, self.first)

    def drop_all_but(self, kept: list[int]) -> None:
        """Book the oldest keys of each head in the ledger, and keep so many of the newest."""
        pool = self.pool
        gone = [n - keep for n, keep in zip(pool.counts, kept, strict=True)]
        if not any(gone):
            return
        old = [slice(start, start + n) for start, n in zip(pool.starts, gone, strict=True)]
        oldest = [self.seen - n for n in pool.counts]
        keys = torch.cat([pool.keys[:, rows] for rows in old], 1)
        self._make_ledger().add(keys, gone, oldest, self.first)
        pool.keep(kept)

    def _make_ledger(self) -> Ledger:
        """The ledger, or a first one around the mean of the keys that are there."""
        if self.ledger is None:
            pool, means = self.pool, []
            for g, n in enumerate(pool.counts):
                keys = pool.keys[:, pool.newest(g, n)].double()
                means.append(keys.mean(1) if n else keys.new_zeros(len(keys), keys.shape[-1]))
            center = torch.stack(means, 1)
            center = torch.where(center.isfinite(), center, 0.0)
            self.ledger = Ledger(self._scores.slopes, self._scores.scale, center)
        return self.ledger

    def _padding(self) -> Tensor | None:
        """[B, G]: how many of the kept keys are padding."""
        if self.first is None:
            return None
        counts = torch.tensor(self.pool.counts, device=self.first.device)
        return (self.first[:, None] - (self.seen - counts)).clamp(min=0).minimum(counts)

    # What becomes of it

    def take_back(self, num_tokens: int) -> None:
        """Forget the last tokens, none of which must have been dropped."""
        super().take_back(num_tokens)
        self.pool.take_back(num_tokens)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.pool.select(rows)
