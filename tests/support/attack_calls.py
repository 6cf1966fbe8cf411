"""Calls of attention as attacks draw them, how one is run, and the search with random calls.

The searches are this one, attack_mass.py and attack_proved.py: `attack` tries number n of a seed,
a function of these two alone, and says what came of it. `make attack` runs them for long,
tests/core/test_judges.py and tests/project/test_proof.py for a moment.

A random call draws its sizes, dtype, strides, slopes, sides, ranges, query starts, scale, dropout,
tolerance, key_bound, and which gradients are wanted. It is held against the definition in a wider
type within the budget. The truth is that of the contract, truth.py; the plain computations that
earn the budget are plain.py, and the truth's own formulas in the wide type, with the products
summed in other orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import linbias.torch
from budget import compare
from cases import ROW_RANGES, Case, Inputs, arguments, round_to
from jax_subject import JaxSubject
from linbias._request import TOLERANCE
from linbias.kernels import core
from linbias.torch import call as calls
from plain import plain_attention
from truth import true_attention

DTYPES = ("float64", "float32", "bfloat16", "float16")
NAMES = ("q", "k", "v", "left", "right", "positions", "query_positions")
Results = dict[str, np.ndarray]


class Outcome(NamedTuple):
    """What came of one number."""

    subject: str
    entry: dict[str, Any]  # its counts, and its worst
    failure: str  # what is wrong, if anything


@dataclass(frozen=True)
class Call:
    """One call: its sizes and options, its arrays, and what PyTorch alone is asked."""

    dtype: str
    case: Case
    inputs: Inputs
    tolerance: float | None
    bounded: bool = False  # with the key_bound
    wanted: tuple[str, ...] = ()  # gradients
    layout: dict[str, int] = field(default_factory=dict)  # of q, k, v
    seed: int = 0

    @property
    def wide(self) -> str:
        """The dtype of scores and slopes."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of attention in NumPy, but for dropout and the tolerance."""
        arrays = {n: x for n in NAMES if (x := getattr(self.inputs, n)) is not None}
        case = self.case
        return arguments(arrays) | case.placement | {"causal": case.causal, "scale": case.scale}

    def describe(self) -> dict[str, Any]:
        """What to know of a call that went wrong."""
        sides = (("left", self.inputs.left), ("right", self.inputs.right))
        slopes = {name: side.tolist() for name, side in sides if side is not None}
        names = ("dtype", "tolerance", "bounded", "wanted")
        return {**vars(self.case), **slopes, **{n: getattr(self, n) for n in names}}


def run_torch(call: Call, implementation: str, target: str | None = None) -> Results:
    """out, lse and the wanted gradients (dq ...) of PyTorch's front end, as float64; the compiled
    core runs a CPU target.
    """
    dtype, wide = getattr(torch, call.dtype), getattr(torch, call.wide)
    dtypes = dict.fromkeys("qkv", dtype) | dict.fromkeys(("slopes", "right_slopes"), wide)
    given = {
        name: torch.tensor(value, dtype=dtypes.get(name)) if np.ndim(value) else value
        for name, value in call.given.items()
    }
    given |= {n: _lay_out(given[n], call.layout.get(n, 0)).detach() for n in "qkv"}
    leaves = [given[n].requires_grad_() for n in arguments(dict.fromkeys(call.wanted))]
    if call.bounded and call.case.S:
        longest = torch.tensor(np.linalg.norm(call.inputs.k, axis=-1).max(-1) * (1 + 1e-12))
        given["key_bound"] = longest.to(wide).nextafter(torch.tensor(torch.inf, dtype=wide))
    with _forced(target), mock.patch.object(calls, "draw_seed", lambda _: torch.tensor(call.seed)):
        out, lse = linbias.torch.attention(
            **given,
            dropout=call.case.dropout,
            tolerance=call.tolerance,
            implementation=implementation,
            return_lse=True,
        )
        results = {"out": out, "lse": lse}
        dlse = torch.tensor(call.inputs.dlse, dtype=lse.dtype) * (lse.detach() > -torch.inf)
        pairs = [(out, torch.tensor(call.inputs.dout, dtype=out.dtype)), (lse, dlse)]
        if pairs := [pair for pair in pairs if pair[0].requires_grad]:
            ends, starts = zip(*pairs, strict=True)
            found = torch.autograd.grad(ends, leaves, starts, materialize_grads=True)
            results |= {f"d{n}": g for n, g in zip(call.wanted, found, strict=True)}
    return {n: x.detach().double().numpy() for n, x in results.items()}


@contextmanager
def _forced(target: str | None) -> Iterator[None]:
    core.force_target(target)
    try:
        yield
    finally:
        core.force_target(None)


def as_wanted(call: Call, results: Results, gradients: Results) -> Results:
    """out, lse and the wanted gradients, under the names that `run_torch` gives them."""
    return {**results, **{f"d{name}": gradients[name] for name in call.wanted}}


