"""Near to far: attention that reads the nearest keys first and stops when the rest cannot matter.

This is the project's idea, written to be read; `linbias.attention` is the definition that it must
equal. A far key loses slope * distance before softmax, so that for a steep head almost all keys
weigh less than rounding. Which ones do is known before they are read, from two facts:

    a score is bounded   (Cauchy and Schwarz)   score <= most(q) - slope * distance
    a sum is bounded     (a geometric series)   sum of exp(score) over all keys from distance d on
        <= exp(most - slope * d) * min(number of keys, 1 / (1 - exp(-slope)))

A tile of query rows visits blocks of keys from the nearest outwards and keeps the running sum of
exp(score) of each row. It stops reading a side when the second bound is at most `tolerance` times
that sum, for all rows: what it never reads then holds at most `tolerance` of any row's
probability. The same bound says how exactly a block must be computed: an error of e in the scores
of keys that hold a share w of a row costs the row about e * w. A float32 number is the sum of
three bfloat16 terms, and `Step` says how many of them suffice; here all is float64 nevertheless.

Where keys stand at positions of their own, the sum of exp(-slope * distance) is no geometric
series, but one scan over the keys has it (`log_sums`). docs/math.md has the proof, and what
rounding adds to it; proof/ has this loop as a program on real numbers, and Coq checks that
it keeps the promise. The kernels have cheaper and tighter bounds of their own, and allow for the
rounding of float32; their tests compare what they leave unread with this module.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from linbias._arrays import Array, Float64, Inputs, Options, Unmasked, prepare
from linbias._request import checks, keywords
from linbias.definition import attention_weights

__all__ = ["attention", "reach", "share_outside"]

LEFT, RIGHT = 0, 1


def _attend(rows: "_Rows", tolerance: float, size: int) -> tuple[Float64, Float64, "Tile"]:
    """One tile: the online softmax over blocks from near to far, each side until its bound is low
    enough.
    """
    # acc and row_sum are sums of exp(score - row_max), with the values and without. A larger score
    # than any before makes all earlier terms smaller, by the same factor.
    (low, high), outwards = rows.blocks(size)
    acc = np.zeros((len(rows.q), rows.v.shape[1]))
    row_max, row_sum = np.full(len(rows.q), -np.inf), np.zeros(len(rows.q))

    def read(first: int, end: int) -> None:
        nonlocal acc, row_max, row_sum
        scores = rows.scores(first, end)
        new_max = np.maximum(row_max, scores.max(1, initial=-np.inf))
        pivot = np.where(np.isneginf(new_max), 0.0, new_max)  # nothing seen yet: any finite number
        weights, shrink = np.exp(scores - pivot[:, None]), np.exp(row_max - pivot)
        acc = acc * shrink[:, None] + weights @ rows.v[first:end]
        row_max, row_sum = new_max, row_sum * shrink + weights.sum(1)

    # The keys at the rows' own positions come first: with them there is a sum that a bound can be
    # compared with.
    read(low, high)
    tile = Tile(rows.first_row, low, high)
    open_sides = [not math.isinf(slope) for slope in rows.slopes]
    num_sides = 2 if all(open_sides) else 1
    share = tolerance / num_sides
    rounding = 2.0**-24 / num_sides if tolerance >= 2.0**-24 else 0.0
    largest = rows.largest_scores()
    # Then the blocks beyond. `tail` is the log of the most that this block and all beyond it can
    # hold, `bound` the same as a share of what the row has already, for the row of the tile that
    # they matter most to.
    for side, first, end in outwards:
        if not open_sides[side]:
            continue
        nearest = end - 1 if side == LEFT else first
        tail = rows.tail(side, nearest, largest[side][:, nearest])
        # A row without keys yet: inf or nan, never a reason to stop.
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = (tail - row_max - np.log(row_sum)).max(initial=-np.inf)
        # So little can be left; and as `tail` falls on the way outwards, none of the keys beyond
        # has to be looked at.
        stop = rows.slopes[side] > 0 and _is_within(bound, share)
        open_sides[side] = not stop
        terms = 0 if stop else rows.terms(first, end, bound, rounding)
        tile.steps.append(
            Step(side, first + rows.first_key, end + rows.first_key, float(bound), terms)
        )
        if not stop:
            read(first, end)
            tile.first, tile.end = min(tile.first, first), max(tile.end, end)
    # Divided by their sum the weights are a softmax over the keys that were read. A row that saw
    # none gives zeros.
    tile.first, tile.end = tile.first + rows.first_key, tile.end + rows.first_key
    seen = np.where(row_sum == 0, 1.0, row_sum)
    lse = np.where(row_sum == 0, -np.inf, row_max + np.log(seen))
    return acc / seen[:, None], lse, tile


@keywords.show_keywords(Unmasked)
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    *,
    tolerance: float = 2.0**-24,
    rows: int = 16,
    keys: int = 16,
    **options: Unpack[Unmasked],
) -> "Visit":
    """Run `linbias.attention` near to far, and keep what was read.

    Args:
        q, k, v, slopes, options: As for `linbias.attention`.
        tolerance: Largest share of a row's probability that the keys never read may hold together;
            0 reads all.
        rows: Query rows of a tile.
        keys: Keys of a block.

    Returns:
        out and lse as `linbias.attention`, and the tiles of every head.

    Raises:
        TypeError, ValueError: As `linbias.attention`; or tolerance is not in [0, 1), or rows or
            keys is below 1.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = rng.normal(size=(3, 1, 256, 8))
        >>> visit = attention(q, k, v, [0.5])
        >>> tile = visit.tiles[0][0][-1]
        >>> tile.first_row, tile.first, tile.end
        (240, 192, 256)
    """
    if not 0 <= tolerance < 1 or rows < 1 or keys < 1:
        raise ValueError(
            "near_to_far: tolerance must be in [0, 1), rows and keys at least 1,"
            f" got {tolerance}, {rows}, {keys}"
        )
    if "mask" in options:
        keywords.refuse_unknown("near_to_far", options, attention)
    inputs = prepare("near_to_far", q, k, v, slopes, **options)
    if inputs.ranks is not None:
        raise ValueError(
            "near_to_far: positions must not fall, and query_positions must lie between those of"
            " the keys before and after each query: sort both; linbias.attention takes any order"
        )
    (B, H, T, _), E = inputs.q.shape, inputs.v.shape[3]
    sums = _sums(inputs)
    out, lse = np.zeros((B, H, T, E)), np.full((B, H, T), -np.inf)
    tiles: list[list[list[Tile]]] = [[[] for _ in range(H)] for _ in range(B)]
    for b, h, row in np.ndindex(B, H, -(-T // rows)):
        here = (b, h, slice(row * rows, (row + 1) * rows))
        out[here], lse[here], tile = _attend(
            _Rows.of(inputs, sums, b, h, row * rows, rows), tolerance, keys
        )
        tiles[b][h].append(tile)
    return Visit(inputs.restore(out).astype(inputs.dtype), inputs.restore(lse), tiles)


class Step(NamedTuple):
    """A block that a tile came to on its way outwards, and what was known before reading it."""

    side: int  # LEFT or RIGHT
    first: int  # the keys of the block: first .. end - 1
    end: int
    # log of the most that these keys and all beyond them may hold, of the row they matter most to
    bound: float
    terms: int  # how many bfloat16 terms of each number suffice, 1, 2 or 3 (all); 0: not read


@dataclass
class Tile:
    """Query rows `first_row` .. `first_row` + rows - 1 of one head: the keys they read, and why
    they stopped.
    """

    first_row: int
    first: int = 0  # the keys that were read: first .. end - 1
    end: int = 0
    steps: list[Step] = field(default_factory=list)


class Visit(NamedTuple):
    """What `attention` gives."""

    out: Array  # [..., H, T, E]
    lse: Float64  # [..., H, T]
    # tiles[b][h]: of batch row b and head h, from the first query row on
    tiles: list[list[list[Tile]]]


@dataclass(frozen=True)
class _Rows:
    """The query rows of one tile and all that they may read: a head's keys within their ranges."""

    first_row: int
    q: Float64  # [rows, D], times scale
    order: npt.NDArray[np.int64]  # [rows], the keys the rows stand at, from the first of the range
    positions: Array  # [rows], where the rows stand
    key_positions: Array  # [keys of the range]
    sums: tuple[Float64, Float64] | None  # [keys of the range], `log_sums` to each side
    k: Float64  # [keys of the range, D]
    v: Float64
    slopes: tuple[float, float]  # to the left and to the right
    first_key: int
    hidden: npt.NDArray[np.bool_]  # [rows or 1, keys of the range]: by a window or range of a row

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        sums: tuple[Float64, Float64] | None,
        b: int,
        h: int,
        first_row: int,
        rows: int,
    ) -> "_Rows":
        g = h // (inputs.q.shape[1] // inputs.k.shape[1])
        here = slice(first_row, first_row + rows)
        hidden = inputs.hidden[b, h, here if inputs.hidden.shape[2] > 1 else slice(None)]
        visible = np.flatnonzero(~hidden.all(0))
        first, end = (visible[0], visible[-1] + 1) if len(visible) else (0, 0)
        q = inputs.q[b, h, here] * inputs.scale
        order = inputs.query_start[b] + first_row - first + np.arange(len(q))
        x, xq = np.arange(end - first), order
        if inputs.positions is not None and inputs.query_positions is not None:
            x, xq = inputs.positions[b, h, first:end], inputs.query_positions[b, h, here]
        if sums is not None:
            sums = sums[LEFT][b, h, first:end], sums[RIGHT][b, h, first:end]
        left, right = (
            float(s[h] if s.ndim == 1 else s[b, h]) for s in (inputs.left, inputs.right)
        )
        k, v = (x[b, g, first:end] for x in (inputs.k, inputs.v))
        hidden = hidden[:, first:end]
        return cls(first_row, q, order, xq, x, sums, k, v, (left, right), int(first), hidden)

    def scores(self, first: int, end: int) -> Float64:
        """[rows, end - first], -inf where hidden."""
        order = self.order[:, None] - np.arange(first, end)
        distance = self.positions[:, None] - self.key_positions[first:end]
        slope = np.where(order >= 0, *self.slopes)
        hidden = np.isinf(slope)
        bias = -np.where(hidden, 0.0, slope) * np.abs(distance)
        hidden &= order != 0
        hidden |= self.hidden[:, first:end]
        return np.where(hidden, -np.inf, self.q @ self.k[first:end].T + bias)

    def tail(self, side: int, nearest: int, most: Float64) -> Float64:
        """[rows]: log of the most that keys from `nearest` on hold, of scores up to `most`."""
        slope = self.slopes[side]
        if self.sums is not None:
            log_sum = self.sums[side][nearest]
        else:
            num_left = nearest + 1 if side == LEFT else len(self.k) - nearest
            log_sum = log_geometric(slope, num_left)
        return most - slope * np.abs(self.positions - self.key_positions[nearest]) + log_sum

    def largest_scores(self) -> tuple[Float64, Float64]:
        """For each side, the score without bias that no key from s outwards exceeds: [rows, keys].

        q . k = q . c + q . (k - c) <= q . c + |q| |k - c| for any c; c is the mean key. A key or
        value that is not finite has no bound (nan), and is always read.
        """
        center = self.k.mean(0) if len(self.k) else np.zeros(self.k.shape[1])
        radius = _norm(self.k - center) + 0.0 * self.v.sum(1)
        outwards = np.maximum.accumulate(radius), np.maximum.accumulate(radius[::-1])[::-1]
        q_norm = _norm(self.q)
        to_left, to_right = ((self.q @ center)[:, None] + q_norm[:, None] * r for r in outwards)
        return to_left, to_right

    def terms(self, first: int, end: int, bound: float, rounding: float) -> int:
        """How many terms suffice for a block, if it and all beyond it hold at most exp(bound)."""
        score = math.prod(float(_norm(x).max()) for x in (self.q, self.k[first:end]))
        # A score is off by up to error * |q| |k|. Where that moves no weight much, this share of a
        # row costs it no more than eight roundings of a score.
        for terms, error, largest in ((1, 2.0**-7, 2.0**5), (2, 2.0**-15, 2.0**12)):
            if score <= largest and _is_within(bound, 8 * rounding / error):
                return terms
        return 3

    def blocks(self, size: int) -> tuple[tuple[int, int], Iterator[tuple[int, int, int]]]:
        """The keys at the rows' own positions, and the blocks beyond them, near to far."""
        S, low, high = len(self.k), int(self.order[0]), int(self.order[-1]) + 1
        low, high = min(max(low, 0), S), min(max(high, 0), S)

        def outwards() -> Iterator[tuple[int, int, int]]:
            left, right = low, high
            while left > 0 or right < S:
                if left > 0:
                    yield LEFT, max(0, left - size), left
                    left = max(0, left - size)
                if right < S:
                    yield RIGHT, right, min(S, right + size)
                    right = min(S, right + size)

        return (low, high), outwards()


