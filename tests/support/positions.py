"""Calls of attention whose keys stand at given positions, and what PyTorch must give."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import linbias.torch
from linbias import near_to_far

INF, NAN = np.inf, np.nan
B, H, G, D, E = 2, 4, 2, 5, 3


@dataclass(frozen=True)
class Placed:
    """A call: its arrays, and the options with which `linbias.attention` takes them."""

    name: str
    T: int
    S: int
    positions: np.ndarray
    slopes: Any = (0.5, 0.1, 2.0, 0.0)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def arrays(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.T * self.S)
        shapes = (B, H, self.T, D), (B, G, self.S, D), (B, G, self.S, E)
        return [*(rng.normal(size=shape) for shape in shapes), np.array(self.slopes)]

    @property
    def given(self) -> dict[str, Any]:
        return {"positions": self.positions, **self.options}


def _rising(seed: int, *shape: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(size=shape), -1)


def _padded(x: np.ndarray, *ranges: tuple[int, int]) -> np.ndarray:
    """NaN, and what falls, outside the range of each batch row."""
    for row, (first, end) in zip(x, ranges, strict=True):
        row[..., :first], row[..., end:] = NAN, -1e300
    return x


def _between(x: np.ndarray, start: int, T: int) -> np.ndarray:
    """Query positions halfway between the keys before and after them, and beyond the outermost."""
    padded = np.concatenate([x[..., :1] - 1, x, x[..., -1:] + 1, x[..., -1:] + 2], -1)
    p = np.arange(T) + start
    return (padded[..., p + 1] + padded[..., p + 2]) / 2


def _far(last: np.ndarray, T: int) -> np.ndarray:
    """Positions of T queries, far beyond `last` [..., 1], the first of them near it."""
    return last + np.array([0.25, *(1000.3 + np.arange(1, T))])


GATES = -np.log(1 / (1 + np.exp(-np.random.default_rng(1).normal(4, 1.5, (B, H, 11)))))
SIDES = {"causal": False, "right_slopes": np.array([0.3, 0.0, INF, 1.0])}
SIDES_OF_ROWS = {"causal": False, "right_slopes": np.outer([1.0, 2.0], [0.3, 0.0, 0.7, 1.0])}
HIDING = {"causal": False, "right_slopes": np.array([INF, 0.5, INF, 0.0])}
STAMPS, PER_HEAD = _rising(2, B, 11), _rising(3, B, H, 11)
JUMP = np.where(np.arange(11) == 6, 1e4, 0.25).cumsum() * np.ones((B, H, 1))
EQUAL = np.floor(STAMPS)
EQUAL[:, 3:6] = EQUAL[:, 3:4]
HEAD_RANGES = np.array([[[0, 11], [2, 7]], [[3, 10], [1, 9]]])
PLACED = (
    Placed("stamps", 11, 11, STAMPS),
    Placed("integers", 11, 11, (STAMPS * 10).astype(np.int64)),
    Placed("gates", 11, 11, GATES.cumsum(-1), np.ones(H)),
    Placed("gates-chunk", 4, 11, GATES.cumsum(-1), np.ones(H)),
    Placed("gate-that-forgets-all", 11, 11, JUMP, np.ones(H)),
    Placed("gates-nearly-open", 11, 11, np.arange(11) * 1e-6 * np.ones((B, H, 1)), np.ones(H)),
    # Not a multiple of 128, which float32 would hold.
    Placed("unix-times", 7, 11, 1_700_000_055 + STAMPS / 1000, [800.0, 1e3, 0.0, INF]),
    Placed("two-ages", 11, 11, np.where(np.arange(11) < 6, 0.0, 1e9) + STAMPS),
    Placed("equal-stamps", 11, 11, EQUAL),
    Placed("equal-stamps-hidden", 11, 11, EQUAL, [INF, INF, 0.5, 0.0], HIDING),
    Placed("symmetric", 11, 11, STAMPS, options={"causal": False}),
    Placed("asymmetric", 6, 11, PER_HEAD, np.ones((B, H)) * [[0.5], [2.0]], SIDES_OF_ROWS),
    Placed("chunk", 4, 11, STAMPS, options={"query_start": np.array([3, 7]), **SIDES}),
    Placed("left-padding", 11, 11, _padded(_rising(4, B, 11), (3, 11), (0, 11)),
           options={"key_range": np.array([[3, 11], [0, 11]]), **SIDES}),
    Placed("right-padding", 11, 11, _padded(_rising(5, B, H, 11), (0, 6), (2, 9)),
           options={"key_range": np.array([[0, 6], [2, 9]]), "query_start": np.array([0, 0]),
                    **SIDES}),
    Placed("range-per-head", 3, 11, PER_HEAD,
           options={"key_range": HEAD_RANGES, "query_start": np.array([5, 8]), **SIDES}),
    Placed("nothing-in-range", 4, 5, np.full((B, 5), NAN),
           options={"key_range": np.array([[0, 0], [5, 5]])}),
    Placed("no-keys", 4, 0, np.zeros((B, 0))),
    Placed("no-queries", 0, 4, np.zeros((B, 4))),
    Placed("queries-between", 6, 11, PER_HEAD,
           options={"query_positions": _between(PER_HEAD, 5, 6), **SIDES}),
    Placed("queries-between-hidden", 6, 11, STAMPS, [INF, INF, 0.5, 0.0],
           {"query_positions": _between(STAMPS, 5, 6), **HIDING}),
    Placed("queries-beyond", 13, 11, STAMPS, options={"query_start": np.array([-1, -1]),
           "query_positions": _between(STAMPS, -1, 13), "causal": False}),
    # So far from all keys that float32 would round their differences away.
    Placed("queries-far-beyond", 4, 11, STAMPS, options={"query_start": np.array([10, 20]),
           "query_positions": _far(STAMPS[:, -1:], 4)}),
    Placed("queries-far-beyond-padding", 4, 11, _padded(_rising(6, B, H, 11), (2, 8), (0, 11)),
           np.ones((B, H)) * [[0.5], [2.0]],
           {"key_range": np.array([[2, 8], [0, 11]]), "query_start": np.array([7, 10]),
           "query_positions": _far(np.full((B, H, 1), 40.0), 4), **SIDES_OF_ROWS}),
    Placed("queries-far-before", 4, 11, PER_HEAD, options={"query_start": np.array([-4, -9]),
           "query_positions": -_far(np.zeros((B, H, 1)), 4)[..., ::-1], **SIDES}),
    Placed("queries-far-beyond-hidden", 4, 11, STAMPS, [INF, INF, 0.5, 0.0],
           {"query_start": np.array([10, 11]),
            "query_positions": _far(STAMPS[:, -1:], 4), **HIDING}),
)  # fmt: skip


def patterns(N: int) -> dict[str, np.ndarray]:
    """Where N keys stand, in ways that a bound may take wrong."""
    rng = np.random.default_rng(5)
    count = np.arange(N)
    gates = -np.log(1 / (1 + np.exp(-rng.normal(3, 2, N))))
    return {
        "even": count * 1.0,
        "bursts": np.cumsum(rng.exponential(size=N) * rng.choice([0.01, 5], N, p=[0.8, 0.2])),
        "plateaus": np.floor(count / 37) * 11.0,
        "one-place": np.where(count < N // 2, 0.0, 8.0),
        "jump": count * 1e-3 + np.where(count > N * 3 // 4, 30.0, 0.0),
        "geometric": -np.geomspace(400.0, 1e-3, N),
        "mirrored": np.geomspace(1e-3, 400.0, N),
        "gates": np.cumsum(gates),
        "forgets": np.cumsum(gates + 40 * (count % 171 == 100) + 1e4 * (count % 171 == 170)),
        "nearly-open": count * 1e-6,
        "unix-times": 1.7e9 + np.cumsum(rng.exponential(size=N)),
    }


def across_blocks(T: int, S: int) -> tuple[Placed, ...]:
    """Calls over so many keys that sides are left, with uneven ends."""
    x = {name: np.tile(x, (B, 1)) for name, x in patterns(S).items()}
    start = {"query_start": np.array([S * 5 // 7, S // 17])}
    cut = {**start, "key_range": np.array([[0, S], [S // 23, S * 8 // 9]])}
    ends = np.array([[[0, S], [2, S * 6 // 7]], [[S * 3 // 7, S], [1, 20]]])
    heads = np.stack([x[name] for name in ("gates", "even", "jump", "unix-times")], 1)
    steep = np.array([[INF, 0.1, 0.5, 2.0], [1.0, INF, 0.0, 3.0]])
    return (
        *(Placed(f"long-{name}", T, S, x[name], (0.5, 0.02, 4.0, INF)) for name in x),
        Placed("long-symmetric", T, S, x["bursts"], options={"causal": False, **start}),
        Placed("long-sides", T, S, x["plateaus"], options={**cut, **SIDES}),
        Placed("long-sides-of-rows", T, S, x["forgets"], steep, {**cut, **SIDES_OF_ROWS}),
        Placed("long-steep-rows", T, S, x["plateaus"], steep),
        Placed("long-hidden", T, S, x["one-place"], [INF, INF, 0.5, 0.0], {**cut, **HIDING}),
        Placed("long-per-head", T, S, heads, options={"key_range": ends, **start, **SIDES}),
        Placed("long-cache", 1, S, x["gates"], np.ones(H)),
        Placed("long-between", T, S, x["bursts"],
               options={"query_positions": _between(x["bursts"], S - T, T), **SIDES}),
        Placed("long-beyond", T, S, x["even"],
               options={"query_positions": _between(x["even"], S - T + 1, T),
                        "query_start": np.array([S - T + 1] * B), **SIDES}),
    )  # fmt: skip


def arguments(
    call: Placed, dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """PyTorch's arguments for a call: arrays that require grad, and options."""
    return as_tensors(call.arrays, call.given, dtype)


