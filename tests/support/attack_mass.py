"""A search for inputs that make a near-to-far implementation drop as much probability as it can.

A candidate is one head: queries, keys, slopes, the range of its keys, where the first query stands
and, where keys have positions, these. A climb keeps some candidates (`Chains`), changes each of
them a little in every step, and goes on from what dropped more mass.

Dropped mass is measured key by key, not as a difference of large numbers. Column j of v is 2^15
(which keeps small weights from vanishing in float16) for a few keys in a row and 0 for all others,
so that `out` holds the weight that these keys were given. A column lower than the definition's
beyond rounding (`ROUNDING`, of the type of `out`) lost the share that is missing, and that share
of its weight. A key is read or it is not, so rounding alone never counts as loss, however small
the tolerance is. In backward, dv holds the weights in the same way where dout is 2^15 in one row
and column. The ratio is the largest mass that a row loses over `tolerance`: above 1, the
certificate is broken. Where far keys are computed coarsely (`Setting.coarse`), what weights are
off by together, over what docs/math.md (section 11) and rounding allow, is such a ratio, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

import linbias
from attack_calls import DTYPES, Call, Outcome, line_up, run_torch
from cases import Case, Inputs, round_to
from jax_subject import JaxSubject
from linbias import near_to_far
from linbias._request import TOLERANCE
from linbias.jax.impl import blocked as jax_blocked
from linbias.kernels import core
from linbias.torch.impl import blocked, cpu
from linbias.torch.impl.tiles import BLOCK

ONE = 2.0**15
# Shares of a column's weight that may be missing from rounding alone. Scores of some hundred lose
# digits.
ROUNDING = {"float64": 2.0**-20, "float32": 2.0**-8, "float16": 2.0**-5, "bfloat16": 2.0**-4}
COARSE = 0.25  # the same of keys that are computed coarsely: their scores may be off by as much
LARGEST = {"float64": 1e150, "float32": 1e18, "float16": 6e4, "bfloat16": 1e18}
MOST_COLUMNS = 256  # the largest head size of the compiled core
STEPS = 80
SHARED_EVERY = 10
BLOCK_KEYS = 64  # most implementations cut keys into blocks of as many


@dataclass(frozen=True)
class Setting:
    """What the candidates of a climb have in common."""

    dtype: str
    T: int
    S: int
    D: int
    causal: bool
    tolerance: float
    num_chains: int
    own_starts: bool  # every candidate has a query_start of its own, or all the same
    placed: bool = False  # keys have positions
    coarse: bool = False  # far keys are computed coarsely

    @property
    def column_keys(self) -> int:
        """Keys that share a column."""
        return 1 << max(0, math.ceil(math.log2(self.S / MOST_COLUMNS)))

    @property
    def num_columns(self) -> int:
        """Of the values: the last may have fewer keys."""
        return -(-self.S // self.column_keys)


@dataclass
class Chains:
    """C candidates as float64 arrays whose values fit the dtype."""

    q: np.ndarray  # [C, T, D]
    k: np.ndarray  # [C, S, D]
    left: np.ndarray  # [C]
    right: np.ndarray  # [C]; inf: causal
    first: np.ndarray  # [C], int64, as the next two
    end: np.ndarray
    start: np.ndarray
    x: np.ndarray  # [C, S]: where keys stand, which are key s at s unless they have positions

    def select(self, which: np.ndarray) -> Chains:
        """Some of the candidates, by index or mask."""
        return Chains(*(getattr(self, f.name)[which] for f in fields(self)))

    def put(self, which: np.ndarray, others: Chains) -> None:
        """Replace some of the candidates by as many others."""
        for f in fields(self):
            getattr(self, f.name)[which] = getattr(others, f.name)

    def rounded(self, dtype: str) -> Chains:
        """The same in values that the dtype holds."""
        wide = "float64" if dtype == "float64" else "float32"
        limit = LARGEST[dtype]
        q, k = (round_to(np.clip(x, -limit, limit), dtype) for x in (self.q, self.k))
        left, right = (round_to(x, wide) for x in (self.left, self.right))
        return replace(self, q=q, k=k, left=left, right=right)


# Gives weights times ONE: `out` as [C, T, columns], or dv of one row as [C, S].
Subject = Callable[[Setting, Chains], np.ndarray]


def as_call(setting: Setting, chains: Chains) -> Call:
    """The candidates as batch rows of one call, or as heads of one row where they share a
    query_start; values say which keys are read, and dout asks for the weights of one row.
    """
    axis = 1 if setting.own_starts else 0
    q, k, left, right, ranges, x = (
        np.expand_dims(each, axis)
        for each in (
            *(chains.q, chains.k, chains.left, chains.right),
            *(np.stack([chains.first, chains.end], -1), chains.x),
        )
    )
    v = np.broadcast_to(indicators(setting), (*k.shape[:3], setting.num_columns))
    B, H = q.shape[:2]
    case = Case(
        "mass",
        **{"B": B, "H": H, "G": H, "T": setting.T, "S": setting.S},
        **{"D": setting.D, "E": setting.num_columns},
        causal=setting.causal,
        key_range=ranges,
        query_start=chains.start[:B],
        scale=1.0,
    )
    dout = np.zeros((B, H, setting.T, setting.num_columns))
    dout[:, :, probed_row(setting), 0] = ONE
    inputs = Inputs(
        *(q, k, v, left, None if setting.causal else right, dout, np.zeros(dout.shape[:3])),
        positions=x if setting.placed else None,
    )
    return Call(setting.dtype, case, inputs, setting.tolerance)


def climb(setting: Setting, subject: Subject, seed: int | list[int], steps: int = STEPS) -> float:
    """Climb from random candidates to the largest mass that a row loses, over the tolerance; a
    function of the seed alone.
    """
    rng = np.random.default_rng(seed)
    best = begin(rng, setting)
    ratio = ratios(setting, subject, best)
    for step in range(1, steps):
        tried = best.select(np.arange(setting.num_chains))
        for c in range(setting.num_chains):
            change(rng, setting, tried, c)
        tried = tried.rounded(setting.dtype)
        found = ratios(setting, subject, tried)
        better = found >= ratio
        best.put(better, tried.select(better))
        ratio = np.maximum(ratio, found)
        if step % SHARED_EVERY == 0:  # the worse half goes on from the better one
            order = np.argsort(ratio)
            half = len(order) // 2
            worse, kept = order[:half], order[-half:]
            best.put(worse, best.select(kept))
            ratio[worse] = ratio[kept]
    return float(ratio.max())


def ratios(setting: Setting, subject: Subject, chains: Chains) -> np.ndarray:
    """[C]: the largest mass that a row of each candidate loses, over the tolerance."""
    expected = weights(setting, chains)
    found = subject(setting, chains) / ONE
    if found.ndim == 3:
        expected = sum_columns(setting, expected)
    else:  # of one row, key by key
        expected = expected[:, probed_row(setting)]
    with np.errstate(invalid="ignore", divide="ignore"):
        missing = 1 - found / expected
    most = COARSE if setting.coarse else ROUNDING[setting.dtype]
    coarse = np.where((expected > 0) & (missing <= most), np.abs(missing) * expected, 0.0)
    missing = np.where((expected > 0) & (missing > most), missing, 0.0)
    # What vanishes beside the tolerance may as well be rounded to 0.
    lost = np.where(expected > setting.tolerance * 1e-6 / setting.S, missing * expected, 0.0)
    ratio = _worst_row(setting, lost) / setting.tolerance
    if setting.coarse:
        ratio = np.maximum(ratio, _worst_row(setting, coarse) / _coarse_share(setting, chains))
    return np.where(_beyond_precision(setting, chains), 0.0, ratio)


def _worst_row(setting: Setting, mass: np.ndarray) -> np.ndarray:
    """[C]: the largest sum over the columns of a row."""
    return mass.sum(-1).reshape(setting.num_chains, -1).max(1, initial=0.0)


def _coarse_share(setting: Setting, chains: Chains) -> np.ndarray:
    """[C]: what the weights of a row may be off by together. What is left out makes others larger;
    blocks of few terms cost 19 u |q||k|, and 16 u for the terms of the weights themselves; scores,
    biases and sums are rounded.
    """
    units = (19 + 2 * (setting.D + 10)) * _largest_score(chains) + 16 + 100
    return 2 * setting.tolerance + 2.0**-24 * units


def _beyond_precision(setting: Setting, chains: Chains) -> np.ndarray:
    """[C]: whether any computation in the wide type rounds its scores by 1/100."""
    unit = 2.0**-53 if setting.dtype == "float64" else 2.0**-24
    rounding = _largest_score(chains) * unit * (setting.D + 8)
    return ~(rounding <= 0.01)  # what is not finite, too


@np.errstate(over="ignore")
def _largest_score(chains: Chains) -> np.ndarray:
    """[C]: the longest query times the longest key."""
    return np.prod([np.linalg.norm(x, axis=-1).max(1) for x in (chains.q, chains.k)], axis=0)


def indicators(setting: Setting) -> np.ndarray:
    """The values of every candidate: [S, columns], ONE where a key belongs to a column."""
    column = np.arange(setting.S) // setting.column_keys
    return (column[:, None] == np.arange(setting.num_columns)) * ONE


def sum_columns(setting: Setting, weight: np.ndarray) -> np.ndarray:
    """[C, T, S] -> [C, T, columns]."""
    firsts = np.arange(0, setting.S, setting.column_keys)
    return weight if setting.column_keys == 1 else np.add.reduceat(weight, firsts, axis=-1)


def probed_row(setting: Setting) -> int:
    """The row whose weights backward shows."""
    return (setting.T * 2) // 3


def weights(setting: Setting, chains: Chains) -> np.ndarray:
    """The definition in float64, scale 1: [C, T, S]; rows that see no key are zeros."""
    return linbias.attention_weights(
        *(x[:, None] for x in (chains.q, chains.k, chains.left)),
        right_slopes=chains.right[:, None],
        causal=False,
        scale=1.0,
        key_range=np.stack([chains.first, chains.end], -1),
        query_start=chains.start,
        positions=chains.x if setting.placed else None,
    )[:, 0]


def begin(rng: np.random.Generator, setting: Setting) -> Chains:
    """Random candidates of several kinds; many begin where far keys just begin to count."""
    C, T, S, D = setting.num_chains, setting.T, setting.S, setting.D
    nats = -math.log(setting.tolerance) + 3
    # Slopes whose windows end somewhere among the keys.
    left, right = nats / S * np.exp(rng.uniform(0, 3, (2, C)))
    if setting.causal:
        right[:] = np.inf
    q, k = rng.standard_normal((C, T, D)), rng.standard_normal((C, S, D))
    start = np.full(C, S - T)
    if not setting.causal:
        start[:] = rng.integers(0, S, C) if setting.own_starts else rng.integers(0, S)
    x = np.tile(np.arange(float(S)), (C, 1))
    if setting.placed:
        x, start = _places(rng, setting), np.clip(start, 0, S - T)  # queries stand at keys
    chains = Chains(q, k, left, right, np.zeros(C, np.int64), np.full(C, S), start, x)
    for c in range(C):
        kind = rng.integers(4)
        if kind < 2:
            middle = start[c] + T // 2
            to_left = x[c, middle] - x[c] if setting.placed else middle - x[c]
            # `blocked` counts its blocks from where the queries stand.
            block, begins = BLOCK_KEYS, (0, 0)
            if not setting.own_starts:
                block, begins = BLOCK, (int(start[c]), int(start[c]) + T)
            slopes = left[c], right[c]
            line_up(rng, q[c], k[c], slopes, to_left, setting.tolerance, block, begins)
        elif kind == 2:
            k[c] += 3 * rng.standard_normal(D)
        q[c] *= np.exp(rng.uniform(-1, 1))
        if rng.random() < 0.3:
            chains.first[c] = rng.integers(0, S // 4)
        if rng.random() < 0.3:
            chains.end[c] = S - rng.integers(0, S // 4)
    return chains.rounded(setting.dtype)


def _places(rng: np.random.Generator, setting: Setting) -> np.ndarray:
    """[C, S]: even, random, in bursts, many at one place, or with jumps; 1 apart on average."""
    C, S = setting.num_chains, setting.S
    gaps = rng.exponential(size=(C, S))
    kinds = (
        np.ones_like(gaps),
        gaps,
        gaps * rng.choice([0.01, 5.0], gaps.shape, p=[0.8, 0.2]),
        np.floor(gaps * 0.7) + 1e-12,
        np.where(rng.random(gaps.shape) < 0.02, 40.0, 0.01),
    )
    gaps = np.choose(rng.integers(len(kinds), size=(C, 1)), kinds)
    gaps *= S / gaps.sum(-1, keepdims=True)
    return gaps.cumsum(-1) + rng.choice([0.0, 1.7e9], (C, 1))


CHANGES = "queries keys keys slopes slopes disturb shift align turn clear roll sizes move".split()


def change(rng: np.random.Generator, setting: Setting, chains: Chains, c: int) -> None:
    """Change candidate c a little, in one to three ways."""
    changes = [*CHANGES, *["stretch"] * 3] if setting.placed else CHANGES
    for _ in range(rng.integers(1, 4)):
        change_once(changes[rng.integers(len(changes))], rng, setting, chains, c)


def change_once(
    kind: str, rng: np.random.Generator, setting: Setting, chains: Chains, c: int
) -> None:
    q, k, x = chains.q[c], chains.k[c], chains.x[c]  # views

    def little() -> float:
        """A factor around 1, at any distance from it."""
        return math.exp(rng.normal() * 10 ** rng.uniform(-4, -0.3))

    def some_keys() -> slice:
        return slice(*np.sort(rng.integers(0, setting.S + 1, 2)))

    match kind:
        case "queries":
            q[slice(None) if rng.random() < 0.7 else rng.integers(setting.T)] *= little()
        case "keys":
            k[some_keys()] *= little()
        case "slopes":
            (chains.left if rng.random() < 0.5 else chains.right)[c] *= little()
        case "disturb":
            array = q if rng.random() < 0.4 else k
            size = np.abs(array).mean() * 10 ** rng.uniform(-4, 0)
            array += size * rng.standard_normal(array.shape)
        case "shift":  # all keys: softmax does not notice, the bound may
            size = np.abs(k).mean() * 10 ** rng.uniform(-3, 1)
            k += size * rng.standard_normal(setting.D)
        case "align":  # some keys with a query, at their own length or at that of one of them
            query = q[rng.integers(setting.T)]
            norm = np.linalg.norm(query)
            if norm > 0:
                where = some_keys()
                length = np.linalg.norm(k[where], axis=1, keepdims=True)
                if rng.random() < 0.5 and len(length):
                    length[:] = length[rng.integers(len(length))]
                k[where] = query / norm * length
        case "turn":
            q[:] = q[rng.integers(setting.T)]
        case "clear":
            k[some_keys()] = 0.0
        case "roll":
            k[:] = np.roll(k, rng.integers(-20, 21), axis=0)
        case "sizes":  # longer queries and shorter keys, or the reverse: every score stays
            most = {"float16": 4, "float64": 200}.get(setting.dtype, 30)
            factor = little() if rng.random() < 0.5 else 2.0 ** rng.integers(-most, most + 1)
            q *= factor
            k /= factor
        case "move":  # another range of keys, or another place of the queries
            step, which = int(rng.integers(-20, 21)), rng.integers(3)
            if which == 0:
                chains.first[c] = np.clip(chains.first[c] + step, 0, chains.end[c])
            elif which == 1:
                chains.end[c] = np.clip(chains.end[c] + step, chains.first[c], setting.S)
            elif setting.own_starts:
                low, high = -setting.T, setting.S + 20
                if setting.placed:
                    low, high = 0, setting.S - setting.T
                chains.start[c] = np.clip(chains.start[c] + step, low, high)
        case "stretch":  # some keys that have positions apart, or together, to one place at times
            gaps = np.diff(x, prepend=x[0])
            where = some_keys()
            gaps[where] *= 0.0 if rng.random() < 0.1 else little() ** rng.choice([1, 4])
            x[:] = x[0] + gaps.cumsum()


DIFFERENTIATED = ("gradients wanted", "backward")
MODES = ("forward", *DIFFERENTIATED, "decode", "decode, key_bound")


@dataclass(frozen=True)
class Attacked:
    """An implementation, a type and a way to call it."""

    implementation: str  # "cpu avx2", "torch blocked", ...
    mode: str
    dtype: str
    placed: bool = False  # with keys at given positions

    @property
    def way(self) -> str:
        """How it is called, in words."""
        return f"{self.mode}, positions" if self.placed else self.mode

    @property
    def takes_positions(self) -> bool:
        name = self.implementation.split()[0]
        modules = {"cpu": cpu, "torch": blocked, "jax": jax_blocked}
        return name == "near_to_far" or "positions" in modules[name].ABILITIES.has

    def subject(self, setting: Setting, chains: Chains) -> np.ndarray:
        """Call it: a `Subject`."""
        call, (name, _, target) = as_call(setting, chains), self.implementation.partition(" ")
        if name == "near_to_far":
            found = near_to_far.attention(**call.given, tolerance=call.tolerance).out
        elif name == "jax":
            inputs = call.inputs
            if setting.placed:
                # Counted from the last key: what float32 rounds off there is far below what
                # counts as a loss.
                inputs = replace(inputs, positions=inputs.positions - inputs.positions[..., -1:])
            found = JAX_BLOCKED.run(
                inputs, call.case, call.dtype, tolerance=call.tolerance, differentiated=False
            )[0]["out"]
        else:
            call = replace(
                call,
                bounded=self.mode == "decode, key_bound",
                wanted=("v",) if self.mode in DIFFERENTIATED else (),
            )
            implementation = "cpu" if name == "cpu" else target
            results = run_torch(call, implementation, target if name == "cpu" else None)
            found = results["dv"][..., 0] if self.mode == "backward" else results["out"]
        return found.squeeze(1 if setting.own_starts else 0)

    def setting(self, rng: np.random.Generator) -> Setting:
        """Sizes that this implementation leaves something of, and runs quickly; and a tolerance:
        the default of the type, or one where a violation shows at once.
        """
        name, decode = self.implementation.split()[0], self.mode.startswith("decode")
        T = int(
            rng.integers(1, 5) if decode else rng.choice([5, 9, 17, 50], p=[0.4, 0.3, 0.2, 0.1])
        )
        S, D = int(rng.choice([130, 200, 300, 500])), int(rng.choice([1, 3, 8, 16, 31]))
        num_chains = 16 if T > 20 else 32
        if decode and rng.random() < 0.5:  # beyond the near blocks, which are read one by one
            S, num_chains = int(rng.choice([1500, 3000, 5000])), 8
        if name != "cpu":
            T, num_chains = int(rng.choice([1, 3, 20])), 12
        if name in ("torch", "jax"):  # blocks of 256 keys
            S = int(rng.choice([768, 1024]))
        default = TOLERANCE[self.dtype]
        tolerances = [default, default, 1e-2, 1e-3, 0.3] + [1e-5] * (self.dtype != "float16")
        if coarse := "amx" in self.implementation and self.dtype == "float32" and not decode:
            # The matrix unit takes no smaller calls. At most other tolerances nothing shows of it.
            T, S, D, num_chains = 192, int(rng.choice([512, 1024])), 32, 4
            tolerances = [2.0**-24, 2.0**-20]
        return Setting(
            self.dtype,
            **{"T": T, "S": S, "D": D, "num_chains": num_chains},
            causal=bool(rng.random() < 0.5),
            tolerance=float(rng.choice(tolerances)),
            own_starts=name in ("cpu", "near_to_far"),
            placed=self.placed,
            coarse=coarse,
        )


JAX_BLOCKED = JaxSubject("blocked")


@functools.cache
def everything(only: str = "") -> list[Attacked]:
    """All that this machine can run and whose name holds a text, such as "cpu avx2 decode"."""
    ways = [(f"cpu {target}", mode) for target in core.targets() for mode in MODES]
    ways += [("torch blocked", "forward"), ("torch blocked", "backward")]
    ways += [("jax blocked", "forward")]
    attacked = [Attacked(*way, dtype) for way in ways for dtype in DTYPES]
    attacked += [Attacked("near_to_far", "forward", "float64")]
    attacked += [replace(a, placed=True) for a in attacked if a.takes_positions]
    return [a for a in attacked if only in f"{a.implementation} {a.way} {a.dtype}"]


def attack(seed: int, number: int, only: str = "") -> Outcome:
    """A climb, in rounds over everything that can be attacked, each in an order of its own."""
    known = everything(only)
    round_number, turn = divmod(number, len(known))
    order = np.random.default_rng([seed, round_number]).permutation(len(known))
    attacked = known[order[turn]]
    setting = attacked.setting(np.random.default_rng([seed, number]))
    ratio = climb(setting, attacked.subject, [seed, number])
    entry = {"candidates": STEPS * setting.num_chains, "ratio": round(ratio, 6)}
    entry |= {"climb": number, "dtype": attacked.dtype}
    failure = f"{attacked} drops {ratio:.4g} times {setting}" if ratio > 1 else ""
    return Outcome(f"{attacked.implementation}, {attacked.way}", entry, failure)
