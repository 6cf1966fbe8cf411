"""The contract: what every implementation of attention must do, written once.

An implementation's test module wraps it as a `Subject` and gets the suite from `check_case` and
the functions below. A subject takes and returns float64 NumPy arrays whose values fit the dtype
under test.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

import numpy as np
import pytest
import torch

import linbias
from budget import assert_within_budget
from cases import REPEATED, Case, Inputs, attained, make_inputs, round_to
from linbias._request import TOLERANCE
from plain import plain_attention
from truth import true_attention

SEED = 1234567


class Subject(Protocol):
    """One implementation in one framework."""

    def run(
        self,
        inputs: Inputs,
        case: Case,
        dtype: str,
        *,
        tolerance: float | None = None,
        layout: str = "plain",
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return {out, lse} and the gradients {q, k, v, left, right?}; dropout drawn from SEED."""
        ...


@cache
def expected(case: Case, dtype: str):
    """Inputs, the truth, and plain computations in the wide type, rounded to `dtype`."""
    inputs = make_inputs(case, dtype)
    wide = "float64" if dtype == "float64" else "float32"
    truth = true_attention(inputs, case, np.longdouble if dtype == "float64" else np.float64, SEED)
    plains = []
    keys = np.arange(case.S)
    back, halved = keys[::-1].copy(), np.roll(keys, case.S // 2)
    orders = (keys, back, keys, back, halved, halved)  # of a sum of two slopes four say little
    for third, order in zip((0, 2, 3, 4, 0, 2), orders, strict=True):
        turn = third * case.D // 6
        results, gradients = plain_attention(inputs, case, getattr(torch, wide), SEED, turn, order)
        results["out"] = round_to(results["out"], dtype)
        gradients = {n: round_to(g, dtype if n in "qkv" else wide) for n, g in gradients.items()}
        plains.append((results, gradients))
    if case.S == 1:
        # Autograd subtracts a sum over one key from itself and loses nothing; who takes it from
        # `out` adds in another order.
        plains.append(true_attention(inputs, case, np.dtype(wide).type, SEED))
    return inputs, truth, plains


def rows(quick: str | Callable[..., bool], *values: tuple) -> list:
    """Rows of a test, of which `make test` runs those that are `quick`; the others are `thorough`.

    `quick` is their names, which are a row's parts joined by hyphens, or says of a row's parts
    whether it is one.
    """
    named = {"-".join(map(str, value)): value for value in values}
    if isinstance(quick, str):
        names = set(quick.split())
        assert names <= named.keys(), names - named.keys()
    else:
        names = {name for name, value in named.items() if quick(*value)}
    return [
        pytest.param(*value, id=name, marks=() if name in names else pytest.mark.thorough)
        for name, value in named.items()
    ]


def spread(step: int, *values: tuple) -> list:
    """Rows of which `make test` runs every `step`-th, and each value of each part."""
    named = [tuple(map(str, value)) for value in values]
    quick = named[::step]
    for every, some in zip(zip(*named, strict=True), zip(*quick, strict=True), strict=True):
        assert set(every) == set(some), set(every) - set(some)
    return rows(lambda *value: tuple(map(str, value)) in quick, *values)


def long_rows(cases: Sequence[Case]) -> list:
    """Cases as rows of a test, of which those that repeat parts of others are `thorough`."""
    return rows(lambda case: case.name not in REPEATED, *((case,) for case in cases))


def check_case(
    subject: Subject, case: Case, dtype: str, layout: str = "plain", again: bool = True
) -> None:
    """Forward, lse and all gradients are within the budget; a second run is bit-equal."""
    inputs, truth, plains = expected(case, dtype)
    actual = subject.run(inputs, case, dtype, layout=layout)
    wide = "float64" if dtype == "float64" else "float32"
    for kind in (0, 1):
        assert actual[kind].keys() == truth[kind].keys()
        for name in truth[kind]:
            narrow = name in ("out", "q", "k", "v")
            assert_within_budget(
                f"{case.name} {dtype} {'d' * kind}{name}",
                actual[kind][name],
                truth[kind][name],
                [plain[kind][name] for plain in plains],
                dtype if narrow else wide,
                TOLERANCE[dtype],
            )
    if not again:
        return
    second = subject.run(inputs, case, dtype, layout=layout)
    for kind in (0, 1):
        for name in actual[kind]:
            assert np.array_equal(actual[kind][name], second[kind][name], equal_nan=True), name


def check_results(results: dict[str, np.ndarray], case: Case, dtype: str) -> None:
    """Out and lse are within the budget: of calls that are not differentiated."""
    _, truth, plains = expected(case, dtype)
    for name, narrow in (("out", dtype), ("lse", "float64" if dtype == "float64" else "float32")):
        plain = [p[0][name] for p in plains]
        assert_within_budget(name, results[name], truth[0][name], plain, narrow, TOLERANCE[dtype])


def check_hidden_keys_may_hold_anything(subject: Subject, case: Case) -> None:
    """Keys and values outside the key range of a batch row change no bit of any result."""
    inputs = make_inputs(case, "float32")
    clean = subject.run(inputs, case, "float32")
    for b, (first, end) in enumerate(case.key_range or ()):
        for array in (inputs.k, inputs.v):
            array[b, :, :first], array[b, :, end:] = np.nan, np.inf
    for before, after in zip(clean, subject.run(inputs, case, "float32"), strict=True):
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def check_certificate_holds(subject: Subject, case: Case, tolerance: float) -> None:
    """With a large tolerance, no row loses more of its probability than that.

    The values are indicator columns of key ranges, so that the output is itself a probability
    mass.
    """
    inputs, truth = _of_indicators(case)
    results, _ = subject.run(inputs, case, "float64", tolerance=tolerance)
    # A dropped mass of tolerance raises what stays by its share: out moves by no more, lse falls
    # by log1p.
    assert np.abs(results["out"] - truth["out"]).max() <= tolerance
    seen = np.isfinite(truth["lse"])
    loss = -np.expm1(results["lse"][seen] - truth["lse"][seen])
    assert loss.max() <= tolerance + 1e-12
    assert loss.min() >= -1e-12


SHARED = (1e2, 1e4, 1e6)  # what every entry of every key has in common


def check_gradients_where_keys_share_a_part(
    subject: Subject, case: Case, dtype: str, shared: float, tolerance: float
) -> None:
    """Queries and their positions lose what docs/math.md, section 5, allows, which knows of keys
    only how they differ; and something is lost.
    """
    inputs = make_inputs(case, dtype)
    q, k = round_to(inputs.q / shared, dtype), round_to(inputs.k + shared, dtype)
    inputs = replace(inputs, q=q, k=k)
    truth = true_attention(inputs, case, seed=SEED)[1]
    exact, found = (subject.run(inputs, case, dtype, tolerance=t)[1] for t in (0.0, tolerance))
    readers = case.H // case.G
    g = np.einsum("bhte,bhse->bhts", inputs.dout, inputs.v.repeat(readers, 1))
    if case.dropout:  # 0 joins the range of the values
        low, high = np.minimum(g, 0) / (1 - case.dropout), np.maximum(g, 0) / (1 - case.dropout)
    else:
        low, high = g, g
    weighed = high.max(-1) - low.min(-1) + np.abs(inputs.dlse)
    centered = k - k.mean(2, keepdims=True)
    squares = (centered**2).sum(-1)
    products = centered @ centered.swapaxes(2, 3)
    apart = (squares[..., None] + squares[..., None, :] - 2 * products).max((2, 3)) ** 0.5
    scale = case.D**-0.5 if case.scale is None else abs(case.scale)
    allowed = {"q": scale * apart.repeat(readers, 1)[..., None]}
    if case.places:  # with a side hidden all keys pull alike
        right = inputs.left if inputs.right is None else inputs.right
        allowed["query_positions"] = 0.0 if case.causal else (inputs.left + right)[..., None]
    for name, spread in allowed.items():
        rounding, lost = exact[name] - truth[name], found[name] - exact[name]
        if name == "q":
            rounding, lost = (np.linalg.norm(x, axis=-1) for x in (rounding, lost))
        most = 3 * tolerance * weighed * spread + 2 * np.abs(rounding).max()
        assert (np.abs(lost) <= most).all(), (name, np.abs(lost).max(), np.max(most))
    assert np.any(found["q"] != exact["q"]), "nothing was left out"


@cache
def _of_indicators(case: Case) -> tuple[Inputs, dict[str, np.ndarray]]:
    """Inputs whose values are indicator columns of key ranges, and the true out and lse."""
    v = np.zeros((case.B, case.G, case.S, case.E))
    v[..., np.arange(case.S), np.arange(case.S) * case.E // max(1, case.S)] = 1.0
    inputs = replace(make_inputs(case, "float64"), v=v)
    return inputs, true_attention(inputs, case)[0]


@cache
def _attained(pattern: str, T: int, S: int, sides: int, slope: float, places: str | None):
    """Arguments of attention, and lse."""
    arrays, options = attained(pattern, T, S, sides, slope, places)
    return arrays, options, linbias.attention(*arrays, **options, return_lse=True)[1]


def check_where_attained(
    run: Callable[..., np.ndarray],
    pattern: str,
    T: int,
    S: int,
    sides: int,
    least: float,
    tolerances: Sequence[float],
    slope: float = 0.004,
    places: str | None = None,
) -> None:
    """The worst row misses at most the tolerance where the bound is attained, and for some
    tolerance `least` of it.

    run(q, k, v, slopes, tolerance=..., ...) gives lse [1, 1, T]. The arguments that follow it: see
    `cases.attained`.
    """
    arrays, options, lse = _attained(pattern, T, S, sides, slope, places)
    shares = []
    for tolerance in tolerances:
        missing = -np.expm1(run(*arrays, **options, tolerance=tolerance) - lse)
        shares.append((missing.max() - 2e-6) / tolerance)  # lse is float32
    assert least <= max(shares) <= 1, (pattern, T, sides, shares)
