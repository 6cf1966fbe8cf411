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

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from linbias.models.cache import AttendingLayer
from linbias.models.places import Places
from linbias.models.windows import (
    Windows,
    refuse_slopes_that_follow_the_length,
    weights_windows,
)
from linbias.streams import GRID, SLACK
from linbias.torch import attention

POLICIES = ("count", "raise")
_TOLERANCES = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-12}  # fmt: skip
_CHUNK = 512  # tokens that are written and read at once
_FEWEST = 64  # keys that a head keeps at least
_SPARE = 0.25  # of a window: room for new keys, so that moving costs few copies a key
_FEW = 4  # queries that read the pool in one call, without packing it
_MARGIN = 2.0  # nats by which an adaptive window stays on the safe side of the rows before


class Uncertified(RuntimeError):
    """A row may miss more than the tolerance, and the cache was told to raise."""


class Ledger:
    """What is known of the dropped keys of a layer: `linbias.streams.Dropped` for all rows and heads at once.

    Args:
        slopes: [H].
        scale: Factor on q . k.
        center: [B, G, D].
    """

    def __init__(self, slopes: Tensor, scale: float, center: Tensor) -> None:
        B, G, _ = center.shape
        self.slopes, self.scale = slopes.double(), scale
        self.center = center.double()
        self.sharing = len(slopes) // G
        self.grid = torch.from_numpy(GRID).to(center.device)
        self.sums = self.center.new_full((B, len(slopes), len(GRID)), -math.inf)
        self.largest = self.center.new_zeros(B, G)
        self.at = [0] * G
        self.count = [0] * G

    def growth(
        self, g: int, keys: Tensor, positions: Tensor, at: int, first: Tensor | None
    ) -> Tensor:
        """[B, sharing, J, n]: what each of some keys [B, n, D] of a head adds to the sums, as of position `at`."""
        radius = self.radius(g, keys)[:, None, None]
        behind = (at - positions).double()
        slopes = self.slopes[g * self.sharing : (g + 1) * self.sharing, None, None]
        grown = (
            torch.where(radius.isinf(), math.inf, self.grid[:, None] * radius) - slopes * behind
        )
        if first is not None:  # padding weighs nothing
            grown = grown.masked_fill((positions < first[:, None])[:, None, None], -math.inf)
        return grown

    def radius(self, g: int, keys: Tensor) -> Tensor:
        """[B, n]: at least |k - center|; inf for a key that is not finite."""
        radius = (keys.double() - self.center[:, g, None]).norm(dim=-1) * (1 + SLACK)
        return torch.where(radius.isfinite(), radius, math.inf)

    def add(self, g: int, keys: Tensor, first_position: int, first: Tensor | None) -> None:
        """Take over keys [B, n, D] of a head, at positions first_position, ...; those before `first` [B] are padding."""
        n = keys.shape[1]
        at = first_position + n
        positions = torch.arange(first_position, at, device=keys.device)
        new = torch.logsumexp(self.growth(g, keys, positions, at, first), -1)
        heads = slice(g * self.sharing, (g + 1) * self.sharing)
        since = self.slopes[heads, None] * (at - self.at[g])
        self.sums[:, heads] = torch.logaddexp(self.sums[:, heads] - since, new)
        radius = self.radius(g, keys)
        if first is not None:
            radius = radius.masked_fill(positions < first[:, None], 0.0)
        self.largest[:, g] = torch.maximum(self.largest[:, g], radius.amax(-1))
        self.at[g], self.count[g] = at, self.count[g] + n

    def bound(self, q: Tensor, lse: Tensor, positions: Tensor) -> Tensor:
        """[B, H, T]: log(weight of the dropped keys / weight of those that were read) at most; -inf where none was dropped."""
        q = q.double()
        length = abs(self.scale) * q.norm(dim=-1) * (1 + SLACK)
        right = torch.searchsorted(self.grid, length).clamp(1, len(self.grid) - 1)
        low, high = self.grid[right - 1], self.grid[right]
        share = ((length - low) / (high - low)).clamp(max=1.0)
        below, above = (self.sums.gather(-1, at) for at in (right - 1, right))
        most = torch.where(below.isneginf(), below, below + share * (above - below))
        largest = self.largest.repeat_interleave(self.sharing, 1)[..., None]
        beyond = (length - self.grid[-1]).clamp(min=0)
        most = most + torch.where(beyond > 0, beyond * largest, 0.0)
        most = torch.where(largest.isinf(), math.inf, most)
        at = torch.tensor(self.at, dtype=torch.float64, device=q.device).repeat_interleave(
            self.sharing
        )
        center = self.center.repeat_interleave(self.sharing, 1)
        aligned = self.scale * torch.einsum("bhtd,bhd->bht", q, center)
        found = aligned + most - self.slopes[:, None] * (positions - at[:, None]) - lse.double()
        dropped = torch.tensor(self.count, device=q.device).repeat_interleave(self.sharing) > 0
        return torch.where(dropped[:, None], found, -math.inf)

    def select(self, rows: Tensor) -> None:
        """Keep some batch rows, in a new order, and perhaps repeated."""
        self.sums, self.largest, self.center = (
            x[rows] for x in (self.sums, self.largest, self.center)
        )


