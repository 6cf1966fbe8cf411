"""Random calls with every option, each implementation held against `dense` in a wider type within the tests' budget.

A call draws its sizes, dtype, strides, slopes (0, infinite, mixed, per batch row), sides, ranges (per head, empty),
query starts (before, among and beyond the keys), scale, dropout, tolerance, key_bound, and which gradients are wanted.
The truth is `dense` in float64 (for float64 inputs tests/truth.py in long double); the plain computations that earn the
budget are `dense` in the wide type with the products summed in other orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import linbias.torch
from budget import EPSILON, assert_within_budget
from cases import Case, Inputs, arguments, round_to
from linbias._checks import TOLERANCE
from linbias.kernels import core
from linbias.torch import call as calls
from linbias.torch import dense
from truth import true_attention

DTYPES = ("float64", "float32", "bfloat16", "float16")
NAMES = ("q", "k", "v", "left", "right")


@dataclass(frozen=True)
class RandomCall:
    """One call: its arrays as float64 tensors whose values fit the dtype, and its options."""

    dtype: str
    arrays: dict[str, Tensor]  # q k v left, and right or none
    causal: bool
    placement: dict[str, Tensor]  # key_range, query_start
    scale: float | None
    dropout: float
    tolerance: float | None
    bounded: bool
    wanted: tuple[str, ...]  # gradients
    layout: dict[str, int]  # of q, k, v
    dout: Tensor
    dlse: Tensor
    seed: int

    def describe(self) -> dict[str, Any]:
        """What to know of a call that went wrong."""
        sizes = {n: list(x.shape) for n, x in self.arrays.items()}
        options = {n: x.tolist() for n, x in self.placement.items()}
        slopes = {n: self.arrays[n].tolist() for n in ("left", "right") if n in self.arrays}
        names = ("dtype", "causal", "scale", "dropout", "tolerance", "bounded", "wanted")
        return {**sizes, **options, **slopes, **{n: getattr(self, n) for n in names}}


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
    arrays = {
        name: torch.tensor(round_to(rng.standard_normal(shape) * size**0.5, dtype))
        for name, shape in (("q", (B, H, T, D)), ("k", (B, G, S, D)), ("v", (B, G, S, E)))
    }
    causal = bool(rng.random() < 0.5)
    arrays["left"] = _random_slopes(rng, B, H, wide)
    if not causal and rng.random() < 0.6:
        arrays["right"] = _random_slopes(rng, B, H, wide)
    tolerance = [None, None, 0.0, 1e-9, 1e-3][rng.integers(5)]
    wanted = tuple(n for n in NAMES if n in arrays and rng.random() < 0.6)
    if rng.random() < 0.3 or tolerance == 1e-3:  # gradients are bounded by more than mass
        wanted = ()
    return RandomCall(
        dtype,
        arrays,
        causal,
        _random_placement(rng, B, G, T, S),
        scale=[None, -1.0, 0.3, 0.0][rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])],
        dropout=float(rng.choice([0.0, 0.1, 0.5, 0.9], p=[0.7, 0.1, 0.1, 0.1])),
        tolerance=tolerance,
        bounded=bool(rng.random() < 0.3),
        wanted=wanted,
        layout={name: int(rng.integers(4)) for name in "qkv"},
        dout=torch.tensor(round_to(rng.standard_normal((B, H, T, E)), dtype)),
        dlse=torch.tensor(round_to(rng.standard_normal((B, H, T)), wide)),
        seed=int(rng.integers(2**31 - 1)),
    )


def _random_slopes(rng: np.random.Generator, B: int, H: int, wide: str) -> Tensor:
    slopes = np.exp(rng.uniform(-8, 1, (H,) if rng.random() < 0.5 else (B, H)))
    slopes[rng.random(slopes.shape) < 0.15] = 0
    slopes[rng.random(slopes.shape) < 0.15] = np.inf
    return torch.tensor(round_to(slopes, wide))


def _random_placement(
    rng: np.random.Generator, B: int, G: int, T: int, S: int
) -> dict[str, Tensor]:
    placement = {}
    if rng.random() < 0.4:
        shape = (B, 2) if rng.random() < 0.5 else (B, G, 2)
        ranges = np.sort(rng.integers(0, S + 1, shape), -1)
        ranges[rng.random(shape[:-1]) < 0.15] = S // 2  # empty
        placement["key_range"] = torch.tensor(ranges)
    if rng.random() < 0.4:
        placement["query_start"] = torch.tensor(rng.integers(-T - 5, S + 20, B))
    return placement


Results = dict[str, np.ndarray]


def run_torch(
    call: RandomCall, implementation: str, dtype: torch.dtype, *, exact: bool = False
) -> Results:
    """out, lse and the wanted gradients (dq ...) of PyTorch's front end, as float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {}
    for name, array in call.arrays.items():
        leaf = array.to(dtype if name in "qkv" else wide)
        if name in "qkv":
            leaf = _lay_out(leaf, call.layout[name])
        leaves[name] = leaf.detach().requires_grad_(name in call.wanted)
    bound = None
    if call.bounded and leaves["k"].shape[2]:
        bound = leaves["k"].detach().to(wide).norm(dim=-1).amax(-1) * 1.0001
    original = calls.draw_seed
    calls.draw_seed = lambda device: torch.tensor(call.seed, device=device)
    try:
        out, lse = linbias.torch.attention(
            **arguments(leaves),
            causal=call.causal,
            **call.placement,
            scale=call.scale,
            key_bound=bound,
            dropout=call.dropout,
            tolerance=0.0 if exact else call.tolerance,
            implementation=implementation,
            return_lse=True,
        )
    finally:
        calls.draw_seed = original
    results = {"out": out, "lse": lse}
    dlse = call.dlse.to(lse.dtype) * (lse.detach() > -torch.inf)
    pairs = [(out, call.dout.to(out.dtype)), (lse, dlse)]
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