LEARNED = ("right_slopes", "positions", "query_positions")  # options that have gradients


def as_tensors(
    arrays: list[np.ndarray], options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [torch.tensor(x, dtype=dtype).requires_grad_() for x in arrays[:3]]
    leaves.append(torch.tensor(arrays[3], dtype=wide).requires_grad_())
    given = {name: x if isinstance(x, bool) else torch.tensor(x) for name, x in options.items()}
    if "right_slopes" in given:
        given["right_slopes"] = given["right_slopes"].to(wide)
    for name in LEARNED:
        if name in given and given[name].is_floating_point():
            given[name].requires_grad_()
    return leaves, given


def check_torch(call: Placed, implementation: str, dtype: torch.dtype, allowed: float) -> None:
    """Results and gradients are the definition's, but for `allowed` of the largest."""
    check_definition(call.arrays, call.given, implementation, allowed, dtype)


def check_definition(
    arrays: list[np.ndarray],
    options: dict[str, Any],
    implementation: str,
    allowed: float,
    dtype: torch.dtype = torch.float64,
) -> None:
    """The same of q, k, v and slopes, and of what NumPy's function takes besides."""
    leaves, given = as_tensors(arrays, options, dtype)
    results = linbias.torch.attention(
        *leaves, **given, implementation=implementation, return_lse=True
    )
    numbers = [x.detach().double().numpy() for x in leaves]
    exact = {n: x.detach().numpy() if torch.is_tensor(x) else x for n, x in given.items()}
    truth = linbias.attention(*numbers, **exact, return_lse=True)
    rng = np.random.default_rng(1)
    dout, dlse = (torch.tensor(rng.normal(size=x.shape)).to(x.dtype) for x in results)
    dlse *= torch.tensor(np.isfinite(truth[1]))
    torch.autograd.backward(results, (dout, dlse))
    found = linbias.attention_backward(
        dout.double().numpy(), *numbers, dlse=dlse.double().numpy(), **exact
    )
    dslopes = found.dslopes
    if not given.get("causal", True) and "right_slopes" not in given:
        dslopes = dslopes + found.dright_slopes
    pairs = {"out": (results[0], truth[0]), "lse": (results[1], truth[1])}
    expected = (*found[:3], dslopes)
    pairs |= {n: (x.grad, y) for n, x, y in zip("qkvm", leaves, expected, strict=True)}
    for name in LEARNED:
        if name in given and given[name].requires_grad:
            pairs[name] = given[name].grad, getattr(found, f"d{name}")
    for name, (ours, true) in pairs.items():
        size = max(1.0, np.abs(true[np.isfinite(true)]).max(initial=0.0))
        np.testing.assert_allclose(
            ours.detach().double().numpy(), true, rtol=0, atol=allowed * size, err_msg=name
        )


def share_missing(
    pattern: str, S: int, sides: int, tolerance: float, implementation: str
) -> float:
    """The largest share of a row's probability that goes unread where all keys are alike and along
    the queries.

    The slope is such that the farthest keys still count, so that blocks, which go as a whole, hold
    little each.
    """
    T, x = 24, patterns(S)[pattern]
    slope = 6 / (x[-1] - x[0])
    q, k = np.full((1, 1, T, 4), 0.5), np.full((1, 1, S, 4), 0.5)
    options = {"query_start": np.array([S - T if sides == 1 else S // 2]), "scale": 1.0}
    options |= {"positions": x[None], "causal": sides == 1}
    tensors = {n: torch.tensor(y) if n != "causal" else y for n, y in options.items()}
    tensors["scale"] = 1.0
    given = (torch.tensor(y, dtype=torch.float32) for y in (q, k, k))
    found = linbias.torch.visited(
        *given, [slope], **tensors, tolerance=tolerance, implementation=implementation
    )
    rows = np.arange(T) // found.tile_rows
    first, end = found.first.numpy()[..., rows], found.end.numpy()[..., rows]
    return near_to_far.share_outside(q, k, first, end, [slope], **options).max()


def backward(call: Placed, dout: np.ndarray, dlse: np.ndarray) -> linbias.definition.Gradients:
    return linbias.attention_backward(dout, *call.arrays, dlse=dlse, **call.given)
