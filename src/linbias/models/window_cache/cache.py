"""A cache of constant size for endless texts: each head keeps its nearest keys, and what it dropped is certified.

    cache = WindowCache.for_model(model)
    model.generate(ids, past_key_values=cache)      # or model(ids, past_key_values=cache), in parts of any size

A head with slope m cannot be moved, beyond a tolerance, by keys farther away than a window (`linbias.streams`). So each head
keeps the keys of its window, and a ledger of constant size of those that it dropped, which says for every row how much they
can weigh at most. Rows for which that is more than the tolerance are never passed over in silence.

    pool      keys and values [B, rows, size] of a layer; each key/value head has a region of the rows
    region    | kept keys, oldest first | room |      new keys are written into the room; when it is full, the oldest leave
    ledger    of all keys that left, for each query head
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from linbias._request import Problem
from linbias.models.decoder.cache import AttendingLayer
from linbias.models.decoder.places import Places
from linbias.models.window_cache.dropped_keys import DroppedKeys, Ledger, Owned, chord
from linbias.models.window_cache.reach import (
    Windows,
    refuse_slopes_that_follow_the_length,
    weights_windows,
)
from linbias.torch import attention
from linbias.torch.call import prepare, run
from linbias.torch.decoding import FEW_QUERIES
from linbias.torch.decoding import TOLERANCES as TOLERANCES
from linbias.torch.operators.operator import Inputs
from linbias.torch.share import refuse_share

POLICIES = ("count", "raise", "fetch")
_CHUNK = 512  # tokens that are written and read at once
_FEWEST = 64  # keys that a head keeps at least
_SPARE = 0.25  # of a window: room for new keys, so that moving costs few copies a key
_LASTS = 8 * _CHUNK  # tokens for which a window is kept
_STEPS = 32  # sizes of a window to choose from
_MARGIN = 3.0  # nats by which an adaptive window stays on the safe side of the rows before


class Uncertified(RuntimeError):
    """A row may miss more than the tolerance, and the cache was told to raise."""


class WindowLayer(AttendingLayer):
    """One layer of a `WindowCache`: for each key/value head the nearest keys, and a ledger of the others.

    Args:
        caps: [G], the windows that the weights allow: keys beyond them need no certificate. inf for none.
        windows: [G], how many keys to keep; None to follow the ledger.
        tolerance: Share of a row's weight that may be missing; None takes that of the keys' type.
        on_uncertified: What to do where more may be missing, as of `WindowCache`.
        dropped: [G], where "fetch" keeps the dropped keys; None for the other policies.
    """

    is_sliding = True
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(
        self,
        caps: Sequence[float],
        windows: Sequence[float] | None,
        tolerance: float | None,
        on_uncertified: str,
        dropped: list[DroppedKeys] | None = None,
    ) -> None:
        super().__init__()
        self.caps, self.fixed, self.tolerance = list(caps), windows, tolerance
        self.on_uncertified, self.dropped = on_uncertified, dropped
        self._forget()

    def _forget(self) -> None:
        self.windows = [float(w) for w in (self.fixed or [_FEWEST] * len(self.caps))]
        self.counts = [0] * len(self.caps)  # keys that are kept
        self.capacities = [0] * len(self.caps)
        self.seen = 0
        self.record_past = False
        self._next_choice = [0] * len(
            self.caps
        )  # the position from which on a window is chosen anew
        self.first: Tensor | None = None  # [B], the first position that is no padding
        self.fetched = 0
        self.ledger: Ledger | None = None
        for dropped in self.dropped or []:
            dropped.clear()
        self._uncertified, self._largest_dropped = 0, -math.inf
        self._slopes, self._scale = torch.empty(0), 1.0
        self._recent: _Rows | None = None  # the last rows that were certified: windows follow them
        self._waiting: list[_Rows] = []  # rows that are not certified yet
        self._norms: Tensor | None = None  # [G], the largest of the keys that are kept
        self._calls: dict[int, tuple[Inputs, Problem]] = {}  # by number of queries
        self.is_initialized = False

    def __getstate__(self) -> dict[str, Any]:
        """All but the calls, which look into the pool: a copy has its own."""
        return self.__dict__ | {"_calls": {}}

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and sizes from the first tokens."""
        B, G, _, D = key_states.shape
        if len(self.caps) != G:
            raise ValueError(
                f"WindowCache: it was made for layers of {len(self.caps)} key/value heads, got {G}: "
                "WindowCache.for_model(model) fits the model it is given"
            )
        if self.tolerance is None:
            self.tolerance = TOLERANCES[key_states.dtype]
        self.keys = key_states.new_empty(B, 0, D)
        self.values = value_states.new_empty(B, 0, value_states.shape[-1])
        self._lay_out([0] * G)
        self.is_initialized = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float | None, places: Places
    ) -> Tensor:
        self._check(q, k, places)
        self._slopes = slopes
        self._scale = q.shape[-1] ** -0.5 if scale is None else scale
        if places.key_range is not None:
            self.first = places.key_range[:, 0]
        return self._attend_parts(q, k, v)

    # Outside of inference mode, so that what is kept may be written to whatever mode a later call has.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _attend_parts(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        if q.shape[2] <= _CHUNK:
            return self._attend(q, k, v)
        parts = [x.split(_CHUNK, dim=2) for x in (q, k, v)]
        return torch.cat([self._attend(*part) for part in zip(*parts, strict=True)], dim=2)

    def _check(self, q: Tensor, k: Tensor, places: Places) -> None:
        refuse_share("WindowCache")
        if torch.compiler.is_compiling():
            raise ValueError(
                "WindowCache: the model must not be compiled: what is kept depends on the keys' values"
            )
        if k.requires_grad:
            raise ValueError(
                "WindowCache: gradients must be off (torch.no_grad()), since dropped keys have none"
            )
        if places.need_weights:
            raise ValueError(
                "WindowCache: output_attentions must be off: the weights of dropped keys are not kept"
            )
        if self.is_initialized and len(q) != len(self.keys):
            raise ValueError(
                f"WindowCache: batch must have {len(self.keys)} rows as before, got {len(q)}"
            )
        if (
            places.key_range is not None
            and (places.key_range[:, 1] < self.seen + q.shape[2]).any()
        ):
            raise ValueError("WindowCache: padding must come before each text, got some after one")

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A part of at most _CHUNK tokens."""
        self._append(k, v)
        out, lse = self._read(q, k)
        if self.ledger is None and self.fixed is not None:
            return out
        rows = _Rows(q, lse, self.seen - q.shape[2])
        if self.dropped is not None and self.ledger is not None:
            bound = self._bound(rows)
            if self._misses(bound).any():
                out, rows, bound = self._fetch(rows, out, bound)
            self._remember(rows, bound)
        else:
            self._waiting.append(rows)
            waiting = self.seen - self._waiting[0].start
            if self.on_uncertified == "raise" or waiting >= 2 * _CHUNK:
                self._certify()
        return out

    # What is kept

    def _append(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens into the room of each head's region; where it is full, let the oldest keys leave first."""
        T = k.shape[2]
        if any(n + T > room for n, room in zip(self.counts, self.capacities, strict=True)):
            self._certify()
            # All heads that will be full in a chunk or two make room together, which takes hardly longer than for one.
            enough = max(T, 2 * _CHUNK)
            soon = [g for g, n in enumerate(self.counts) if n + enough > self.capacities[g]]
            kept = list(self.counts)
            for g in [] if self.record_past else soon:
                kept[g] = self._choose(g)
            self._drop(kept)
            self._make_room(kept, T, soon)
        ends = self._ends if T == 1 else (self._ends[:, None] + torch.arange(T, device=k.device)).flatten()  # fmt: skip
        self.keys.index_copy_(1, ends, k.flatten(1, 2))
        self.values.index_copy_(1, ends, v.flatten(1, 2))
        self._ends.add_(T)
        self.counts = [n + T for n in self.counts]
        self.seen += T

    def _choose(self, g: int) -> int:
        """How many of the keys of a full region to keep."""
        n, cap = self.counts[g], self.caps[g]
        if n == 0:
            return n
        if self.fixed is None and self.seen >= self._next_choice[g]:
            needed = self._needed(g)
            self.windows[g] = float(min(max(needed, _FEWEST), cap))
            if needed < n:  # else as many as there are may still be too few
                self._next_choice[g] = self.seen + _LASTS
        return int(min(n, max(self.windows[g], 1)))

    def _needed(self, g: int) -> int:
        """The fewest keys, in 32nds, with which rows like the last ones will be certified if they come next, with a margin."""
        n = self.counts[g]
        if self._recent is None:
            return n
        ledger, rows, device = self._ledger(), self._recent, self.keys.device
        heads = slice(g * ledger.sharing, (g + 1) * ledger.sharing)
        q = rows.q[:, heads].double()
        lengths = ledger.lengths(q)
        if not lengths.isfinite().all():
            return n
        # The columns of the grid around the queries that there are, and in them what blocks of keys add.
        last = len(ledger.grid) - 1
        low, high = torch.searchsorted(ledger.grid, torch.stack([lengths.min(), lengths.max()])).tolist()  # fmt: skip
        columns = slice(min(max(low - 1, 0), last - 1), min(max(high, 1), last) + 1)
        block = -(-n // _STEPS)
        num_blocks = -(-n // block)
        start, of = self.starts[g], torch.full((n,), g, device=device)
        positions = torch.arange(self.seen - n, self.seen, device=device)
        radius = ledger.radius(self.keys[:, start : start + n], of)
        largest = torch.maximum(ledger.largest[:, g], radius.amax(-1))
        if self.first is not None:
            radius = radius.masked_fill(positions < self.first[:, None], -math.inf)
        grown = ledger.growth(radius, self.seen - positions, of, columns)
        grown = torch.nn.functional.pad(grown, (0, num_blocks * block - n), value=-math.inf)
        blocks = grown.unflatten(-1, (num_blocks, block)).logsumexp(-1)
        gone = self.seen - ledger.at[g]
        before = ledger.sums[:, heads, columns, None] - ledger.slopes[heads, None, None] * gone
        sums = torch.cat([before, blocks], -1).logcumsumexp(-1)[..., 1:]  # [B, sharing, J, blocks]
        # [B, sharing, T, blocks]: the bound of such a row, if that many blocks leave
        most = chord(ledger.grid[columns], sums, lengths, largest[:, None].expand(-1, ledger.sharing))  # fmt: skip
        own = ledger.scale * (q @ ledger.center[:, g, :, None].unsqueeze(1))[..., 0]
        bound = most + (own - rows.lse[:, heads].double())[..., None]
        passes = (bound <= math.log(self._tolerance() / 2) - _MARGIN).all(0).all(0).all(0)
        leave = int(passes.int().cumprod(0).sum())  # the bound grows with every key that leaves
        return n - min(n, leave * block)

    def _drop(self, kept: list[int]) -> None:
        """Book the oldest keys of each head in the ledger, and move the others to the front of the region."""
        gone = [n - keep for n, keep in zip(self.counts, kept, strict=True)]
        if not any(gone):
            return
        old = [slice(start, start + n) for start, n in zip(self.starts, gone, strict=True)]
        keys = [self.keys[:, rows] for rows in old]
        if self.dropped is not None:
            for g, dropped in enumerate(self.dropped):
                if gone[g]:
                    dropped.append(keys[g].clone(), self.values[:, old[g]].clone())
        oldest = [self.seen - n for n in self.counts]
        self._ledger().add(torch.cat(keys, 1), gone, oldest, self.first)
        for start, n, keep in zip(self.starts, gone, kept, strict=True):
            if n:
                for pool in (self.keys, self.values):
                    pool[:, start : start + keep] = pool[:, start + n : start + n + keep].clone()
        self.counts, self._norms = list(kept), None
        self._lay_out(self.capacities)

    def _make_room(self, kept: list[int], T: int, full: list[int]) -> None:
        """Let the regions of full heads have room for the next tokens; the pool is made anew if one must grow or may shrink."""
        wanted = list(self.capacities)
        for g in full:
            room = max(T, 2 * _CHUNK if self.seen else T, int(kept[g] * _SPARE))
            need = kept[g] + room
            if need > wanted[g] or need < 0.7 * wanted[g]:
                wanted[g] = need
        if wanted == self.capacities:
            return
        starts = self.starts
        self._lay_out(wanted)
        self.keys, self.values = (self._moved(pool, starts) for pool in (self.keys, self.values))

    def _lay_out(self, capacities: list[int]) -> None:
        """Where each head's region begins in the pool, and where its next key goes."""
        self.capacities = capacities
        self.starts = [sum(capacities[:g]) for g in range(len(capacities))]
        self._calls = {}
        starts = torch.tensor(self.starts, device=self.keys.device)
        self._spans = torch.stack([starts, starts], -1)  # [G, 2]
        self._ends.add_(torch.tensor(self.counts, device=self.keys.device))

    @property
    def _ends(self) -> Tensor:
        """[G]: where each head's next key goes, as a view of the spans."""
        return self._spans[:, 1]

    def _moved(self, pool: Tensor, starts: list[int]) -> Tensor:
        """A pool with regions of the present capacities, and what is kept in them."""
        new = pool.new_empty(len(pool), sum(self.capacities), pool.shape[-1])
        for start, old, n in zip(self.starts, starts, self.counts, strict=True):
            new[:, start : start + n] = pool[:, old : old + n]
        return new

    # What is read

    def _read(self, q: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over what is kept: [B, H, T, E] and lse [B, H, T]; new: the keys of the same tokens."""
        (B, H, T, D), G = q.shape, len(self.caps)
        q = q.reshape(B * G, H // G, T, D)
        spans = self._spans_of_rows(B)
        if T > FEW_QUERIES:
            self._norms = None
            out, lse = run(*self._prepare(q, spans, None), "auto", True)
        else:
            # A call like the last one, whose pool it shares, need not be checked again.
            bound = self._key_bound(new)
            if T not in self._calls:
                self._calls[T] = self._prepare(q, spans, bound)
            inputs, problem = self._calls[T]
            inputs = inputs._replace(
                q=q, key_range=spans[:, None], query_start=spans[:, 1] - T, key_bound=bound
            )
            out, lse = run(inputs, problem, "auto", True)
        return out.reshape(B, H, T, -1), lse.reshape(B, H, T)

    def _prepare(self, q: Tensor, spans: Tensor, bound: Tensor | None) -> tuple[Inputs, Problem]:
        """A call in which heads are batch rows of one flat pool, of which each reads its span: no key is copied."""
        rows, sharing = q.shape[:2]
        keys, values = (
            pool.flatten(0, 1)[None, None].expand(rows, 1, -1, -1)
            for pool in (self.keys, self.values)
        )
        slopes = self._slopes.view(-1, sharing)
        slopes = slopes.expand(rows // len(slopes), -1, -1) if rows > len(slopes) else slopes
        return prepare(
            "attention", q, keys, values, slopes.reshape(rows, sharing),
            key_range=spans, key_bound=bound, scale=self._scale, tolerance=self._tolerance() / 2, lse=True,
        )  # fmt: skip

    def _key_bound(self, new: Tensor) -> Tensor:
        """[B * G, 1]: at least the norms of the keys that each head keeps, of which `new` [B, G, T, D] are the last."""
        wide = torch.promote_types(new.dtype, torch.float32)
        if self._norms is None:
            kept = zip(self.starts, self.counts, strict=True)
            parts = [self.keys[:, start : start + n] for start, n in kept]
            self._norms = torch.stack([part.norm(dim=-1, dtype=wide).amax() for part in parts])
        else:
            norm = torch.linalg.vector_norm(new, dim=-1, dtype=wide).amax((0, 2))
            torch.maximum(self._norms, norm, out=self._norms)
        # More than the rounding of the norm, and than the squares that vanish in it.
        bound = torch.add(2**-56, self._norms, alpha=1 + 2**-16)
        return bound.expand(len(new), -1).reshape(-1, 1)

    def _read_head(self, g: int, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the queries of one key/value head over the newest n keys, [B, n, D]."""
        sharing, n = q.shape[1] // len(self.caps), keys.shape[1]
        heads = slice(g * sharing, (g + 1) * sharing)
        ranges = None
        if self.first is not None:
            begin = (self.first - (self.seen - n)).clamp(0, n)
            ranges = torch.stack([begin, torch.full_like(begin, n)], -1)
        found: tuple[Tensor, Tensor] = attention(
            q[:, heads], keys[:, None], values[:, None], self._slopes[heads], key_range=ranges,
            scale=self._scale, tolerance=self._tolerance() / 2, return_lse=True,
        )  # fmt: skip
        return found

    def _spans_of_rows(self, B: int) -> Tensor:
        """[B * G, 2]: the rows of the flat pool that hold the keys of each batch row and head."""
        if B == 1 and self.first is None:
            return self._spans
        rows = torch.arange(B, device=self._spans.device) * self.keys.shape[1]
        spans = self._spans + rows[:, None, None]
        if self.first is not None:
            counts = self._ends - self._spans[:, 0]
            padding = (self.first[:, None] - (self.seen - counts)).clamp(min=0)
            spans[..., 0] += padding.minimum(counts)
        return spans.flatten(0, 1)

    # What is certified

    def _bound(self, rows: "_Rows") -> Tensor:
        """[B, H, T]: the logarithm of what a row may miss, as a share of what it read."""
        ledger, positions = self._ledger(), rows.positions
        bound = ledger.bound(rows.q, rows.lse, positions)
        if self.first is not None:  # nobody reads what padding gathers
            bound = bound.masked_fill((positions < self.first[:, None])[:, None], -math.inf)
        # Whatever the text, what lies beyond the cap weighs nothing; but that holds for finite keys.
        near = [at + cap - 1 for at, cap in zip(ledger.at, self.caps, strict=True)]
        beyond = positions >= torch.tensor(near, device=positions.device)[:, None]
        capped = beyond.repeat_interleave(ledger.sharing, 0) & (bound < math.inf)
        return bound.masked_fill(capped, -math.inf)

    def _misses(self, bound: Tensor) -> Tensor:
        """Whether a row may miss more than its half of the tolerance; NaN does."""
        return ~(bound <= math.log(self._tolerance() / 2))

    def _certify(self) -> None:
        """Compare what each waiting row may miss with the tolerance."""
        if not self._waiting:
            return
        rows, self._waiting = _Rows.joined(self._waiting), []
        self._remember(rows, None if self.ledger is None else self._bound(rows))

    def _remember(self, rows: "_Rows", bound: Tensor | None) -> None:
        """Count the rows that miss something, and let the windows follow all."""
        if self.fixed is None:
            recent = [rows] if self._recent is None else [self._recent, rows]
            self._recent = _Rows.joined(recent).last(_CHUNK)
        if bound is None:
            return
        count, most = int(self._misses(bound).sum()), float(bound.nan_to_num(math.inf).max())
        self._largest_dropped = max(self._largest_dropped, most)
        if count and self.on_uncertified == "raise":
            raise Uncertified(
                f"WindowCache: {count} rows of heads may miss more than tolerance {self._tolerance():.2g} of their weight, up to "
                f"exp({most:.1f}) of what was read"
            )
        self._uncertified += count
        if count:
            self._choose_anew()

    def _choose_anew(self) -> None:
        """Let adaptive windows follow the last rows as soon as a key would leave."""
        self._next_choice = [0] * len(self.caps)

    def _fetch(self, rows: "_Rows", out: Tensor, bound: Tensor) -> tuple[Tensor, "_Rows", Tensor]:
        """Let the heads that miss something read their dropped keys as well."""
        assert self.dropped is not None
        missing = self._misses(bound)
        self.fetched += int(missing.sum())
        self._choose_anew()
        out, lse, bound = out.clone(), rows.lse.clone(), bound.clone()
        sharing = out.shape[1] // len(self.caps)
        for g in missing.any(2).any(0).view(-1, sharing).any(1).nonzero().flatten().tolist():
            heads = slice(g * sharing, (g + 1) * sharing)
            kept = slice(self.starts[g], self.starts[g] + self.counts[g])
            pools = zip(self.dropped[g].read(out.device), (self.keys, self.values), strict=True)
            keys, values = (torch.cat([far, pool[:, kept]], 1) for far, pool in pools)
            out[:, heads], lse[:, heads] = self._read_head(g, rows.q, keys, values)
            # What cannot be read any more lies beyond the cap, where it weighs nothing if it is finite.
            bound[:, heads] = math.inf if self.dropped[g].lost_infinite else -math.inf
        return out, _Rows(rows.q, lse, rows.start), bound

    def _ledger(self) -> Ledger:
        """Made when the first key leaves, around the mean of the keys that are there."""
        if self.ledger is None:
            means = [
                self.keys[:, start : start + n].double().mean(1)
                if n
                else self.keys.new_zeros(len(self.keys), self.keys.shape[-1]).double()
                for start, n in zip(self.starts, self.counts, strict=True)
            ]
            center = torch.stack(means, 1)
            self.ledger = Ledger(
                self._slopes, self._scale, torch.where(center.isfinite(), center, 0.0)
            )
        return self.ledger

    def _tolerance(self) -> float:
        assert self.tolerance is not None
        return self.tolerance

    @property
    def uncertified(self) -> int:
        """Rows of heads that may have missed more than the tolerance."""
        self._certify()
        return self._uncertified

    @property
    def largest_dropped(self) -> float:
        """The logarithm of the most that a row may have missed."""
        self._certify()
        return self._largest_dropped

    # What Transformers asks of a layer

    def get_seq_length(self) -> int:
        """Tokens that were read, dropped ones included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._forget()

    def activate_past_recording(self) -> None:
        """From here on drop keys in `crop` alone, which may take back tokens first; `reset` ends it."""
        self.record_past = True

    @torch.inference_mode(False)
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: -n removes n of them, which must not have been dropped."""
        if tokens_to_remove > 0:
            raise ValueError(f"WindowCache: crop takes back -n tokens, got {tokens_to_remove}")
        n = -tokens_to_remove
        if n > min(self.counts, default=0):
            raise ValueError(
                f"WindowCache: crop must take back at most {min(self.counts)} tokens, got {n}"
            )
        self._certify()
        self.counts = [count - n for count in self.counts]
        self.seen -= n
        if not self.is_initialized:
            return
        self._lay_out(self.capacities)
        if self._recent is not None:  # rows that were taken back say nothing of those to come
            left = self.seen - self._recent.start
            self._recent = self._recent.first(left) if left > 0 else None
        if self.record_past:
            self._drop([self._choose(g) for g in range(len(self.counts))])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take batch rows over from others, in beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        if self.is_initialized:
            rows = torch.arange(len(self.keys), device=self.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows."""
        if not self.is_initialized:
            return
        self._certify()
        indices = torch.as_tensor(indices, device=self.keys.device)
        self.keys, self.values = self.keys[indices], self.values[indices]
        self._calls = {}
        self.first = None if self.first is None else self.first[indices]
        self._recent = None if self._recent is None else self._recent.select(indices)
        if self.ledger is not None:
            self.ledger.select(indices)
        for dropped in self.dropped or []:
            dropped.select(indices)

    def offload(self) -> None:
        raise ValueError("WindowCache: the cache must not be offloaded: it is of constant size")

    @property
    def num_bytes(self) -> int:
        """Of keys, values and ledger; what "fetch" keeps elsewhere is not in it."""
        pools = self.keys.nbytes + self.values.nbytes if self.is_initialized else 0
        return pools + (0 if self.ledger is None else self.ledger.num_bytes)


@dataclass(frozen=True)
class _Rows:
    """Queries [B, H, T, D] and their lse [B, H, T], at positions start, start + 1, ..."""

    q: Tensor
    lse: Tensor
    start: int

    def __len__(self) -> int:
        return self.q.shape[2]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.start + len(self), device=self.q.device)

    @classmethod
    def joined(cls, parts: Sequence["_Rows"]) -> "_Rows":
        if len(parts) == 1:
            return parts[0]
        q, lse = (torch.cat([getattr(part, name) for part in parts], 2) for name in ("q", "lse"))
        return cls(q, lse, parts[0].start)

    def first(self, count: int) -> "_Rows":
        return _Rows(self.q[:, :, :count], self.lse[:, :, :count], self.start)

    def last(self, count: int) -> "_Rows":
        skipped = max(0, len(self) - count)
        return _Rows(self.q[:, :, skipped:], self.lse[:, :, skipped:], self.start + skipped)

    def select(self, rows: Tensor) -> "_Rows":
        return _Rows(self.q[rows], self.lse[rows], self.start)


class WindowCache(Cache):
    """A Transformers cache of constant size, exact up to a tolerance that every row is held to.

    `for_model` makes one. It is given to a model as `past_key_values`, with or without `generate`; reading a text in parts of any
    size gives what reading it at once gives, within rounding.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> config = LinbiasConfig(vocab_size=99, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> model, ids = LinbiasForCausalLM(config).eval(), torch.randint(99, (1, 3000))
        >>> with torch.no_grad():
        ...     cache = WindowCache.for_model(model)
        ...     parts = [model(part, past_key_values=cache).logits for part in ids.split(500, dim=1)]
        ...     whole = model(ids).logits
        >>> bool((torch.cat(parts, 1) - whole).abs().max() < 1e-4), cache.uncertified, cache.windows[0][0] < 400
        (True, 0, True)
    """

    layers: list[WindowLayer]
    _folder: Owned | None = None

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        tolerance: float | None = None,
        windows: Literal["adaptive", "weights"] | int | Sequence[Sequence[int]] = "adaptive",
        on_uncertified: Literal["count", "raise", "fetch"] = "count",
        folder: str | Path | None = None,
        weights: Windows | None = None,
    ) -> Self:
        """Make a cache for a model with linear biases.

        Args:
            model: As `linbias.models.load` gives it; it runs without gradients.
            tolerance: Share of a row's weight that may be missing in a head; None takes 2^-53, 2^-24, 2^-14 and 2^-12 for
                float64, float32, float16 and bfloat16, below which rounding loses as much.
            windows: "adaptive": as few keys as the rows before needed, with a margin; "weights": as many as any text can need,
                from the weights alone; a number for all heads, or one for each layer and key/value head.
            on_uncertified: Where a row may miss more than the tolerance: "count" counts it; "raise" raises `Uncertified`, after
                which the cache must be reset; "fetch" keeps the dropped keys elsewhere, as far back as the weights let any
                query need them, and reads them again. Adaptive windows widen from there on in any case.
            folder: Where "fetch" keeps them, in a folder of its own that is deleted with the cache and its copies; None is host memory.
            weights: What `weights_windows(model)` gave before, which takes seconds for a large model.

        Raises:
            ValueError: An option breaks a rule above; the model has no linear biases, or its slopes follow the length of the text;
                windows="weights" and a layer's weights do not say; the model is fused with rounding="checkpoint".
        """
        if on_uncertified not in POLICIES:
            raise ValueError(
                f"WindowCache: on_uncertified must be one of {POLICIES}, got {on_uncertified!r}"
            )
        finest = TOLERANCES.get(model.dtype, 2.0**-24)
        if tolerance is not None and not finest <= tolerance < 1:
            raise ValueError(
                f"WindowCache: tolerance must be in [{finest:.3g}, 1) for {model.dtype}, got {tolerance}"
            )
        refuse_slopes_that_follow_the_length(model, "WindowCache")
        found = weights_windows(model) if weights is None else weights
        caps = found.windows((finest if tolerance is None else tolerance) / 2)
        groups = [  # the largest window of the query heads that read a key/value head
            row.reshape(num, -1).max(1).tolist()
            for row, num in zip(caps, found.key_heads, strict=True)
        ]
        chosen = _chosen(windows, groups, found)
        if folder is not None and on_uncertified != "fetch":
            raise ValueError(
                f"WindowCache: folder must be left out unless on_uncertified is 'fetch', got {folder}"
            )
        own = None if folder is None else Path(mkdtemp(dir=folder, prefix="dropped-keys-"))
        layers = []
        for index, (cap, fixed) in enumerate(zip(groups, chosen, strict=True)):
            dropped = None
            if on_uncertified == "fetch":
                dropped = [DroppedKeys(n, own, f"{index}-{g}") for g, n in enumerate(cap)]
            layers.append(WindowLayer(cap, fixed, tolerance, on_uncertified, dropped))
        cache = cls(layers=layers)
        cache._folder = None if own is None else Owned(own)
        return cache

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    @property
    def windows(self) -> list[list[float]]:
        """[layers][G]: how many keys each key/value head keeps."""
        return [list(layer.windows) for layer in self.layers]

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def uncertified(self) -> int:
        """How many rows of heads may have missed more than the tolerance."""
        return sum(layer.uncertified for layer in self.layers)

    @property
    def fetched(self) -> int:
        """How many rows of heads read dropped keys again."""
        return sum(layer.fetched for layer in self.layers)

    @property
    def largest_dropped(self) -> float:
        """The most that any row may have missed, as a share of what it read; 0 where nothing was dropped."""
        return math.exp(min(700.0, max(layer.largest_dropped for layer in self.layers)))


def _chosen(windows: Any, groups: list[list[float]], found: Windows) -> list[list[float] | None]:
    """What each layer is told to keep; None to follow its ledger."""
    if windows == "adaptive":
        return [None] * len(groups)
    if windows == "weights":
        if found.why_not:
            index, reason = next(iter(found.why_not.items()))
            raise ValueError(
                f"WindowCache: windows='weights' needs a window for every layer, and layer {index} has none: {reason}"
            )
        return [list(caps) for caps in groups]
    if isinstance(windows, str):
        raise ValueError(
            f"WindowCache: windows must be 'adaptive', 'weights' or numbers, got {windows!r}"
        )
    numbers = [[windows] * len(caps) for caps in groups] if isinstance(windows, int) else windows
    if [len(row) for row in numbers] != [len(caps) for caps in groups]:
        raise ValueError(
            f"WindowCache: windows must have a number for each of {len(groups)} layers and {len(groups[0])} key/value heads, "
            f"got {[len(row) for row in numbers]}"
        )
    if any(not n >= 1 for row in numbers for n in row):
        raise ValueError(
            f"WindowCache: windows must be at least 1, got {min(min(row) for row in numbers)}"
        )
    return [[float(n) for n in row] for row in numbers]