def run_plain(call: RandomCall, dtype: torch.dtype, order: int) -> Results:
    """A plain computation in the type `dtype`, its sums in another order for each number.

    The entries of q and k, and those of v, change places. Of every eight, four take the keys from the last to the first,
    the same attention with left and right exchanged (not with dropout, whose mask knows where a key lies); four take
    the mean of a row's dout . v as dout . out, as every attention does in backward that keeps no weights; and four scale
    the queries instead of the scores.
    """
    draw = torch.Generator().manual_seed(order)
    sizes = {"qk": call.arrays["q"].shape[3], "v": call.arrays["v"].shape[3]}
    orders = {n: torch.randperm(size, generator=draw) for n, size in sizes.items()}
    arrays = {
        n: x[..., orders["qk" if n in "qk" else "v"]] if n in "qkv" else x
        for n, x in call.arrays.items()
    }
    turned = replace(call, arrays=arrays, dout=call.dout[..., orders["v"]])
    flipped = order % 2 == 1 and not call.dropout
    results = _plain(
        _flip(turned) if flipped else turned,
        dtype,
        by_output=order % 4 >= 2,
        scaled_first=order % 8 >= 4,
    )
    if flipped:
        exchanged = {"dleft": "dright", "dright": "dleft"} if "dright" in results else {}
        results = {
            n: x if n == "dleft" else np.flip(x, 2)
            for n, x in results.items()
            if n not in exchanged
        } | {exchanged[n]: results[n] for n in exchanged}
    back = {n: order.argsort().numpy() for n, order in orders.items()}
    for name, of in (("dq", "qk"), ("dk", "qk"), ("out", "v"), ("dv", "v")):
        results[name] = results[name][..., back[of]]
    return {n: x for n, x in results.items() if n in ("out", "lse") or n[1:] in call.wanted}


def _plain(
    call: RandomCall, dtype: torch.dtype, *, by_output: bool, scaled_first: bool
) -> Results:
    """out, lse and all gradients by the formulas of DESIGN section 1, with the whole matrix in memory."""
    arrays = {n: x.to(dtype) for n, x in call.arrays.items()}
    options = {"causal": call.causal, "scale": call.scale, **call.placement}
    inputs, _ = calls.prepare("attention", **arguments(arrays), **options)
    scale = inputs.scale
    if scaled_first:
        inputs = inputs._replace(q=inputs.q * scale, scale=1.0)
    weight, lse = dense.attention_weights(inputs)
    share = torch.ones((), dtype=dtype)
    if call.dropout:
        keep = torch.tensor(call.seed)
        share = dense._drop(torch.ones_like(weight), keep, call.dropout)
    B, H, T, S = weight.shape
    group = H // inputs.k.shape[1]
    k, v = (
        dense.blank_outside(x, inputs.key_range).repeat_interleave(group, 1) for x in inputs[1:3]
    )
    dout, dlse = call.dout.to(dtype), call.dlse.to(dtype) * (lse > -torch.inf)
    dropped = weight * share
    out = dropped @ v
    dweight = dout @ v.mT * share
    mean = (dout * out).sum(-1) if by_output else (dweight * weight).sum(-1)
    dscore = weight * (dweight - (mean - dlse)[..., None])
    start = torch.tensor(S - T) if inputs.query_start is None else inputs.query_start
    distance = start.expand(B)[:, None, None, None] + torch.arange(T)[:, None] - torch.arange(S)
    results = {"out": out, "lse": lse, "dq": dscore @ k * scale}
    for name, x in (("dk", dscore.mT @ inputs.q * inputs.scale), ("dv", dropped.mT @ dout)):
        results[name] = x.unflatten(1, (-1, group)).sum(2)
    sides = [("dleft", inputs.left, distance), ("dright", inputs.right, -distance)]
    for name, slope, reach in sides:
        if slope is None:
            continue
        found = -(dscore * reach.clamp(min=0)).sum((2, 3))
        found = torch.where(slope.isinf(), 0.0, found if slope.dim() == 2 else found.sum(0))
        results[name] = (
            found if name == "dleft" or "right" in call.arrays else results.pop("dleft") + found
        )
    if not call.causal and "right" not in call.arrays:  # symmetric: one slope for both sides
        results["dleft"] = results.pop("dright")
    return {n: x.double().numpy() for n, x in results.items()}


