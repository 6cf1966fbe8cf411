"""The named cases of attention that the contract suite runs and the benchmarks share their inputs
with.

Sizes in a case are all different and mostly prime, so that a swapped axis fails.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import linbias

INF = float("inf")


@dataclass(frozen=True)
class Case:
    name: str
    B: int = 2
    H: int = 6
    G: int = 3
    T: int = 7
    S: int = 11
    D: int = 13
    E: int = 5
    causal: bool = True
    left: str = "paper"
    right: str | None = None  # None with causal=False: symmetric
    keys: str = "normal"
    logits: float = 1.0
    key_range: tuple | None = None  # (first, end) of each batch row, or of each of its G heads
    query_start: tuple[int, ...] | None = None
    dropout: float = 0.0
    scale: float | None = None
    places: str | None = None  # where keys stand, and queries between them (`places_of`)
    rows: str | None = None  # which keys each query may see (`row_ranges`)

    def __str__(self) -> str:
        return self.name

    @property
    def ranges(self) -> np.ndarray:
        """[B, G, 2]: first and one past last key of every key/value head."""
        given = [(0, self.S)] * self.B if self.key_range is None else self.key_range
        ranges = np.array(given, np.int64).reshape(self.B, -1, 2)
        return np.broadcast_to(ranges, (self.B, self.G, 2))

    @property
    def starts(self) -> np.ndarray:
        """[B]: where query 0 stands."""
        if self.query_start is not None:
            return np.array(self.query_start)
        return self.ranges[..., 1].max(1, initial=0) - self.T

    @property
    def placement(self) -> dict[str, np.ndarray]:
        """key_range, query_start and query_range as they are given, if they are."""
        given = {"key_range": self.key_range, "query_start": self.query_start}
        if self.rows:
            given["query_range"] = self.row_ranges
        return {name: np.array(value) for name, value in given.items() if value is not None}

    @property
    def row_ranges(self) -> np.ndarray:
        """[B, T, 2]: first and one past last key of each query.

        "window": W before its own; "both": W before and 2 W after; "chunks": its own, half of that
        before and a third of the one after; "documents": its own, a start after the other, of
        uneven length; "prefix": the first W, and up to its own; "scattered": anywhere, one in six
        none.
        """
        p, W = self.starts[:, None] + np.arange(self.T), max(2, self.S // 12)
        chunk = p // W * W
        first, end = {
            "window": (p - W, p + 1),
            "both": (p - W, p + 2 * W + 1),
            "chunks": (chunk - W // 2, chunk + W + W // 3),
            "documents": _documents(p, W),
            "prefix": (0 * p, np.maximum(p + 1, W)),
            "scattered": _scattered(self),
        }[self.rows]
        first, end = first.clip(0, self.S), end.clip(0, self.S)
        return np.stack([first, np.maximum(first, end)], -1)


def _documents(p: np.ndarray, W: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *np.resize([W, W // 3 + 1, 2 * W], 2 + 3 * int(p.max(initial=0)) // W)])
    own = np.searchsorted(starts, p, "right").clip(1) - 1
    return starts[own], starts[own + 1]


def _scattered(case: Case) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    ranges = np.sort(rng.integers(0, case.S + 1, (case.B, case.T, 2)), -1)
    ranges[rng.random((case.B, case.T)) < 1 / 6] = case.S // 2
    return ranges[..., 0], ranges[..., 1]


ROW_RANGES = ("window", "both", "chunks", "documents", "prefix", "scattered")

Long = partial(Case, B=1, H=4, G=2, T=523, S=787)
PER_HEAD = (((0, 11), (3, 9), (5, 5)), ((2, 3), (0, 4), (7, 11)))

CASES = (
    Case("T-below-S"),
    Case("T-equals-S", T=11),
    Case("T-above-S", T=11, S=7),
    Case("T-one", T=1, S=37),
    Case("S-one", T=3, S=1),
    Case("one-by-one", T=1, S=1),
    Case("no-queries", T=0),
    Case("no-keys", S=0),
    Case("no-batch", B=0),
    Case("multi-head", H=5, G=5),
    Case("multi-query", H=5, G=1),
    Case("size-one", D=1, E=1),
    Case("scale", scale=-0.3),
    Case("slopes-zero", left="zero"),
    Case("slopes-mixed", left="mixed"),
    Case("slopes-per-batch", left="per_batch"),
    Case("slopes-extreme", left="extreme", T=41, S=53),
    Case("symmetric", causal=False),
    Case("symmetric-T-above-S", causal=False, T=17, S=5),
    Case("asymmetric", causal=False, right="halved", T=19, S=23),
    Case("asymmetric-per-batch", causal=False, left="per_batch", right="per_batch"),
    Case("directional", causal=False, left="first_half", right="second_half", T=29, S=31),
    Case("both-sides-hidden", causal=False, left="hidden", right="hidden"),
    Case("hidden-right-of-a-gap", causal=False, left="hidden", right="paper", T=17, S=5),
    Case("bidirectional-unbiased", causal=False, left="zero"),
    Case("left-padding", key_range=((3, 11), (0, 11)), T=11),
    Case("filled-cache", key_range=((0, 9), (2, 4))),
    Case("empty-range", key_range=((4, 4), (0, 11))),
    Case("range-symmetric", causal=False, key_range=((3, 8), (1, 11))),
    Case("right-padding", T=11, key_range=((0, 8), (0, 11)), query_start=(0, 0)),
    Case("start-below-zero", query_start=(-3, -9)),
    Case("start-past-the-keys", query_start=(11, 30)),
    Case("start-before-all-keys", query_start=(-7, -20)),
    Case("start-symmetric", causal=False, query_start=(-9, 17)),
    Case("start-far-away", causal=False, right="halved", query_start=(-4000, 5000)),
    Case("gap-on-the-left", key_range=((5, 9), (6, 6)), query_start=(0, 2)),
    Case("gap-on-the-right", key_range=((1, 4), (0, 2)), query_start=(7, 40)),
    Case(
        "gaps-asymmetric", causal=False, left="per_batch", right="per_batch",
        key_range=((4, 7), (1, 4)), query_start=(0, 9),
    ),
    Case(
        "hidden-left-past-the-keys", causal=False, left="hidden", right="paper",
        query_start=(8, 11),
    ),
    Case("range-per-head", key_range=PER_HEAD),
    Case(
        "range-per-head-symmetric", causal=False, T=13, key_range=PER_HEAD, query_start=(2, -5)
    ),
    Case(
        "range-per-head-dropout", causal=False, dropout=0.4, query_start=(6, 3),
        key_range=(((0, 11), (3, 9), (5, 6)), ((2, 3), (0, 4), (7, 11))),
    ),
    Case("extreme-logits", logits=300.0),
    Case("equal-scores", keys="equal", T=13, S=17),
    Case("dropout", dropout=0.3, T=17, S=19),
    Case("dropout-range-symmetric", dropout=0.5, causal=False, key_range=((3, 11), (0, 6))),
    # long enough that sides are left, and that tiles and blocks have uneven ends
    Long("long", T=1031, S=1031),
    Long("long-cache", B=2, T=3, S=2053, G=1),
    Long("long-symmetric", T=769, S=1153, G=4, causal=False),
    Long("long-T-above-S", T=1153, S=769, H=2, causal=False, right="halved"),
    Long(
        "long-directional", T=619, S=919, causal=False, left="first_half", right="second_half"
    ),
    Long("long-per-batch", B=2, H=2, G=1, T=521, S=877, left="per_batch"),
    Long("long-range", B=2, T=307, S=1213, key_range=((700, 1201), (5, 1213))),
    Long(
        "long-right-padding", B=2, T=541, S=541, key_range=((0, 409), (100, 541)),
        query_start=(0, 0),
    ),
    Long("long-chunk", B=2, T=257, S=1213, query_start=(500, 0)),
    Long("long-chunk-symmetric", B=2, T=257, S=1213, causal=False, query_start=(500, 1100)),
    Long("long-past-the-keys", B=2, T=131, S=907, query_start=(907, 1031)),
    Long("long-before-the-keys", B=2, T=131, S=907, causal=False, query_start=(-131, -300)),
    Long(
        "long-range-per-head", B=2, T=307, S=1213, causal=False, right="halved",
        key_range=(((700, 1201), (5, 1213)), ((0, 64), (129, 1003))), query_start=(600, 40),
    ),
    Long("long-cache-past-the-keys", B=2, T=2, S=2053, G=1, query_start=(2060, 2300)),
    Long(
        "long-cache-per-head", B=2, T=3, S=2053, causal=False, query_start=(1000, 2050),
        key_range=(((0, 2053), (700, 1500)), ((2000, 2003), (63, 1900))),
    ),
    Long("long-dropout", dropout=0.2),
    Long("long-extreme-logits", logits=100.0),
    Long("far-key-aligned", keys="far_aligned"),
    Long("far-key-aligned-symmetric", keys="far_aligned", causal=False),
    Long("long-equal-scores", keys="equal"),
    Long("keys-off-center", keys="off_center"),
)  # fmt: skip


# For implementations that take positions.
PLACED_CASES = (
    Case("gaps", places="gaps"),
    Case("gaps-symmetric", causal=False, places="gaps", T=11),
    Case("stamps-alike", causal=False, left="mixed", right="halved", places="alike", T=17, S=23),
    Case("resets-per-batch", left="per_batch", places="resets", T=53, S=101),
    Case("bursts-multi-query", H=5, G=1, causal=False, right="halved", places="bursts", T=5),
    Case("gaps-left-padding", key_range=((3, 11), (0, 11)), T=11, places="gaps"),
    Case("gaps-one-side-hidden", causal=False, left="hidden", right="paper", places="alike", T=11),
    Case(
        "gaps-range-per-head", causal=False, T=13, key_range=PER_HEAD, query_start=(2, -5),
        places="gaps",
    ),
    Case("gaps-dropout", dropout=0.3, T=17, S=19, places="gaps"),
    Long("gates-long", T=501, S=701, places="gates"),
    Long("gaps-long-symmetric", T=211, S=677, G=4, causal=False, places="gaps"),
    Long(
        "resets-long-asymmetric", T=207, S=819, D=33, E=37, causal=False, right="halved",
        places="resets", query_start=(500,),
    ),
    Long("unix-times-long", H=2, G=1, left="steep", places="unix-times"),
    Long(
        "alike-long-range", B=2, T=101, S=1213, H=2, G=1, places="alike",
        key_range=((700, 1201), (5, 1213)),
    ),
    Long("bursts-long-cache", B=2, T=3, S=2053, G=1, places="bursts"),
    Long("gates-long-dropout", T=203, dropout=0.2, places="gates"),
)  # fmt: skip


# For implementations that take a range of keys for each query.
RANGED_CASES = (
    Case("window", T=11, rows="window"),
    Case("window-per-batch", left="per_batch", rows="window", query_start=(-3, 9)),
    Case("window-both-sides", causal=False, right="halved", T=17, S=23, rows="both"),
    Case("documents", T=31, S=31, rows="documents"),
    Case("chunks-multi-query", H=5, G=1, causal=False, T=29, S=37, rows="chunks"),
    Case("prefix-sees-itself", causal=False, T=23, S=23, rows="prefix"),
    Case("scattered", causal=False, T=19, S=29, rows="scattered"),
    Case("scattered-causal", T=19, S=29, rows="scattered"),
    Case("window-one-query", T=1, S=97, rows="window"),
    Case("scattered-few-queries", B=3, T=3, S=211, causal=False, rows="scattered"),
    Case("window-no-keys", S=0, rows="window"),
    Case("window-zero-slopes", left="zero", T=41, S=53, rows="window"),
    Case("window-range-per-head", T=13, key_range=PER_HEAD, rows="window"),
    Case("window-dropout", dropout=0.3, T=17, S=19, rows="window"),
    Case("one-side-hidden-in-chunks", causal=False, left="hidden", right="paper", T=29, S=31,
         rows="chunks"),
    Case("gaps-in-a-window", causal=False, T=29, S=31, places="gaps", rows="both"),
    Long("long-window", T=803, S=803, rows="window"),
    Long("long-window-both-sides", T=211, S=1153, causal=False, right="halved", rows="both"),
    Long("long-documents", T=787, causal=False, rows="documents"),
    Long("long-chunks", T=787, D=33, E=37, causal=False, rows="chunks"),
    Long("long-prefix", B=2, T=307, S=619, causal=False, rows="prefix", query_start=(0, 300)),
    Long("long-scattered", T=307, S=1213, causal=False, right="halved", rows="scattered"),
    Long("long-window-range", B=2, T=307, S=1213, key_range=((700, 1201), (5, 1213)),
         rows="window"),
    Long("long-window-dropout", T=203, dropout=0.2, rows="window"),
    Long("long-cache-window", B=2, T=3, S=2053, G=1, rows="window"),
    Long("long-cache-scattered", B=2, T=2, S=2053, causal=False, rows="scattered"),
    Long("gates-in-documents", T=501, S=701, places="gates", rows="documents"),
)  # fmt: skip


def places_of(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Where keys stand, [B, H, S] or for all heads [B, S], and queries, [B, H, T].

    "alike": many at one place; "gates": sums of -log f; "resets": gates, some of which forget all.
    """
    shape = case.B, case.H, case.S
    gap = rng.exponential(size=shape)
    if case.places == "alike":
        gap = np.floor(gap) * 2
    elif case.places == "gates":
        gap = np.log1p(np.exp(-rng.normal(4, 1.5, shape)))
    elif case.places == "resets":
        gap = np.where(rng.random(shape) < 0.02, rng.choice([40.0, 1e4], shape), 0.02)
    elif case.places == "bursts":
        gap *= rng.choice([0.01, 5.0], shape, p=[0.8, 0.2])
    elif case.places == "unix-times":
        gap /= 100
    x = np.cumsum(gap, -1) + (1.7e9 if case.places == "unix-times" else -3)
    xq = np.zeros((case.B, case.H, case.T))
    shared = case.places in ("gaps", "unix-times")
    for b, h in np.ndindex(case.B, case.H):
        if shared:
            x[b, h] = x[b, 0]
        for t in range(case.T if case.S else 0):
            first, end = case.ranges[b, h // (case.H // case.G)]
            p = case.starts[b] + t
            own = min(max(p, first), end - 1)
            after = x[b, h, p + 1] if first <= p + 1 < end else x[b, h, own] + 0.5
            xq[b, h, t] = x[b, h, own] - 0.5 if p < first else (x[b, h, own] + after) / 2
    for b, (first, end) in enumerate(case.ranges[:, 0]):
        if np.ndim(case.key_range) < 3:
            x[b, :, :first], x[b, :, end:] = 7.0, -1e5
    return x[:, 0] if shared else x, xq


def slopes_of(kind: str, case: Case) -> np.ndarray:
    paper = linbias.slopes(case.H)
    half = linbias.slopes(max(1, case.H // 2))
    hidden = np.full(case.H - len(half), INF)
    pattern = {
        "paper": paper,
        "halved": paper / 2,
        "steep": np.resize([2.0, 0.5], case.H),
        "zero": np.zeros(case.H),
        "hidden": np.full(case.H, INF),
        "mixed": np.resize([0.0, INF, 0.3, 1e-8, 5.0, 0.01], case.H),
        "extreme": np.resize([1e-8, 1e3, 1e-3, 1e30, 0.0, 30.0], case.H),
        "first_half": np.concatenate([half, hidden]),
        "second_half": np.concatenate([hidden, half]),
        "per_batch": paper * np.linspace(0.25, 2.0, case.B)[:, None],
    }
    return pattern[kind]


@dataclass(frozen=True)
class Inputs:
    """One case's arrays as float64 whose values the dtype of the test can hold exactly."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    left: np.ndarray
    right: np.ndarray | None
    dout: np.ndarray
    dlse: np.ndarray
    positions: np.ndarray | None = None
    query_positions: np.ndarray | None = None


def make_inputs(case: Case, dtype: str = "float64", seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(case.B, case.H, case.T, case.D)) * case.logits
    k = rng.normal(size=(case.B, case.G, case.S, case.D))
    if case.keys == "equal":
        k[:] = 1.0
    elif case.keys == "off_center":
        k += 5.0
    elif case.keys == "far_aligned" and case.S:
        # The farthest keys point along the queries with the largest norm: what a careless bound
        # forgets.
        q[:] = 1.0 + 0.1 * q
        for far in (0, case.S - 1):
            k[:, :, far] = 40.0 / case.D**0.5
    left = slopes_of(case.left, case)
    right = slopes_of(case.right, case) if case.right else None
    arrays = (q, k, rng.normal(size=(case.B, case.G, case.S, case.E)))
    dout = rng.normal(size=(case.B, case.H, case.T, case.E))
    dlse = rng.normal(size=(case.B, case.H, case.T))
    wide = "float64" if dtype == "float64" else "float32"
    return Inputs(
        *(round_to(array, dtype) for array in arrays),
        round_to(left, wide),
        None if right is None else round_to(right, wide),
        round_to(dout, dtype),
        round_to(dlse, wide),
        *(places_of(case, rng) if case.places else ()),
    )


def arguments(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays by their side, under the names that the arguments of attention have."""
    names = {"left": "slopes", "right": "right_slopes"}
    return {names.get(name, name): array for name, array in arrays.items()}


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 values to those of a narrower type, and keep them in float64."""
    if dtype != "bfloat16":
        return array.astype(dtype).astype(np.float64)
    bits = array.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def short(cases: tuple[Case, ...] = CASES) -> tuple[Case, ...]:
    return tuple(case for case in cases if case.T * case.S <= 10_000)


def long(cases: tuple[Case, ...] = CASES) -> tuple[Case, ...]:
    return tuple(case for case in cases if case not in short(cases))


# Long cases whose parts others have too: tests that go through every long case leave these to
# `make check`.
REPEATED = frozenset(
    """long-range long-chunk long-chunk-symmetric long-extreme-logits far-key-aligned
    long-equal-scores long-right-padding long-per-batch long-directional""".split()
)


def by_name(name: str, **changes: object) -> Case:
    cases = CASES + RANGED_CASES
    return replace(next(case for case in cases if case.name == name), **changes)


# Sizes of entries of queries and keys whose squares vanish, in float32 and in float64.
VANISHING = ((1e-25, 1e2), (1e2, 1e-25), (1e-30, 1e2), (1e-22, 1e3))
VANISHING_WIDE = ((1e-170, 1e3), (1e3, 1e-170))


def far_block(q_size: float, k_size: float) -> tuple[list[np.ndarray], float, float]:
    """q [1, 70, 64], k, v [1, 4096, 64], slope and scale: one far block of keys counts."""
    rng, T, S, D, slope, score = np.random.default_rng(0), 70, 4096, 64, 0.01, 45.0
    direction = np.sign(rng.standard_normal(D))
    q = np.tile(direction * q_size, (1, T, 1))
    k, v = np.zeros((1, S, D)), rng.standard_normal((1, S, D))
    k[:, :64] = direction * k_size
    return [q, k, v], slope, score / (q_size * k_size * D)


ATTAINED = ("equal", "steep", "flat", "one-in-64", "far")


def attained(
    pattern: str, T: int, S: int, sides: int, slope: float = 0.004, places: str | None = None
) -> tuple[list[np.ndarray], dict]:
    """q [1, 1, T, 4], k, v [1, 1, S, 4] and options, for which the bound on keys that are not read
    is attained.

    Queries point along (1, 1, 1, 1), and so do all keys ("equal"; "steep": with much slope;
    "flat": with hardly any, so that their number bounds what they weigh), the one nearest to the
    queries of every 64, with zeros between them ("one-in-64"), or the outermost 64, which weigh as
    much as the nearest ("far"). With two sides the queries stand in the middle. With `places` keys
    stand a quarter apart from 1.7e9 on ("even"), in stairs of 300 ("alike"), or mostly close
    together ("bursts"), and lie as far from each other in all.
    """
    direction = np.full(4, 0.5)
    slope = {"steep": 0.02, "flat": 1e-5}.get(pattern, slope)
    score = {"one-in-64": 16.0, "far": slope * S / sides}.get(pattern, 8.0)
    start = S - T if sides == 1 else (S - T) // 2
    k = np.zeros((1, 1, S, 4))
    if pattern == "one-in-64":
        k[:, :, 63:start:64] = k[:, :, start::64] = direction
    elif pattern == "far":
        k[:, :, :64] = direction
        k[:, :, S - 64 :] = direction if sides == 2 else 0
    else:
        k[:] = direction
    q = np.tile(direction * score, (1, 1, T, 1))
    v = np.random.default_rng(0).normal(size=k.shape)
    options = {"slopes": [slope], "scale": 1.0, "query_start": np.array([start])}
    if sides == 2:
        options |= {"causal": False, "right_slopes": [slope]}
    if places:
        rng, order = np.random.default_rng(1), np.arange(S)
        steps = {
            "even": np.ones(S),
            "alike": np.where(order % 300 == 0, 300.0, 0.0),
            "bursts": rng.exponential(size=S) * rng.choice([0.1, 9.1], S, p=[0.9, 0.1]),
        }
        options["positions"] = 1.7e9 + steps[places].cumsum()[None] / 4
        for side in ("slopes", "right_slopes")[:sides]:
            options[side] = [slope * 4]
    return [q, k, v], options