def _lay_out(x: Tensor, layout: int) -> Tensor:
    """The same values with other strides."""
    if layout == 1:  # heads before the last axis, as a projection gives them
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == 2:  # between other numbers
        wider = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
        wider[..., 1:-2] = x
        return wider[..., 1:-2]
    if layout == 3:  # the last axis is not the innermost
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


def line_up(
    rng: np.random.Generator,
    q: np.ndarray,
    k: np.ndarray,
    slopes: tuple[float, float],
    to_left: np.ndarray,
    tolerance: float,
    block: int,
    begins: tuple[int, int] = (0, 0),
) -> None:
    """Put the keys of a head, k [S, D], and its queries on a line, in place: far keys at the score
    that the rule just leaves, and all others at 0.

    `to_left` [S] is how far keys lie to the left of the middle query. Most often the far ones
    begin where a block of keys does; on each side these are counted from a key.
    """
    direction = rng.standard_normal(k.shape[1])
    direction /= np.linalg.norm(direction)
    size = np.exp(rng.uniform(-1, 2))
    q[:] = direction * size * np.exp(rng.normal(0, 0.02, (len(q), 1)))
    k[:] = 0.0
    step = block if rng.random() < 0.7 else 1
    for side in range(2):
        slope, distances = slopes[side], to_left if side == 0 else -to_left
        edges = np.arange(begins[side] % step or step, len(k), step)
        edges = edges[distances[edges - 1 if side == 0 else edges] > 0]
        if not len(edges) or not 0 < slope < np.inf or rng.random() < 0.15:
            continue
        edge, extent = int(rng.choice(edges)), 64 if rng.random() < 0.3 else len(k)
        far, nearest = slice(max(0, edge - extent), edge), edge - 1
        if side == 1:
            far, nearest = slice(edge, edge + extent), edge
        score = slope * distances[nearest] + np.log(tolerance) + rng.normal(-0.3, 0.7)
        k[far] = score / size * direction


def random_call(seed: int | list[int], dtype: str | None = None) -> Call:
    """A call as a function of the seed alone."""
    rng = np.random.default_rng(seed)
    dtype = dtype or str(rng.choice(DTYPES, p=[0.1, 0.4, 0.3, 0.2]))
    wide = "float64" if dtype == "float64" else "float32"
    B, G, group = (int(n) for n in rng.choice([1, 2, 3], 3))
    B = B if G * group > 1 else 3  # the largest of a few errors says more than one alone
    lengths = [0, 1, 2, 3, 4, 5, 7, 17, 47, 49, 65, 97, 130]
    T, S = int(rng.choice(lengths)), int(rng.choice([*lengths, 64, 129, 200, 300, 511, 700]))
    if dtype == "float64":  # long double is slow
        B, G, T, S = min(B, 2), min(G, 2), min(T, 49), min(S, 200)
    if rng.random() > 0.05:
        T, S = max(T, 1), max(S, 1)
    D, E = (int(n) for n in rng.choice([1, 2, 3, 7, 8, 16, 31, 33, 64, 65], 2))
    H, size = G * group, np.exp(rng.uniform(-1.5, 1.5))
    q, k, v = (
        round_to(rng.standard_normal(shape) * size**0.5, dtype)
        for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    )
    causal = bool(rng.random() < 0.5)
    left, right = _random_slopes(rng, B, H, wide), None
    if not causal and rng.random() < 0.6:
        right = _random_slopes(rng, B, H, wide)
    tolerance = [None, None, 0.0, 1e-9, 1e-3][rng.integers(5)]
    given = ("q", "k", "v", "left", "right")[: 4 if right is None else 5]
    wanted = tuple(n for n in given if rng.random() < 0.6)
    if rng.random() < 0.3 or tolerance == 1e-3:  # gradients are bounded by more than mass
        wanted = ()
    case = Case(
        "random",
        **{"B": B, "H": H, "G": G, "T": T, "S": S, "D": D, "E": E},
        causal=causal,
        right=None if right is None else "own",
        **_random_placement(rng, B, G, T, S),
        scale=[None, -1.0, 0.3, 0.0][rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])],
        dropout=float(rng.choice([0.0, 0.1, 0.5, 0.9], p=[0.7, 0.1, 0.1, 0.1])),
    )
    bounded = bool(rng.random() < 0.3)
    layout = {name: int(rng.integers(4)) for name in "qkv"}
    dout = round_to(rng.standard_normal((B, H, T, E)), dtype)
    dlse = round_to(rng.standard_normal((B, H, T)), wide)
    inputs = Inputs(q, k, v, left, right, dout, dlse)
    seed = int(rng.integers(2**31 - 1))
    return Call(dtype, case, inputs, tolerance, bounded, wanted, layout, seed)


