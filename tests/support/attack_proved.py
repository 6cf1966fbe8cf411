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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import linbias
import linbias.torch
from attack_calls import Call, Outcome, line_up
from cases import Case, make_inputs
from linbias import near_to_far
from linbias.kernels import core
from linbias.torch.impl.tiles import BLOCK
from prove import NotInstalled, build_program

INF = math.inf
BLOCK_KEYS = {"blocked": BLOCK, "cpu": core.BLOCK_KEYS}
SUBJECTS = ("near_to_far", *BLOCK_KEYS)
TOLERANCES = (0.0, 2.0**-24, 2.0**-8, 0.1, 0.5)
PLACES = ("gaps", "alike", "bursts")
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
class Read:
    """What the program says of a tile."""

    rows: slice
    first: int
    end: int
    lse: np.ndarray  # [rows]
    out: np.ndarray  # [rows, E]


class Head:
    """The arrays of a call in float64 that has one head and scale 1."""

    def __init__(self, call: Call) -> None:
        inputs = call.inputs
        self.call, self.tolerance, self.given = call, float(call.tolerance or 0), call.given
        self.q, self.k, self.v = inputs.q[0, 0], inputs.k[0, 0], inputs.v[0, 0]
        self.slopes = float(inputs.left[0]), float(inputs.right[0])
        self.start = int(call.case.starts[0])
        self.x, self.xq = np.arange(call.case.S) * 1.0, self.start + np.arange(call.case.T) * 1.0
        if inputs.positions is not None:
            self.x, self.xq = inputs.positions.ravel(), inputs.query_positions[0, 0]

    @property
    def ranges(self) -> np.ndarray:
        """[T, 2], the keys that each query may see."""
        case = self.call.case
        own = case.row_ranges[0] if case.rows else np.array([[0, case.S]])
        first, end = np.broadcast_to(own, (case.T, 2)).clip(*case.ranges[0, 0]).T
        return np.stack([first, np.maximum(first, end)], 1)

    @property
    def weights(self) -> np.ndarray:
        """The definition in float64: [T, S]."""
        return self._weights(self.given)

    @property
    def visible(self) -> np.ndarray:
        """[T, S]: which keys each row may see."""
        sides = ("slopes", "right_slopes")
        unbiased = {side: np.where(np.isinf(self.given[side]), INF, 0.0) for side in sides}
        zeros = {name: np.zeros_like(self.given[name]) for name in "qk"}
        return self._weights(self.given | unbiased | zeros) > 0

    def _weights(self, given: dict[str, Any]) -> np.ndarray:
        return linbias.attention_weights(**{n: x for n, x in given.items() if n != "v"})[0, 0]

    @property
    def rounding(self) -> float:
        """What two ways to compute a score may differ by."""
        finite = (np.nan_to_num(x, posinf=0, neginf=0) for x in (self.q, self.k))
        longest = [np.linalg.norm(x, axis=1).max() for x in finite]
        return ROUNDING * (1.0 + np.prod(longest))


@np.errstate(invalid="ignore")  # of what is not finite
def attack(seed: int, number: int, factor: float = 1.0) -> Outcome:
    """Try head `number`, a function of the seed and the number, on the subjects in turn; with a
    certificate that is wrong by a factor.
    """
    subject = SUBJECTS[number % len(SUBJECTS)]
    rng = np.random.default_rng([seed, number])
    head = Head(hostile_call(rng, subject))
    looser, failures = min(head.tolerance * factor, 0.99), list[str]()
    if subject == "near_to_far":
        out, lse, first, end, entry = _near_to_far(rng, head, looser, failures)
    else:
        out, lse, first, end, entry = _kernel(subject, head, looser, failures)
    keys = np.arange(len(head.k))
    unread = (keys < first[:, None]) | (keys >= end[:, None])
    share = float(np.where(unread, np.nan_to_num(head.weights), 0.0).sum(1).max())
    if share > head.tolerance * (1 + TIE):
        failures.append(f"{share} of a row is unread, the tolerance is {head.tolerance}")
    _check_result(head, out, lse, failures)
    entry["ratio"] = round(share / head.tolerance, 6) if head.tolerance else 0.0
    return Outcome(subject, entry, "; ".join(failures))


