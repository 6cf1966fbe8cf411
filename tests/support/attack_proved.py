"""The program extracted from the proof, on hostile heads, beside `near_to_far` and the kernels.

`near_to_far` must read the same keys as the program, tile by tile, and give the same numbers. A
kernel has bounds of its own and may read other keys. What it leaves unread, computed key by key in
float64, may hold the tolerance of any row's probability and no more; so may those keys that the
program reads, with tiles and blocks of the kernel's sizes, and the kernel does not. What is proved
of the program's result is asked of every result: lse lies between log(1 - tolerance) and 0 off,
and out by at most tolerance * (max v - min v).
"""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import linbias
import linbias.torch
from linbias import near_to_far
from linbias.kernels import core
from linbias.torch.impl.tiles import BLOCK
from prove import NotInstalled, build_program

INF = math.inf
BLOCK_KEYS = {"blocked": BLOCK, "cpu": core.BLOCK_KEYS}
SUBJECTS = ("near_to_far", *BLOCK_KEYS)
TOLERANCES = (0.0, 2.0**-24, 2.0**-8, 0.1, 0.5)
# So near to the limit the two programs may round a bound to either side of it.
TIE = 1e-9
ROUNDING = 2.0**-45  # of scores, as a share of the largest: 256 steps of float64


def why_not() -> str | None:
    """What the program needs and this machine lacks."""
    try:
        build_program()
    except NotInstalled as missing:
        return str(missing)
    return None


@dataclass
class Head:
    """One head, scale 1."""

    q: np.ndarray  # [T, D]
    k: np.ndarray  # [S, D]
    v: np.ndarray  # [S, E]
    slopes: tuple[float, float]  # to the left and to the right; inf hides the side
    start: int  # the key that query 0 stands at; may lie outside of the keys
    key_range: tuple[int, int]
    tolerance: float
    x: np.ndarray | None = None  # [S], where the keys stand; by default key s at s
    xq: np.ndarray | None = None  # [T]
    own_ranges: np.ndarray | None = None  # [T, 2], what each query may see of the key range

    @property
    def arrays(self) -> list[np.ndarray]:
        """q, k, v and slopes of one batch row and head, as attention takes them."""
        return [*(x[None, None] for x in (self.q, self.k, self.v)), np.array([self.slopes[0]])]

    @property
    def options(self) -> dict[str, np.ndarray]:
        options = {"right_slopes": [self.slopes[1]], "query_start": [self.start]}
        options["key_range"] = [self.key_range]
        if self.x is not None:
            options |= {"positions": [self.x], "query_positions": [self.xq]}
        if self.own_ranges is not None:
            options |= {"query_range": [self.own_ranges]}
        return {name: np.array(x) for name, x in options.items()}

    @property
    def ranges(self) -> np.ndarray:
        """[T, 2], the keys that each query may see."""
        own = np.array([[0, len(self.k)]]) if self.own_ranges is None else self.own_ranges
        first, end = np.broadcast_to(own, (len(self.q), 2)).clip(*self.key_range).T
        return np.stack([first, np.maximum(first, end)], 1)


@dataclass
class Outcome:
    """What came of one head."""

    subject: str
    tiles: int = 0
    tighter: int = 0  # tiles that left keys unread which the program reads
    ratio: float = 0.0  # the largest share of a row that was unread, in tolerances
    failures: list[str] = field(default_factory=list)


@dataclass
class Read:
    """What the program says of a tile."""

    rows: slice
    first: int
    end: int
    lse: np.ndarray  # [rows]
    out: np.ndarray  # [rows, E]


@np.errstate(invalid="ignore")  # of what is not finite
def attack(seed: int, number: int, factor: float = 1.0) -> Outcome:
    """Try head `number`, a function of the seed and the number, on the subjects in turn; with a
    certificate that is wrong by a factor.
    """
    subject = SUBJECTS[number % len(SUBJECTS)]
    rng = np.random.default_rng([seed, number])
    head = hostile_head(rng, subject)
    outcome = Outcome(subject)
    looser = min(head.tolerance * factor, 0.99)
    if subject == "near_to_far":
        out, lse, first, end = _near_to_far(rng, head, looser, outcome)
    else:
        out, lse, first, end = _kernel(head, looser, outcome)
    _check_unread(head, _weights(head), first, end, outcome)
    _check_result(head, out, lse, outcome)
    return outcome