def _is_within(bound: float, share: float) -> bool:
    """Whether a share whose log is at most `bound` is at most this one; never, if this is 0."""
    return share > 0 and bound <= math.log(share)


def _norm(x: Float64) -> Float64:
    """The length of [n, size], also where squares would vanish or overflow."""
    largest = np.abs(x).max(1, initial=0.0)
    with np.errstate(invalid="ignore"):  # nan for entries that are not finite
        unit = x / np.where(largest == 0, 1.0, largest)[:, None]
    return np.linalg.norm(unit, axis=1) * largest


def _sums(inputs: Inputs) -> tuple[Float64, Float64] | None:
    """`log_sums` of all heads, [B, H, S], to the left and right; None without positions."""
    if inputs.positions is None:
        return None
    shape, inside = inputs.positions.shape[:2], np.any(~inputs.hidden, axis=2)
    # A hidden side, of infinite slope, is never read.
    left, right = (
        np.broadcast_to(np.where(np.isinf(s), 0.0, s), shape) for s in (inputs.left, inputs.right)
    )
    mirrored = log_sums(-inputs.positions[..., ::-1], right, inside[..., ::-1])
    return log_sums(inputs.positions, left, inside), mirrored[..., ::-1]


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def reach(
    slope: Any,
    lead: Any,
    *,
    tolerance: float,
    num_keys: Any = math.inf,
    xp: Any = np,
) -> Any:
    """Say how far a head can see: from which distance on keys cannot matter to a row.

    If no score without bias leads the log of the row's sum by more than `lead`, keys at a distance
    of the reach or more hold at most `tolerance` of its probability together, whatever their
    values:

        exp(lead - slope * reach) * min(num_keys, 1 / (1 - exp(-slope))) = tolerance

    Scores without bias lie within `b = |scale| |q| |k|` of 0 for the largest norms, and every
    query sees its own position: a lead of 2 b is enough for any row.

    Args:
        slope: [...], at least 0; 0 gives inf.
        lead: [...], in nats; nan gives nan.
        tolerance: Share of the probability that may be left out, in [0, 1); 0 gives inf.
        num_keys: At most so many keys lie that far.
        xp: The functions of the arrays: `numpy`, `torch` or `jax.numpy`, whose arrays slope and
            lead then are, of one floating type; values are checked for NumPy alone.

    Returns:
        [...], at least 0, of NumPy float64. A bidirectional head that drops keys on both sides
        takes half the tolerance for each.

    Raises:
        ValueError: slope is negative or nan, or tolerance is not in [0, 1).

    Example:
        >>> reach([0.5, 0.0], 2 * 8.0, tolerance=2**-24).round(1).tolist()
        [67.1, inf]
    """
    if xp is np:
        slope, lead = np.asarray(slope, np.float64), np.asarray(lead, np.float64)
        checks.check_slope_values("reach", "slope", slope)
    if not 0 <= tolerance < 1:
        raise ValueError(f"reach: tolerance must be in [0, 1), got {tolerance}")
    nats = lead + log_geometric(slope, num_keys, xp) - float(np.log(tolerance))
    seen = xp.where(slope > 0, (nats / slope).clip(0), math.inf)
    return xp.where(xp.isinf(slope), 0.0, seen)