def _random_slopes(rng: np.random.Generator, B: int, H: int, wide: str) -> np.ndarray:
    slopes = np.exp(rng.uniform(-8, 1, (H,) if rng.random() < 0.5 else (B, H)))
    slopes[rng.random(slopes.shape) < 0.15] = 0
    slopes[rng.random(slopes.shape) < 0.15] = np.inf
    return round_to(slopes, wide)


def _random_placement(rng: np.random.Generator, B: int, G: int, T: int, S: int) -> dict[str, Any]:
    placement: dict[str, Any] = {}
    if rng.random() < 0.4:
        shape = (B, 2) if rng.random() < 0.5 else (B, G, 2)
        ranges = np.sort(rng.integers(0, S + 1, shape), -1)
        ranges[rng.random(shape[:-1]) < 0.15] = S // 2  # empty
        placement["key_range"] = ranges.tolist()
    if rng.random() < 0.4:
        placement["query_start"] = rng.integers(-T - 5, S + 20, B).tolist()
    if rng.random() < 0.3:
        placement["rows"] = str(rng.choice(ROW_RANGES))
    return placement


def find_truth(call: Call) -> Results:
    """The definition, written out by hand, in float64; for float64 in long double."""
    wider = np.longdouble if call.dtype == "float64" else np.float64
    return as_wanted(call, *true_attention(call.inputs, call.case, wider, call.seed))


def run_plain(call: Call, order: int) -> Results:
    """A plain computation in the wide type, rounded to the dtype, in another order for each
    number.

    Keys, the entries of q and k, and those of v change places. Of every four, two take the mean of
    a row's dout . v as dout . out, as every backward does that keeps no weights, and two scale the
    queries, not the scores.
    """
    rng, case, inputs, scale = np.random.default_rng(order), call.case, call.inputs, 1.0
    turns = {"qk": rng.permutation(case.D), "v": rng.permutation(case.E)}
    turned = {n: turns["qk" if n in "qk" else "v"] for n in ("q", "k", "v", "dout")}
    inputs = replace(inputs, **{n: getattr(inputs, n)[..., turn] for n, turn in turned.items()})
    if order % 4 >= 2:
        scale = case.D**-0.5 if case.scale is None else case.scale
        inputs = replace(inputs, q=round_to(inputs.q * scale, call.wide))
        case = replace(case, scale=1.0)
    compute, wide = plain_attention, getattr(torch, call.wide)
    if order % 2:
        compute, wide = true_attention, np.dtype(call.wide).type
    found = compute(inputs, case, wide, call.seed, order=rng.permutation(case.S))
    arrays = found[0] | found[1]
    arrays["q"] = arrays["q"] * scale
    for name, turn in {"q": "qk", "k": "qk", "v": "v", "out": "v"}.items():
        arrays[name] = round_to(arrays[name][..., turns[turn].argsort()], call.dtype)
    return as_wanted(call, {n: arrays[n] for n in ("out", "lse")}, arrays)


def worst_share(call: Call, actual: Results, truth: Results, orders: range) -> tuple[float, str]:
    """The largest error over the budget that plain computations in these orders earn."""
    plains = [run_plain(call, order) for order in orders]
    tolerance = TOLERANCE[call.dtype] if call.tolerance is None else call.tolerance
    tolerance /= 1 - call.case.dropout
    found = []
    for name in truth:
        dtype = call.dtype if name in ("out", "dq", "dk", "dv") else call.wide
        plain = [p[name] for p in plains]
        share, words = compare(actual[name], truth[name], plain, dtype, tolerance)
        found.append((share, f"{name}: {words}"))
    return max(found)


# Plain computations that earn a budget at first, and where a call is over it.
FEW_ORDERS, ALL_ORDERS = range(4), range(40)
ONE_IN_JAX = 200  # every new shape is compiled


def attack(seed: int, number: int) -> Outcome:
    """Run a random call on the implementation whose turn it is: of PyTorch's front end, where the
    compiled core has its targets, or rarely of JAX's.
    """
    call = random_call([seed, number])
    implementations = [*(("cpu", target) for target in core.targets()), ("blocked", None)]
    name, target = implementations[number % len(implementations)]
    if number % ONE_IN_JAX == ONE_IN_JAX - 1:
        name = ("cpu", "blocked")[number // ONE_IN_JAX % 2]
        subject = JaxSubject(name, call.seed)
        found = subject.run(call.inputs, call.case, call.dtype, tolerance=call.tolerance)
        actual, ran = as_wanted(call, *found), f"jax {name} {call.dtype}"
    else:
        actual = run_torch(call, name, target)
        ran = " ".join(filter(None, (name, target, call.dtype)))
    truth = find_truth(call)
    share, words = worst_share(call, actual, truth, FEW_ORDERS)
    again = share > 1
    if again:
        share, words = worst_share(call, actual, truth, ALL_ORDERS)
    over = share > 1
    entry = {"calls": 1, "share": round(share, 4), "over": int(over), "asked_again": int(again)}
    return Outcome(ran, entry, f"{ran}: {words}; {call.describe()}" if over else "")