def _near_to_far(rng: np.random.Generator, head: Head, tolerance: float, outcome: Outcome):
    rows, size = (int(rng.choice([1, 2, 7, 16, 20])) for _ in range(2))
    visit = near_to_far.attention(
        *head.arrays, **head.options, causal=False, scale=1.0,
        tolerance=tolerance, rows=rows, keys=size,
    )  # fmt: skip
    out, lse, tiles = visit.out[0, 0], visit.lse[0, 0], visit.tiles[0][0]
    share, rounding = head.tolerance / (1 if INF in head.slopes else 2), _rounding(head)
    limit = math.log(share) if share else -INF
    # log_sums are of a head: where rows have ranges, they count keys that other tiles see alone.
    alike = head.x is None or head.own_ranges is None
    for tile, found in zip(tiles, run(head, rows, size), strict=True):
        tie = any(abs(step.bound - limit) < TIE + rounding for step in tile.steps)
        if tie or not alike:
            continue
        if (tile.first, tile.end) != (found.first, found.end) and (
            tile.first < tile.end or found.first < found.end
        ):
            outcome.failures.append(
                f"rows from {tile.first_row} read keys {tile.first} to {tile.end}, and in the"
                f" program {found.first} to {found.end}"
            )
        here = (*_off(out[found.rows], found.out), *_off(lse[found.rows], found.lse))
        if max(here, default=0.0) > rounding * max(1.0, _largest(head.v)):
            outcome.failures.append(f"rows from {tile.first_row} are off by {max(here)}")
    outcome.tiles = len(tiles)
    bounds = np.array([(tile.first, tile.end) for tile in tiles]).repeat(rows, 0)[: len(out)]
    return out, lse, *bounds.T


def _kernel(head: Head, tolerance: float, outcome: Outcome):
    arrays = [torch.tensor(x) for x in head.arrays]
    options: dict[str, Any] = {name: torch.tensor(x) for name, x in head.options.items()}
    options |= {"causal": False, "scale": 1.0, "tolerance": tolerance}
    options |= {"implementation": outcome.subject}
    found = linbias.torch.visited(*arrays, **options)
    out, lse = linbias.torch.attention(*arrays, **options, return_lse=True)
    first, end = (x[0, 0].numpy() for x in (found.first, found.end))
    weights = _weights(head)
    for tile, read in enumerate(run(head, found.tile_rows, BLOCK_KEYS[outcome.subject])):
        keys = np.arange(read.first, read.end)
        only_there = keys[(keys < first[tile]) | (keys >= end[tile])]
        share = np.nan_to_num(weights[read.rows, only_there]).sum(1).max()
        outcome.tighter += len(only_there) > 0
        if share > head.tolerance * (1 + TIE):
            outcome.failures.append(f"tile {tile} leaves {share} of what the program reads")
    outcome.tiles = len(first)
    row = np.arange(len(head.q)) // found.tile_rows
    return out[0, 0].numpy(), lse[0, 0].numpy(), first[row], end[row]


def _weights(head: Head) -> np.ndarray:
    """The definition in float64: [T, S]."""
    q, k, _, left = head.arrays
    return linbias.attention_weights(q, k, left, **head.options, causal=False, scale=1.0)[0, 0]


def _check_unread(
    head: Head, weights: np.ndarray, first: np.ndarray, end: np.ndarray, outcome: Outcome
) -> None:
    keys = np.arange(len(head.k))
    unread = (keys < first[:, None]) | (keys >= end[:, None])
    share = float(np.where(unread, np.nan_to_num(weights), 0.0).sum(1).max())
    if head.tolerance:
        outcome.ratio = share / head.tolerance
    if share > head.tolerance * (1 + TIE):
        outcome.failures.append(f"{share} of a row is unread, the tolerance is {head.tolerance}")