def _near_to_far(rng: np.random.Generator, head: Head, tolerance: float, failures: list[str]):
    rows, size = (int(rng.choice([1, 2, 7, 16, 20])) for _ in range(2))
    visit = near_to_far.attention(**head.given, tolerance=tolerance, rows=rows, keys=size)
    out, lse, tiles = visit.out[0, 0], visit.lse[0, 0], visit.tiles[0][0]
    share, rounding = head.tolerance / (1 if INF in head.slopes else 2), head.rounding
    limit = math.log(share) if share else -INF
    # log_sums are of a head: where rows have ranges, they count keys that other tiles see alone.
    alike = not (head.call.case.places and head.call.case.rows)
    for tile, found in zip(tiles, run(head, rows, size), strict=True):
        tie = any(abs(step.bound - limit) < TIE + rounding for step in tile.steps)
        if tie or not alike:
            continue
        if (tile.first, tile.end) != (found.first, found.end) and (
            tile.first < tile.end or found.first < found.end
        ):
            failures.append(
                f"rows from {tile.first_row} read keys {tile.first} to {tile.end}, and in the"
                f" program {found.first} to {found.end}"
            )
        here = (*_off(out[found.rows], found.out), *_off(lse[found.rows], found.lse))
        if max(here, default=0.0) > rounding * max(1.0, _largest(head.v)):
            failures.append(f"rows from {tile.first_row} are off by {max(here)}")
    bounds = np.array([(tile.first, tile.end) for tile in tiles]).repeat(rows, 0)[: len(out)]
    return out, lse, *bounds.T, {"tiles": len(tiles), "tighter": 0}


def _kernel(subject: str, head: Head, tolerance: float, failures: list[str]):
    given = {n: torch.tensor(x) if np.ndim(x) else x for n, x in head.given.items()}
    given |= {"tolerance": tolerance, "implementation": subject}
    found = linbias.torch.visited(**given)
    out, lse = linbias.torch.attention(**given, return_lse=True)
    first, end = (x[0, 0].numpy() for x in (found.first, found.end))
    weights, tighter = head.weights, 0
    for tile, read in enumerate(run(head, found.tile_rows, BLOCK_KEYS[subject])):
        keys = np.arange(read.first, read.end)
        only_there = keys[(keys < first[tile]) | (keys >= end[tile])]
        share = np.nan_to_num(weights[read.rows, only_there]).sum(1).max()
        tighter += len(only_there) > 0
        if share > head.tolerance * (1 + TIE):
            failures.append(f"tile {tile} leaves {share} of what the program reads")
    row = np.arange(len(head.q)) // found.tile_rows
    entry = {"tiles": len(first), "tighter": tighter}
    return out[0, 0].numpy(), lse[0, 0].numpy(), first[row], end[row], entry


def _check_result(head: Head, out: np.ndarray, lse: np.ndarray, failures: list[str]) -> None:
    whole, whole_lse = (x[0, 0] for x in linbias.attention(**head.given, return_lse=True))
    rounding = head.rounding
    # A value that is not finite spoils the rows that see its key, and may spoil others.
    spoilt = head.visible @ ~np.isfinite(head.v) | np.isnan(whole_lse)[:, None]
    if not (
        np.array_equal(np.isnan(lse), np.isnan(whole_lse))
        and (spoilt <= ~np.isfinite(out)).all()
        and (~np.isfinite(out) <= ~np.isfinite(whole)).all()
    ):
        failures.append("other rows are not finite than should be")
    sees = np.isfinite(whole_lse)
    lost = whole_lse[sees] - lse[sees]
    if lost.size and not -rounding <= lost.min() <= lost.max() <= rounding - math.log1p(
        -head.tolerance
    ):
        failures.append(f"lse is off by {lost.min()} to {lost.max()}")
    none = np.isneginf(whole_lse)
    if not np.array_equal(np.isneginf(lse), none) or np.nan_to_num(out[none]).any():
        failures.append("a row that sees no key is not zeros and -inf")
    spread = np.ptp(np.where(np.isfinite(head.v), head.v, 0.0), axis=0)
    off = np.nan_to_num(np.abs(out - whole))
    if (off > head.tolerance * spread + rounding * _largest(head.v)).any():
        failures.append(f"out is off by {off.max()}")