@np.errstate(divide="ignore")
def log_geometric(slope: Any, num_keys: Any, xp: Any = np) -> Any:
    """log min(num_keys, 1 / (1 - exp(-slope))): at most log sum exp(-slope * i), i < num_keys."""
    slope = xp.asarray(slope)
    count = xp.log(xp.asarray(num_keys, dtype=slope.dtype))
    return xp.minimum(count, -xp.log(-xp.expm1(-slope)))


def log_sums(
    positions: npt.ArrayLike, slope: npt.ArrayLike, inside: npt.ArrayLike = True
) -> Float64:
    """Log of what keys 0 .. j can weigh together, seen from key j: of the sum of exp(-slope *
    (x[j] - x[s])) over s <= j.

    Each key but the first has it from the one before: what that saw is further off, and the key
    itself weighs 1.

    Args:
        positions: [..., S], x: never falling among keys that count.
        slope: [...], at least 0 and finite.
        inside: Broadcasts to [..., S]: which keys count, a range of them.

    Returns:
        [..., S], float64; -inf where no key counts yet.

    Example:
        >>> np.exp(log_sums([0.0, 1.0, 1.0], 1.0)).round(2).tolist()
        [1.0, 1.37, 2.37]
    """
    x = np.asarray(positions, np.float64)
    further = np.asarray(slope, np.float64)[..., None] * np.diff(x, prepend=x[..., :1])
    itself = np.broadcast_to(np.where(inside, 0.0, -np.inf), x.shape)
    sums, before = np.empty(x.shape), np.full(x.shape[:-1], -np.inf)
    for j in range(x.shape[-1]):
        before = sums[..., j] = np.logaddexp(before - further[..., j], itself[..., j])
    return sums


def share_outside(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    first: npt.ArrayLike,
    end: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    **options: Unpack[Options],
) -> Float64:
    """Compute the probability that keys outside an interval hold: what not reading them costs.

    Args:
        q, k, slopes, options: As for `linbias.attention`.
        first, end: Integers that broadcast with [..., H, T]: the first key, and one past the last,
            that a row reads.

    Returns:
        [..., H, T], float64.

    Raises:
        TypeError, ValueError: As `linbias.attention`.

    Example:
        >>> share_outside(np.zeros((1, 1, 1)), np.zeros((1, 4, 1)), 1, 3, [0.0]).tolist()
        [[0.5]]
    """
    weight = attention_weights(q, k, slopes, **options)
    keys = np.arange(weight.shape[-1])
    first, end = (np.asarray(x)[..., None] for x in (first, end))
    return np.where((keys < first) | (keys >= end), weight, 0.0).sum(-1)