def _check_result(head: Head, out: np.ndarray, lse: np.ndarray, outcome: Outcome) -> None:
    whole, whole_lse = linbias.attention(
        *head.arrays, **head.options, causal=False, scale=1.0, return_lse=True
    )
    whole, whole_lse, rounding = whole[0, 0], whole_lse[0, 0], _rounding(head)
    # A value that is not finite spoils the rows that see its key, and may spoil others.
    spoilt = _visible(head) @ ~np.isfinite(head.v) | np.isnan(whole_lse)[:, None]
    if not (
        np.array_equal(np.isnan(lse), np.isnan(whole_lse))
        and (spoilt <= ~np.isfinite(out)).all()
        and (~np.isfinite(out) <= ~np.isfinite(whole)).all()
    ):
        outcome.failures.append("other rows are not finite than should be")
    sees = np.isfinite(whole_lse)
    lost = whole_lse[sees] - lse[sees]
    if lost.size and not -rounding <= lost.min() <= lost.max() <= rounding - math.log1p(
        -head.tolerance
    ):
        outcome.failures.append(f"lse is off by {lost.min()} to {lost.max()}")
    none = np.isneginf(whole_lse)
    if not np.array_equal(np.isneginf(lse), none) or np.nan_to_num(out[none]).any():
        outcome.failures.append("a row that sees no key is not zeros and -inf")
    spread = np.ptp(np.where(np.isfinite(head.v), head.v, 0.0), axis=0)
    off = np.nan_to_num(np.abs(out - whole))
    if (off > head.tolerance * spread + rounding * _largest(head.v)).any():
        outcome.failures.append(f"out is off by {off.max()}")


def _visible(head: Head) -> np.ndarray:
    """[T, S]: which keys each row may see."""
    keys, place = np.arange(len(head.k)), head.start + np.arange(len(head.q))[:, None]
    left, right = (not math.isinf(m) for m in head.slopes)
    sides = np.where(keys < place, left, np.where(keys > place, right, True))
    first, end = head.ranges.T[..., None]
    return sides & (keys >= first) & (keys < end)


def _off(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        return np.where(same, 0.0, np.abs(found - expected)).ravel()


def _rounding(head: Head) -> float:
    """What two ways to compute a score may differ by."""
    longest = [
        np.linalg.norm(np.nan_to_num(x, posinf=0, neginf=0), axis=1).max()
        for x in (head.q, head.k)
    ]
    return ROUNDING * (1.0 + np.prod(longest))


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(where=np.isfinite(x), initial=0.0))


def run(head: Head, rows: int, size: int) -> list[Read]:
    """The tiles of `rows` rows, in the program with blocks of `size` keys."""
    T, D = head.q.shape
    x = np.arange(len(head.k)) if head.x is None else head.x
    xq = head.start + np.arange(T) if head.xq is None else head.xq
    slopes = [-1.0 if math.isinf(m) else m for m in head.slopes]
    tiles, firsts = [slice(row, min(T, row + rows)) for row in range(0, T, rows)], []
    words: list[str] = [str(len(tiles))]
    for here in tiles:
        ranges = head.ranges[here]
        seen = ranges[ranges[:, 0] < ranges[:, 1]]  # keys that no row sees are not there
        first, end = (seen[:, 0].min(), seen[:, 1].max()) if len(seen) else (0, 0)
        firsts.append(first)
        sizes = (D, end - first, head.v.shape[1], size, len(ranges), int(head.x is not None))
        words += map(str, (*sizes, head.start + here.start - first))
        arrays = (head.k[first:end], head.v[first:end], x[first:end], head.q[here], xq[here])
        numbers = np.concatenate([[head.tolerance, *slopes], *(a.ravel() for a in arrays)])
        words += [*map(repr, numbers.tolist()), *map(str, (ranges - first).ravel())]
    done = subprocess.run(
        [build_program()], input=" ".join(words), capture_output=True, text=True, check=True
    )
    found = []
    for here, first, line in zip(tiles, firsts, done.stdout.splitlines(), strict=True):
        count, low, high, *results = line.split()
        assert int(count) == int(high) - int(low), "the keys that are read lie side by side"
        lse, *out = np.array(results, float).reshape(here.stop - here.start, -1).T
        found.append(Read(here, int(low) + first, int(high) + first, lse, np.stack(out, 1)))
    return found