def _flip(call: RandomCall) -> RandomCall:
    """The mirror image: the last key and the last query come first."""
    (B, _, T, _), S = call.arrays["q"].shape, call.arrays["k"].shape[2]
    ranges = call.placement.get("key_range", torch.tensor([0, S]).expand(B, 2))
    last = ranges[..., 1].reshape(B, -1).amax(1)
    start = call.placement.get("query_start", last - T)
    placement = {"query_start": S - T - start, "key_range": S - ranges.flip(-1)}
    arrays = {n: x.flip(2) if n in "qkv" else x for n, x in call.arrays.items()}
    if call.causal or "right" in arrays:
        left = arrays["left"]
        arrays |= {"left": arrays.get("right", torch.full_like(left, torch.inf)), "right": left}
    exchanged = {"left": "right", "right": "left"} if "right" in arrays else {}
    return replace(
        call,
        arrays=arrays,
        causal=False,
        placement=placement,
        wanted=tuple(exchanged.get(n, n) for n in call.wanted),
        dout=call.dout.flip(2),
        dlse=call.dlse.flip(2),
    )


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


def find_truth(call: RandomCall) -> Results:
    """`dense` in float64, or for float64 the hand-written definition in long double."""
    if call.dtype == "float64":
        return _in_long_double(call)
    return run_torch(call, "dense", torch.float64, exact=True)


def find_plains(call: RandomCall, orders: range) -> list[Results]:
    """Plain computations in the wide type, rounded to the dtype."""
    wide = torch.float64 if call.dtype == "float64" else torch.float32
    narrow = ("out", "dq", "dk", "dv")
    return [
        {
            n: round_to(x, call.dtype) if n in narrow else x
            for n, x in run_plain(call, wide, order).items()
        }
        for order in orders
    ]


def _in_long_double(call: RandomCall) -> Results:
    (B, H, T, D), (G, S, E) = call.arrays["q"].shape, call.arrays["v"].shape[1:]
    placement = {n: x.tolist() for n, x in call.placement.items()}
    sizes = {"B": B, "H": H, "G": G, "T": T, "S": S, "D": D, "E": E}
    case = Case("random", **sizes, causal=call.causal, scale=call.scale, dropout=call.dropout)
    case = replace(case, **placement, right="own" if "right" in call.arrays else None)
    arrays = {n: x.numpy() for n, x in call.arrays.items()}
    shared = [n for n in ("left", "right") if n in arrays and arrays[n].ndim == 1]
    arrays |= {n: np.broadcast_to(arrays[n], (B, H)) for n in shared}
    dout, dlse = call.dout.numpy(), call.dlse.numpy().copy()
    inputs = Inputs(**{"right": None, **arrays}, dout=dout, dlse=dlse)
    results, _ = true_attention(inputs, case, np.longdouble, call.seed)
    dlse[np.isneginf(results["lse"])] = 0
    results, gradients = true_attention(inputs, case, np.longdouble, call.seed)
    gradients |= {n: gradients[n].sum(0) for n in shared}
    wanted = {f"d{n}": x for n, x in gradients.items() if n in call.wanted}
    return {**results, **wanted}


def worst_share(call: RandomCall, actual: Results, truth: Results, plains: list[Results]) -> float:
    """The largest error of a call over what the budget allows; the AssertionError of the budget above 1."""
    worst = 0.0
    for name in truth:
        plain = [p[name] for p in plains]
        assert_within_budget(name, actual[name], truth[name], plain, *_rounding(call, name))
        worst = max(worst, share_of_budget(call, name, actual[name], truth[name], plains))
    return worst


