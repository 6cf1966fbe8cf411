"""What may be left out, where the bound on it is attained: an error of the bound by a factor of
two shows.

Random keys come nowhere near the bound, which has to think of the worst: all unread keys as long
as the longest, and aligned with the query. Here they are. So the mass that is missing, read off
lse, lies just below the tolerance.
"""

import functools
from itertools import product

import numpy as np
import pytest
import torch

import linbias
import linbias.jax
import linbias.torch
from cases import ATTAINED, attained
from contract import check_where_attained, rows
from jax_subject import jax
from linbias import near_to_far
from linbias.jax import call as jax_call
from linbias.jax.impl import blocked as jax_blocked
from linbias.torch.call import prepare
from linbias.torch.impl import blocked

TOLERANCES = (0.2, 0.1, 0.07, 1e-3)
# With steep slopes whole blocks are much: for some of these the last one that is read was hardly
# needed.
MANY = tuple(0.2 * 0.8**i for i in range(20))


# Implementation; whether the result will be differentiated; whether the caller knows a bound on
# the norms.
WAYS = [
    ("blocked", False, False),
    ("cpu", True, False),
    ("cpu", False, False),
    ("cpu", False, True),
]


def lse_of_torch(
    implementation, gradients, bounded, q, k, v, query_start, dtype, positions=None, **options
):
    q, k, v = (torch.tensor(x, dtype=dtype).requires_grad_(gradients) for x in (q, k, v))
    bound = k.detach().norm(dim=-1).amax(-1) * (1 + 1e-6) if bounded else None
    _, lse = linbias.torch.attention(
        q,
        k,
        v,
        **options,
        query_start=torch.tensor(query_start),
        key_bound=bound,
        positions=None if positions is None else torch.tensor(positions),
        implementation=implementation,
        return_lse=True,
    )
    return lse.detach().double().numpy()


@pytest.mark.parametrize("pattern", ATTAINED)
@pytest.mark.parametrize(("implementation", "gradients", "bounded"), WAYS)
def test_the_mass_that_is_missing_lies_just_below_the_tolerance(
    implementation, gradients, bounded, pattern
):
    """One row, which the compiled core may decode from parts of the cache, and tiles."""

    run = functools.partial(lse_of_torch, implementation, gradients, bounded)
    for dtype in (torch.float64, torch.float32):
        # A decoded row has seen little when it decides how far to read: with flat slopes, of few
        # keys and for a large tolerance.
        for T, S in ((1, 2000 if pattern == "flat" else 9000), (70, 6000)):
            least = {"far": -1, "flat": 0.05, "steep": 0.4}.get(pattern, 0.5)
            tiles = implementation == "cpu" and (T > 1 or gradients)
            if pattern == "one-in-64" and not tiles:  # they know more of a block than its radius
                least = -1
            tolerances = MANY if pattern == "steep" else (0.5, *TOLERANCES)
            for sides in (1, 2):
                check_where_attained(
                    functools.partial(run, dtype=dtype), pattern, T, S, sides, least, tolerances
                )


@pytest.mark.parametrize("places", ("even", "alike", "bursts"))
@pytest.mark.parametrize(("implementation", "gradients", "bounded"), WAYS[1:])
def test_the_mass_that_is_missing_at_given_positions_lies_just_below_the_tolerance(
    implementation, gradients, bounded, places
):
    run = functools.partial(lse_of_torch, implementation, gradients, bounded)
    for dtype in (torch.float64, torch.float32):
        for T, S in ((1, 9000), (70, 6000)):
            # A decoded row knows what unread keys weigh together to a factor of 2.
            least = 0.5 if T > 1 or gradients else 0.25
            for sides in (1, 2):
                of_dtype, sizes = functools.partial(run, dtype=dtype), (T, S, sides)
                check_where_attained(of_dtype, "equal", *sizes, least, MANY, places=places)


@pytest.mark.parametrize("pattern", ("equal", "steep", "flat", "far"))
def test_the_mass_that_is_missing_near_to_far_lies_just_below_the_tolerance(pattern):
    def run(*arrays, **options):
        return near_to_far.attention(*arrays, **options, rows=64, keys=64).lse

    tolerances = MANY[:8] if pattern == "steep" else TOLERANCES[:2]
    least = -1 if pattern == "far" else 0.4
    for sides in (1, 2):
        check_where_attained(run, pattern, 70, 3000, sides, least, tolerances)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "tolerance"))
def lse_of_jax(q, k, v, **options):
    return linbias.jax.attention(q, k, v, **options, implementation="blocked", return_lse=True)[1]