def hostile_head(rng: np.random.Generator, subject: str) -> Head:
    """Random, with some of what a bound could stumble over."""
    D, E, T, S = (int(rng.integers(1, n)) for n in (9, 4, 41, 200))
    S += 3 * BLOCK_KEYS.get(subject, 0)
    tolerance = float(rng.choice(TOLERANCES))

    def sometimes(chance: float = 0.2) -> bool:
        return bool(rng.random() < chance)

    # Windows end somewhere among the keys.
    nats = 3 - math.log(max(tolerance, 2.0**-24))
    slopes = [float(m) for m in nats / S * np.exp(rng.uniform(-1, 3, 2))]
    for side in range(2):
        if sometimes():
            slopes[side] = 0.0
    if sometimes(0.5):
        slopes[int(sometimes())] = INF
    q, k = rng.normal(size=(T, D)) * math.exp(rng.uniform(-1, 1)), rng.normal(size=(S, D))
    start = int(rng.integers(-T - 20, S + 20)) if sometimes(0.5) else S - T
    first, end = (0, S) if sometimes(0.7) else np.sort(rng.integers(0, S + 1, 2)).tolist()
    head = Head(
        q, k, rng.normal(size=(S, E)), (slopes[0], slopes[1]), start, (first, end), tolerance
    )
    x, xq = np.arange(S) * 1.0, start + np.arange(T) * 1.0
    if sometimes(0.4):
        head.x, head.xq = x, xq = _places(rng, head)
    if sometimes():  # a part that all keys share
        k += 10 ** rng.uniform(0, 3) * rng.normal(size=D)
    if sometimes():  # as long as keys may be
        some = slice(*np.sort(rng.integers(0, S + 1, 2)))
        k[some] *= 10 ** rng.uniform(0, 2)
    if sometimes(0.4) and tolerance:
        _line_up(rng, head, x, xq, subject)
    if sometimes():  # queries that look nowhere
        q[rng.random(T) < rng.choice([0.3, 1.0])] = 0.0
    if sometimes(0.1):
        k[rng.integers(S)] *= 1e4
    if sometimes(0.15):
        head.own_ranges = np.sort(rng.integers(0, S + 1, (T, 2)))
    if sometimes(0.1):  # what is not finite, somewhere
        array = (q, k, head.v)[rng.integers(3)]
        array[rng.integers(len(array)), rng.integers(array.shape[1])] = rng.choice(
            [np.nan, INF, -INF]
        )
    return head


def _line_up(
    rng: np.random.Generator, head: Head, x: np.ndarray, xq: np.ndarray, subject: str
) -> None:
    """All keys along the queries, far ones at the score that the rule just leaves."""
    (T, D), (first, end) = head.q.shape, head.key_range
    direction = rng.normal(size=D)
    direction /= np.linalg.norm(direction)
    head.q[:] = direction * np.exp(rng.normal(0, 0.02, (T, 1)))
    head.k[:] = 0.0
    block = BLOCK_KEYS.get(subject, 1)
    for side, slope in enumerate(head.slopes):
        own = head.start if side == 0 else head.start + T
        begin = own if subject == "blocked" else first  # where blocks are counted from
        edges = np.arange(first + 1, own) if side == 0 else np.arange(own + 1, end)
        edges = edges[(edges - begin) % block == 0]
        edges = edges[(edges > first) & (edges < end)]
        if not len(edges) or not 0 < slope < INF:
            continue
        edge = int(rng.choice(edges))
        far, nearest = (slice(0, edge), edge - 1) if side == 0 else (slice(edge, None), edge)
        distance = abs(xq[T // 2] - x[nearest])
        score = slope * distance + math.log(head.tolerance) + rng.normal(-0.3, 0.7)
        head.k[far] = score * direction


def _places(rng: np.random.Generator, head: Head) -> tuple[np.ndarray, np.ndarray]:
    """Positions that never fall, many of them the same or with jumps; queries between them."""
    (T, S), ends = (len(head.q), len(head.k)), head.key_range
    gaps = rng.exponential(size=S)
    gaps = gaps * rng.choice([0.0, 1.0, 20.0], S, p=[0.5, 0.45, 0.05])
    x = gaps.cumsum() + rng.choice([0.0, 1e6])
    order = head.start + np.arange(T)
    (first, end), way = ends, rng.random(T)
    if first == end:
        return x, np.full(T, x[0])
    before, after = order.clip(first, end - 1), (order + 1).clip(first, end - 1)
    low = np.where(order < first, x[first] - 3.0, x[before])
    high = np.where(order >= end - 1, x[end - 1] + 3.0, x[after])
    low = np.where(order >= end - 1, x[end - 1], low)
    high = np.where(order < first - 1, x[first], high)
    return x, np.sort(low + way * (high - low))