def _rounding(call: RandomCall, name: str) -> tuple[str, float]:
    """The dtype of a result, and what the certificate may take from it."""
    wide = "float64" if call.dtype == "float64" else "float32"
    tolerance = TOLERANCE[call.dtype] if call.tolerance is None else call.tolerance
    dtype = call.dtype if name in ("out", "dq", "dk", "dv") else wide
    return dtype, tolerance / (1 - call.dropout)


def share_of_budget(
    call: RandomCall, name: str, actual: np.ndarray, truth: np.ndarray, plains: list[Results]
) -> float:
    """The largest error of one result over what the budget allows; inf where infinities or NaN differ."""
    dtype, tolerance = _rounding(call, name)
    finite = np.isfinite(truth)
    if not np.array_equal(actual[~finite], truth[~finite], equal_nan=True):
        return np.inf
    if not finite.any():
        return 0.0
    size, spread = np.abs(truth[finite]).max(), np.ptp(truth[finite])
    plain = max(np.abs(p[name][finite] - truth[finite]).max() for p in plains)
    allowed = 2 * plain + EPSILON[dtype] * size + 2 * tolerance * (size + spread)
    error = np.abs(actual[finite] - truth[finite]).max()
    return float(error / allowed) if error else 0.0


@dataclass(frozen=True)
class Outcome:
    """How a random call went."""

    ran: str  # implementation, target and dtype
    share: float  # the largest error over what the budget allows
    again: bool  # whether more plain computations were asked
    failure: str | None  # what is over the budget, and the call


# Plain computations that earn a budget at first, and where a call is over it: the largest of four errors is one draw.
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
        if name.startswith("jax"):
            actual = run_jax(call, name.split()[1])
        else:
            actual = run_torch(call, name, getattr(torch, call.dtype))
    finally:
        core.force_target(None)
    truth, again = find_truth(call), False
    try:
        try:
            share = worst_share(call, actual, truth, find_plains(call, FEW_ORDERS))
        except AssertionError:
            again, plains = True, find_plains(call, ALL_ORDERS)
            share = worst_share(call, actual, truth, plains)
    except AssertionError as error:
        share = max(
            share_of_budget(call, name, actual[name], truth[name], plains) for name in truth
        )
        return Outcome(ran, share, again, f"{ran}: {error}; {call.describe()}")
    return Outcome(ran, share, again, None)


ONE_IN_JAX = 200  # every new shape is compiled


def run_jax(call: RandomCall, implementation: str) -> Results:
    """As `run_torch`, of the JAX front end."""
    import jax
    import jax.numpy as jnp

    import linbias.jax
    from linbias.jax import call as jax_call

    wide = "float64" if call.dtype == "float64" else "float32"
    original = jax_call.draw_seed
    jax_call.draw_seed = lambda _: jnp.uint32(call.seed)
    with jax.enable_x64(call.dtype == "float64"):
        try:
            arrays = {
                n: jnp.asarray(
                    (x.transpose(1, 2) if n in "qkv" else x).numpy(),
                    call.dtype if n in "qkv" else wide,
                )
                for n, x in call.arrays.items()
            }
            placement = {n: jnp.asarray(x.numpy(), jnp.int32) for n, x in call.placement.items()}

            def attend(wanted: dict[str, Any]) -> Any:
                return linbias.jax.attention(
                    **(arrays | wanted),
                    causal=call.causal,
                    **placement,
                    scale=call.scale,
                    dropout=call.dropout,
                    dropout_key=jax.random.key(0),
                    tolerance=call.tolerance,
                    implementation=implementation,
                    return_lse=True,
                )

            (out, lse), pull = jax.vjp(attend, {n: arrays[n] for n in call.wanted})
            dout = jnp.asarray(call.dout.transpose(1, 2).numpy(), out.dtype)
            dlse = jnp.where(
                lse > -jnp.inf, jnp.asarray(call.dlse.transpose(1, 2).numpy(), lse.dtype), 0
            )
            gradients = pull((dout, dlse))[0] if call.wanted else {}
        finally:
            jax_call.draw_seed = original
    results = {"out": out, "lse": lse, **{f"d{n}": g for n, g in gradients.items()}}
    results = {n: np.asarray(x).astype(np.float64) for n, x in results.items()}
    return {
        n: x.swapaxes(1, 2) if n in ("out", "lse", "dq", "dk", "dv") else x
        for n, x in results.items()
    }


def runnable() -> list[tuple[str, str | None]]:
    """Implementations of PyTorch's front end, and targets of the compiled core."""
    return [*(("cpu", target) for target in core.targets()), ("blocked", None)]
