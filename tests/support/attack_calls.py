"""Random calls with every option, held against the definition in a wider type within the budget.

A call draws its sizes, dtype, strides, slopes, sides, ranges, query starts, scale, dropout,
tolerance, key_bound, and which gradients are wanted. The truth is that of the contract, truth.py;
the plain computations that earn the budget are plain.py, and the truth's own formulas in the wide
type, with the products summed in other orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
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
NAMES = ("q", "k", "v", "left", "right")


@dataclass(frozen=True)
class RandomCall:
    """One call: its sizes and options, its arrays, and what PyTorch alone is asked."""

    dtype: str
    case: Case
    inputs: Inputs
    tolerance: float | None
    bounded: bool
    wanted: tuple[str, ...]  # gradients
    layout: dict[str, int]  # of q, k, v
    seed: int

    @property
    def wide(self) -> str:
        """The dtype of scores and slopes."""
        return "float64" if self.dtype == "float64" else "float32"

    def describe(self) -> dict[str, Any]:
        """What to know of a call that went wrong."""
        sides = (("left", self.inputs.left), ("right", self.inputs.right))
        slopes = {name: side.tolist() for name, side in sides if side is not None}
        names = ("dtype", "tolerance", "bounded", "wanted")
        return {**vars(self.case), **slopes, **{n: getattr(self, n) for n in names}}


def random_call(seed: int | list[int], dtype: str | None = None) -> RandomCall:
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
    given = NAMES if right is not None else NAMES[:4]
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
    return RandomCall(dtype, case, inputs, tolerance, bounded, wanted, layout, seed)


Results = dict[str, np.ndarray]


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


def run_torch(call: RandomCall, implementation: str) -> Results:
    """out, lse and the wanted gradients (dq ...) of PyTorch's front end, as float64."""
    case, dtype, wide = call.case, getattr(torch, call.dtype), getattr(torch, call.wide)
    leaves = {}
    for name in NAMES:
        if (array := getattr(call.inputs, name)) is not None:
            leaf = torch.tensor(array, dtype=dtype if name in "qkv" else wide)
            leaf = _lay_out(leaf, call.layout[name]) if name in "qkv" else leaf
            leaves[name] = leaf.detach().requires_grad_(name in call.wanted)
    bound = None
    if call.bounded and case.S:
        bound = leaves["k"].detach().to(wide).norm(dim=-1).amax(-1) * 1.0001
    with mock.patch.object(calls, "draw_seed", lambda device: torch.tensor(call.seed)):
        out, lse = linbias.torch.attention(
            **arguments(leaves),
            causal=case.causal,
            **{n: torch.tensor(x) for n, x in case.placement.items()},
            scale=case.scale,
            key_bound=bound,
            dropout=case.dropout,
            tolerance=call.tolerance,
            implementation=implementation,
            return_lse=True,
        )
    results = {"out": out, "lse": lse}
    dlse = torch.tensor(call.inputs.dlse, dtype=lse.dtype) * (lse.detach() > -torch.inf)
    pairs = [(out, torch.tensor(call.inputs.dout, dtype=out.dtype)), (lse, dlse)]
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    if pairs:
        found = torch.autograd.grad(
            [x for x, _ in pairs],
            [leaves[name] for name in call.wanted],
            [gradient for _, gradient in pairs],
            materialize_grads=True,
        )
        results |= {f"d{n}": g for n, g in zip(call.wanted, found, strict=True)}
    return {n: x.detach().double().numpy() for n, x in results.items()}


def run_jax(call: RandomCall, implementation: str) -> Results:
    """As `run_torch`, of the JAX front end."""
    subject = JaxSubject(implementation, call.seed)
    return as_wanted(
        call, *subject.run(call.inputs, call.case, call.dtype, tolerance=call.tolerance)
    )


def as_wanted(call: RandomCall, results: Results, gradients: Results) -> Results:
    """out, lse and the wanted gradients, under the names that `run_torch` gives them."""
    return {**results, **{f"d{name}": gradients[name] for name in call.wanted}}


def find_truth(call: RandomCall) -> Results:
    """The definition, written out by hand, in float64; for float64 in long double."""
    wider = np.longdouble if call.dtype == "float64" else np.float64
    return as_wanted(call, *true_attention(call.inputs, call.case, wider, call.seed))


def run_plain(call: RandomCall, order: int) -> Results:
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


def worst_share(
    call: RandomCall, actual: Results, truth: Results, orders: range
) -> tuple[float, str]:
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


@dataclass(frozen=True)
class Outcome:
    """How a random call went."""

    ran: str  # implementation, target and dtype
    share: float  # the largest error over what the budget allows
    again: bool  # whether more plain computations were asked
    failure: str | None  # what is over the budget, and the call


# Plain computations that earn a budget at first, and where a call is over it.
FEW_ORDERS, ALL_ORDERS = range(4), range(40)


def try_call(seed: int | list[int], number: int) -> Outcome:
    """Run one random call on the implementation whose turn it is."""
    call, implementations = random_call(seed), runnable()
    name, target = implementations[number % len(implementations)]
    if number % ONE_IN_JAX == ONE_IN_JAX - 1:
        name, target = ("jax cpu", "jax blocked")[number // ONE_IN_JAX % 2], None
    ran = " ".join(filter(None, (name, target, call.dtype)))
    core.force_target(target)
    try:
        front_end, _, implementation = name.rpartition(" ")
        actual = (run_jax if front_end else run_torch)(call, implementation)
    finally:
        core.force_target(None)
    truth = find_truth(call)
    share, words = worst_share(call, actual, truth, FEW_ORDERS)
    again = share > 1
    if again:
        share, words = worst_share(call, actual, truth, ALL_ORDERS)
    failure = f"{ran}: {words}; {call.describe()}" if share > 1 else None
    return Outcome(ran, share, again, failure)


ONE_IN_JAX = 200  # every new shape is compiled


def runnable() -> list[tuple[str, str | None]]:
    """Implementations of PyTorch's front end, and targets of the compiled core."""
    return [*(("cpu", target) for target in core.targets()), ("blocked", None)]