class WindowLayer(AttendingLayer):
    """One layer of a `WindowCache`: for each key/value head the nearest keys, and a ledger of the others.

    Args:
        caps: [G], the windows that the weights allow: keys beyond them need no certificate. inf for none.
        windows: [G], how many keys to keep; None to follow the ledger.
        tolerance: Share of a row's weight that may be missing; None takes that of the keys' type.
        on_uncertified: What to do where more may be missing, as of `WindowCache`.
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
    ) -> None:
        super().__init__()
        self.caps, self.fixed, self.tolerance = list(caps), windows, tolerance
        self.on_uncertified = on_uncertified
        self._forget()

    def _forget(self) -> None:
        self.windows = [float(w) for w in (self.fixed or [_FEWEST] * len(self.caps))]
        self.counts = [0] * len(self.caps)  # keys that are kept
        self.capacities = [0] * len(self.caps)
        self.seen = 0
        self.record_past = False
        self.first: Tensor | None = None  # [B], the first position that is no padding
        self.uncertified = 0
        self.largest_dropped = -math.inf  # log of the most that a row may miss
        self.ledger: Ledger | None = None
        self._slopes, self._scale = torch.empty(0), 1.0
        # Queries, lse and positions of the last rows.
        self._recent: tuple[Tensor, Tensor, Tensor] | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and sizes from the first tokens."""
        B, G, _, D = key_states.shape
        if len(self.caps) != G:
            raise ValueError(
                f"WindowCache: it was made for layers of {len(self.caps)} key/value heads, got {G}: "
                "WindowCache.for_model(model) fits the model it is given"
            )
        if self.tolerance is None:
            self.tolerance = _TOLERANCES[key_states.dtype]
        self.keys = key_states.new_empty(B, 0, D)
        self.values = value_states.new_empty(B, 0, value_states.shape[-1])
        self.is_initialized = True

    @property
    def starts(self) -> list[int]:
        """[G]: the row of the pool at which the region of each head begins."""
        return [sum(self.capacities[:g]) for g in range(len(self.capacities))]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float | None, places: Places
    ) -> Tensor:
        self._check(q, k, places)
        self._slopes = slopes
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        if places.key_range is not None:
            self.first = places.key_range[:, 0]
        self._scale = scale = q.shape[-1] ** -0.5 if scale is None else scale
        parts = [x.detach().split(_CHUNK, dim=2) for x in (q, k, v)]
        outs = [self._attend(*part) for part in zip(*parts, strict=True)]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _check(self, q: Tensor, k: Tensor, places: Places) -> None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "WindowCache: the model must not be compiled: what is kept depends on the keys' values"
            )
        if k.requires_grad and torch.is_grad_enabled():
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
        out, lse = self._read(q)
        positions = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        self._certify(q, lse, positions)
        return out

    def _append(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens into the room of each head's region; where it is full, let the oldest keys leave first."""
        T = k.shape[2]
        full = [g for g, n in enumerate(self.counts) if n + T > self.capacities[g]]
        if full:
            drops = [] if self.record_past else full
            kept = [self._choose(g) if g in drops else n for g, n in enumerate(self.counts)]
            self._drop(kept)
            self._make_room(kept, T, full)
        for g, (start, n) in enumerate(zip(self.starts, self.counts, strict=True)):
            self.keys[:, start + n : start + n + T] = k[:, g]
            self.values[:, start + n : start + n + T] = v[:, g]
            self.counts[g] = n + T
        self.seen += T

    def _choose(self, g: int) -> int:
        """How many of the keys of a full region to keep."""
        n, cap = self.counts[g], self.caps[g]
        if n == 0:
            return n
        if self.fixed is not None:
            return int(min(n, max(self.windows[g], 1)))
        need = self._needed(g)
        self.windows[g] = float(min(max(need, _FEWEST), cap))
        return int(min(n, self.windows[g]))

    def _needed(self, g: int) -> int:
        """The fewest keys with which the last rows would have been certified, with a margin."""
        n = self.counts[g]
        if self._recent is None:
            return n
        ledger = self._ledger()
        heads = slice(g * ledger.sharing, (g + 1) * ledger.sharing)
        q, lse, rows = self._recent
        oldest = self.seen - n
        positions = torch.arange(oldest, self.seen, device=q.device)
        start = self.starts[g]
        grown = ledger.growth(g, self.keys[:, start : start + n], positions, self.seen, self.first)
        before = ledger.sums[:, heads, :, None] - ledger.slopes[heads, None, None] * (
            self.seen - ledger.at[g]
        )
        # [B, sharing, J, n]: if 1, 2, ... n keys leave
        sums = torch.logcumsumexp(torch.cat([before, grown], -1), -1)[..., 1:]
        limit = math.log(self._tolerance()) - _MARGIN
        last = 0  # keys that may leave
        low, high = 0, n - 1
        while low <= high:  # the bound grows with every key that leaves
            middle = (low + high) // 2
            tried = Ledger(self._slopes, self._scale, ledger.center)
            tried.sums[:, heads] = sums[..., middle]
            tried.largest[:, g] = torch.maximum(
                ledger.largest[:, g],
                ledger.radius(g, self.keys[:, start : start + middle + 1]).amax(-1),
            )
            tried.at[g], tried.count[g] = self.seen, 1
            bound = tried.bound(q, lse, rows)[:, heads]
            newest_first = positions[middle] < rows  # a row needs its own key
            if bool(((bound <= limit) & newest_first).all()):
                last, low = middle + 1, middle + 1
            else:
                high = middle - 1
        return n - last

    def _drop(self, kept: list[int]) -> None:
        """Book the oldest keys of each head in the ledger, and move the others to the front of the region."""
        for g, (start, n, keep) in enumerate(zip(self.starts, self.counts, kept, strict=True)):
            gone = n - keep
            if gone <= 0:
                continue
            old = slice(start, start + gone)
            self._ledger().add(g, self.keys[:, old], self.seen - n, self.first)
            for pool in (self.keys, self.values):
                pool[:, start : start + keep] = pool[:, start + gone : start + n].clone()
            self.counts[g] = keep

    def _make_room(self, kept: list[int], T: int, full: list[int]) -> None:
        """Let the regions of full heads have room for the next tokens; the pool is made anew if one must grow or may shrink."""
        wanted = list(self.capacities)
        for g in full:
            room = max(T, _CHUNK if self.seen else T, int(kept[g] * _SPARE))
            need = kept[g] + room
            if need > wanted[g] or need < 0.7 * wanted[g]:
                wanted[g] = need
        if wanted == self.capacities:
            return
        starts = self.starts
        self.capacities = wanted
        self.keys, self.values = (self._moved(pool, starts) for pool in (self.keys, self.values))

    def _moved(self, pool: Tensor, starts: list[int]) -> Tensor:
        """A pool with regions of the present capacities, and what is kept in them."""
        new = pool.new_empty(len(pool), sum(self.capacities), pool.shape[-1])
        for start, old, n in zip(self.starts, starts, self.counts, strict=True):
            new[:, start : start + n] = pool[:, old : old + n]
        return new

    def _read(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over what is kept: [B, H, T, E] and lse [B, H, T]."""
        (B, H, T, D), G, slopes = q.shape, len(self.caps), self._slopes
        options: dict[str, Any] = {"scale": self._scale, "tolerance": self._tolerance() / 2}
        if T <= _FEW:  # heads are batch rows of one flat pool, and no key is copied
            flat = [
                pool.flatten(0, 1)[None, None].expand(B * G, 1, -1, -1)
                for pool in (self.keys, self.values)
            ]
            rows = q.reshape(B * G, H // G, T, D)
            shared = slopes.reshape(1, G, H // G).expand(B, G, H // G).reshape(B * G, H // G)
            pool, values = flat
            out, lse = attention(
                rows, pool, values, shared, key_range=self._ranges(q), return_lse=True, **options
            )
            return out.reshape(B, H, T, -1), lse.reshape(B, H, T)
        outs, lses = [], []
        for g, (start, n) in enumerate(zip(self.starts, self.counts, strict=True)):
            heads, kept = slice(g * (H // G), (g + 1) * (H // G)), slice(start, start + n)
            ranges = None
            if self.first is not None:
                begin = (self.first - (self.seen - n)).clamp(0, n)
                ranges = torch.stack([begin, torch.full_like(begin, n)], -1)
            out, lse = attention(
                q[:, heads],
                self.keys[:, None, kept],
                self.values[:, None, kept],
                slopes[heads],
                key_range=ranges,
                return_lse=True,
                **options,
            )
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def _ranges(self, q: Tensor) -> Tensor:
        """[B * G, 2]: the rows of the flat pool that hold the keys of each batch row and head."""
        rows, B = self.keys.shape[1], len(q)
        starts, counts = (torch.tensor(x, device=q.device) for x in (self.starts, self.counts))
        begin = starts + torch.arange(B, device=q.device)[:, None] * rows
        end = begin + counts
        if self.first is not None:
            oldest = self.seen - counts
            begin = begin + (self.first[:, None] - oldest).clamp(min=0).minimum(counts)
        return torch.stack([begin, end], -1).flatten(0, 1)

    def _certify(self, q: Tensor, lse: Tensor, positions: Tensor) -> None:
        """Compare what each row may miss with half of the tolerance; the other half is what attention leaves unread."""
        if self.fixed is None:
            self._recent = (q, lse, positions)
        if self.ledger is None:
            return
        bound = self.ledger.bound(q, lse, positions)
        if self.first is not None:  # nobody reads what padding gathers
            bound = bound.masked_fill((positions < self.first[:, None])[:, None], -math.inf)
        at, caps = (torch.tensor(x, device=q.device)[:, None] for x in (self.ledger.at, self.caps))
        # Whatever the text, what lies beyond the cap weighs nothing; but that holds for finite keys.
        beyond = (positions - at + 1 >= caps).repeat_interleave(self.ledger.sharing, 0)
        capped = beyond & (bound < math.inf)
        passes = (bound <= math.log(self._tolerance() / 2)) | capped  # NaN does not
        most = bound.masked_fill(capped, -math.inf)
        self.largest_dropped = max(self.largest_dropped, float(most.nan_to_num(math.inf).max()))
        missing = int((~passes).sum())
        if missing and self.on_uncertified == "raise":
            raise Uncertified(
                f"WindowCache: {missing} rows of heads may miss more than tolerance {self._tolerance():.2g} of their weight, up to "
                f"exp({float(bound.max()):.1f}) of what was read"
            )
        self.uncertified += missing

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

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: -n removes n of them, which must not have been dropped."""
        if tokens_to_remove > 0:
            raise ValueError(f"WindowCache: crop takes back -n tokens, got {tokens_to_remove}")
        n = -tokens_to_remove
        if n > min(self.counts, default=0):
            raise ValueError(
                f"WindowCache: crop must take back at most {min(self.counts)} tokens, got {n}"
            )
        self.counts = [count - n for count in self.counts]
        self.seen -= n
        if self._recent is not None:  # rows that were taken back say nothing of those to come
            q, lse, positions = self._recent
            left = int((positions < self.seen).sum())
            self._recent = (q[:, :, :left], lse[:, :, :left], positions[:left]) if left else None
        if self.record_past and self.is_initialized:
            self._drop([self._choose(g) for g in range(len(self.counts))])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take batch rows over from others, in beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        if self.is_initialized:
            rows = torch.arange(len(self.keys), device=self.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows."""
        if not self.is_initialized:
            return
        indices = torch.as_tensor(indices, device=self.keys.device)
        self.keys, self.values = self.keys[indices], self.values[indices]
        self.first = None if self.first is None else self.first[indices]
        if self._recent is not None:
            q, lse, positions = self._recent
            self._recent = q[indices], lse[indices], positions
        if self.ledger is not None:
            self.ledger.select(indices)

    def offload(self) -> None:
        raise ValueError("WindowCache: the cache must not be offloaded: it is of constant size")

    @property
    def num_bytes(self) -> int:
        """Of keys, values and ledger."""
        tensors = [] if not self.is_initialized else [self.keys, self.values]
        tensors += [] if self.ledger is None else [self.ledger.sums, self.ledger.center]
        return sum(tensor.nbytes for tensor in tensors)


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

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        tolerance: float | None = None,
        windows: Literal["adaptive", "weights"] | int | Sequence[Sequence[int]] = "adaptive",
        on_uncertified: Literal["count", "raise"] = "count",
        weights: Windows | None = None,
    ) -> Self:
        """Make a cache for a model with linear biases.

        Args:
            model: As `linbias.models.load` gives it; it runs without gradients.
            tolerance: Share of a row's weight that may be missing in a head; None takes 2^-53, 2^-24, 2^-14 and 2^-12 for
                float64, float32, float16 and bfloat16, below which rounding loses as much.
            windows: "adaptive": as few keys as the rows before needed, with a margin; "weights": as many as any text can need,
                from the weights alone; a number for all heads, or one for each layer and key/value head.
            on_uncertified: Where a row may miss more than the tolerance: "count" counts it, and adaptive windows widen from
                there on; "raise" raises `Uncertified`, after which the cache must be reset.
            weights: What `weights_windows(model)` gave before, which takes seconds for a large model.

        Raises:
            ValueError: An option breaks a rule above; the model has no linear biases, or its slopes follow the length of the text;
                windows="weights" and a layer's weights do not say; the model is fused with rounding="checkpoint".
        """
        if on_uncertified not in POLICIES:
            raise ValueError(
                f"WindowCache: on_uncertified must be one of {POLICIES}, got {on_uncertified!r}"
            )
        finest = _TOLERANCES.get(model.dtype, 2.0**-24)
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
        return cls(
            layers=[
                WindowLayer(cap, fixed, tolerance, on_uncertified)
                for cap, fixed in zip(groups, chosen, strict=True)
            ]
        )

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