@pytest.mark.parametrize(
    ("pattern", "sides"), rows("equal-2 flat-1 far-2", *product(("equal", "flat", "far"), (1, 2)))
)
def test_the_mass_that_is_missing_in_jax_lies_just_below_the_tolerance(pattern, sides):
    def run(q, k, v, slopes, right_slopes=None, **options):
        if right_slopes is not None:
            options["right_slopes"] = np.float32(right_slopes)
        heads_second = (np.float32(x).swapaxes(1, 2) for x in (q, k, v))
        lse = lse_of_jax(*heads_second, slopes=np.float32(slopes), **options)
        return np.asarray(lse, float).swapaxes(1, 2)

    least = -1 if pattern == "far" else 0.3
    check_where_attained(run, pattern, 70, 3000, sides, least, (0.2, 0.05))


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
@pytest.mark.parametrize("T", (1, 70))
def test_without_a_slope_every_key_is_read(implementation, T):
    arrays, options = attained("equal", T, 1000, 1, slope=0.0)
    truth = linbias.attention(*arrays, **options, return_lse=True)[1]
    q, k, v = map(torch.tensor, arrays)
    options |= {"query_start": torch.tensor(options["query_start"]), "return_lse": True}
    lse = linbias.torch.attention(
        q, k, v, **options, tolerance=0.9, implementation=implementation
    )[1]
    np.testing.assert_allclose(lse, truth, rtol=1e-14)


@pytest.mark.thorough
def test_without_a_slope_jax_reads_every_key():
    (q, k, v), _ = attained("equal", 70, 1000, 1)
    heads_second = [np.float32(x).swapaxes(1, 2) for x in (q, k, v)]
    lse = [lse_of_jax(*heads_second, slopes=np.zeros(1), tolerance=t) for t in (0.0, 0.9)]
    np.testing.assert_array_equal(*lse)


def large_scores(seed: int, T: int = 1) -> tuple[np.ndarray, ...]:
    """q [1, 1, T, 256], k, v [1, 1, 4096, ...] with scores of a million, whose rounding in float32
    is no small factor.

    Keys are alike, and such that their mean is exact: nothing but its allowance for rounding
    enlarges the bound.
    """
    rng = np.random.default_rng(seed)
    key = np.round(150 * rng.normal(size=256))
    q = np.float32(150 * rng.normal(size=(1, 1, T, 256)) + key)
    k = np.tile(np.float32(key), (1, 1, 4096, 1))
    return q, k, k[..., :1]


def check_large_scores(lse, tolerances) -> None:
    """lse(tolerance) is its two summands; what is left out is held against what nothing is."""
    row_max, log_sum = lse(0.0)
    for tolerance in tolerances:
        found = lse(tolerance)
        missing = -np.expm1(found[0] - row_max + found[1] - log_sum)
        assert np.max(missing) <= tolerance


@pytest.mark.parametrize("seed", rows("0", *((seed,) for seed in range(3))))
def test_the_bound_of_blocked_allows_for_rounding(seed):
    def lse(tolerance):
        arrays = map(torch.tensor, large_scores(seed))
        inputs, _ = prepare("test", *arrays, [1 / 150], scale=1.0, tolerance=tolerance)
        _, row_max, log_sum, _ = blocked.operators.forward(*inputs)
        return row_max.item(), log_sum.item()

    check_large_scores(lse, 0.02 * 0.9 ** np.arange(17))


@functools.partial(jax.jit, static_argnames="tolerance")
def summands_of_jax(q, k, v, tolerance):
    options = {"causal": True, "right_slopes": None, "scale": 1.0, "tolerance": tolerance}
    inputs, _ = jax_call.prepare("test", q, k, v, np.array([1 / 150]), **options)
    return jax_blocked._forward(inputs)[2][1:3]


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "end"), ((0, 4), (4, 20)))
def test_the_bound_in_jax_allows_for_rounding(first, end):
    for seed in range(first, end):
        arrays = [x.swapaxes(1, 2) for x in large_scores(seed, 2)]
        check_large_scores(lambda t, arrays=arrays: summands_of_jax(*arrays, t), (0.02, 0.012))


@pytest.mark.parametrize(("implementation", "size"), (("blocked", 256), ("cpu", 64)))
def test_the_rounding_of_a_million_weights_costs_nothing_of_the_tolerance(implementation, size):
    """Each block adds a little more than half a rounding step to a sum of float32, which then
    gains a whole one; a key of the opposite score makes the bound of all others exact.
    """
    S, slope, tolerance = 1_048_409, 2.0**-40, 2.0**-8 / size
    k = np.zeros(S, np.float32)
    k[-1] = np.log(2.0**23 * size / (0.5 + 2.0**-6))
    k[-2] = -k[-1]
    weights = np.exp(k.astype(np.float64) - slope * np.arange(S)[::-1])
    keys = torch.tensor(k)[None, None, :, None]
    found = linbias.torch.visited(
        torch.ones(1, 1, 1, 1),
        keys,
        torch.zeros_like(keys),
        [slope],
        scale=1.0,
        tolerance=tolerance,
        implementation=implementation,
    )
    unread = weights[: int(found.first)].sum() / weights.sum()
    assert 0.5 * tolerance < unread <= tolerance