def _off(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        return np.where(same, 0.0, np.abs(found - expected)).ravel()


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(where=np.isfinite(x), initial=0.0))


def run(head: Head, rows: int, size: int) -> list[Read]:
    """The tiles of `rows` rows, in the program with blocks of `size` keys."""
    T, D = head.q.shape
    slopes = [-1.0 if math.isinf(m) else m for m in head.slopes]
    tiles, firsts = [slice(row, min(T, row + rows)) for row in range(0, T, rows)], []
    words: list[str] = [str(len(tiles))]
    for here in tiles:
        ranges = head.ranges[here]
        seen = ranges[ranges[:, 0] < ranges[:, 1]]  # keys that no row sees are not there
        first, end = (seen[:, 0].min(), seen[:, 1].max()) if len(seen) else (0, 0)
        firsts.append(first)
        placed = int(head.call.case.places is not None)
        sizes = (D, end - first, head.v.shape[1], size, len(ranges), placed)
        words += map(str, (*sizes, head.start + here.start - first))
        arrays = (head.k[first:end], head.v[first:end], head.x[first:end])
        arrays += (head.q[here], head.xq[here])
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


def hostile_call(rng: np.random.Generator, subject: str) -> Call:
    """Random, with some of what a bound could stumble over."""
    D, E, T, S = (int(rng.integers(1, n)) for n in (9, 4, 41, 200))
    S += 3 * BLOCK_KEYS.get(subject, 0)
    tolerance = float(rng.choice(TOLERANCES))

    def sometimes(chance: float = 0.2) -> bool:
        return bool(rng.random() < chance)

    # Windows end somewhere among the keys.
    nats = 3 - math.log(max(tolerance, 2.0**-24))
    slopes = nats / S * np.exp(rng.uniform(-1, 3, (2, 1)))
    for side in range(2):
        if sometimes():
            slopes[side] = 0.0
    if sometimes(0.5):
        slopes[int(sometimes())] = INF
    start = int(rng.integers(-T - 20, S + 20)) if sometimes(0.5) else S - T
    first, end = (0, S) if sometimes(0.7) else np.sort(rng.integers(0, S + 1, 2)).tolist()
    case = Case(
        "hostile",
        **{"B": 1, "H": 1, "G": 1, "T": T, "S": S, "D": D, "E": E},
        causal=False,
        logits=math.exp(rng.uniform(-1, 1)),
        key_range=((first, end),),
        query_start=(start,),
        scale=1.0,
        places=str(rng.choice(PLACES)) if sometimes(0.4) else None,
        rows="scattered" if sometimes(0.15) else None,
    )
    inputs = replace(
        make_inputs(case, seed=int(rng.integers(2**31))), left=slopes[0], right=slopes[1]
    )
    call = Call("float64", case, inputs, tolerance)
    head = Head(call)
    q, k, v = head.q, head.k, head.v
    if sometimes():  # a part that all keys share
        k += 10 ** rng.uniform(0, 3) * rng.normal(size=D)
    if sometimes():  # as long as keys may be
        some = slice(*np.sort(rng.integers(0, S + 1, 2)))
        k[some] *= 10 ** rng.uniform(0, 2)
    if sometimes(0.4) and tolerance:
        to_left, block = head.xq[T // 2] - head.x, BLOCK_KEYS.get(subject, 1)
        # Where blocks are counted from, to either side.
        begins = (start - first, start + T - first) if subject == "blocked" else (0, 0)
        own = slice(first, end)
        line_up(rng, q, k[own], head.slopes, to_left[own], tolerance, block, begins)
    if sometimes():  # queries that look nowhere
        q[rng.random(T) < rng.choice([0.3, 1.0])] = 0.0
    if sometimes(0.1):
        k[rng.integers(S)] *= 1e4
    if sometimes(0.1):  # what is not finite, somewhere
        array = (q, k, v)[rng.integers(3)]
        where = rng.integers(len(array)), rng.integers(array.shape[1])
        array[where] = rng.choice([np.nan, INF, -INF])
    return call
