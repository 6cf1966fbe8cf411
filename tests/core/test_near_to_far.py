"""The readable near-to-far attention: it is the definition, but for what it says."""

import math
from itertools import product

import numpy as np
import pytest

import linbias
from cases import CASES, RANGED_CASES, REPEATED, Case, far_block, make_inputs
from contract import long_rows, rows
from linbias import near_to_far

PLAIN = [case for case in CASES + RANGED_CASES if not case.dropout and not case.places]
UNEVEN = ("range-per-head-symmetric", "long-past-the-keys")


def arguments(case: Case) -> tuple[list, dict]:
    inputs = make_inputs(case)
    options = {"causal": case.causal, "right_slopes": inputs.right, "scale": case.scale}
    return [inputs.q, inputs.k, inputs.v, inputs.left], {**options, **case.placement}


def intervals(visit: near_to_far.Visit, T: int) -> tuple[np.ndarray, np.ndarray]:
    """The interval that each row read: [B, H, T] each."""
    first, end = np.zeros((2, len(visit.tiles), len(visit.tiles[0]), T), int)
    for b, h in np.ndindex(first.shape[:2]):
        for tile in visit.tiles[b][h]:
            first[b, h, tile.first_row :], end[b, h, tile.first_row :] = tile.first, tile.end
    return first, end


@pytest.mark.parametrize("case", long_rows(PLAIN))
def test_it_equals_the_definition(case):
    arrays, options = arguments(case)
    out, lse = linbias.attention(*arrays, **options, return_lse=True)
    for sizes in ((64, 64), (1, 200), (7, 30)) if case.name in UNEVEN else ((64, 64),):
        tiles = dict(zip(("rows", "keys"), sizes, strict=True))
        visit = near_to_far.attention(*arrays, **options, tolerance=2.0**-53, **tiles)
        np.testing.assert_allclose(visit.out, out, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(visit.lse, lse, rtol=1e-11, atol=1e-11)


LONG = [case for case in PLAIN if case.T * case.S > 10_000]


@pytest.mark.parametrize(
    ("case", "tolerance"),
    rows(  # the two tolerances in turn
        lambda case, tolerance: (
            case.name not in REPEATED - {"far-key-aligned"}
            and (tolerance == 0.3) == (LONG.index(case) % 2 == 0)
        ),
        *product(LONG, (0.3, 1e-4)),
    ),
)
def test_what_is_not_read_holds_at_most_the_tolerance(case, tolerance):
    arrays, options = arguments(case)
    visit = near_to_far.attention(*arrays, **options, tolerance=tolerance, rows=64, keys=32)
    left_out = near_to_far.share_outside(
        arrays[0], arrays[1], *intervals(visit, case.T), arrays[3], **options
    )
    assert left_out.max(initial=0.0) <= tolerance


def test_steps_say_why_a_tile_stopped_and_a_flat_head_reads_everything():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 512, 16))
    steep, flat = near_to_far.attention(q, k, v, [0.5, 0.0], tolerance=1e-6).tiles[0]
    assert (flat[-1].first, flat[-1].end) == (0, 512)
    assert near_to_far.attention(q, k, v, [9.0, 9.0], tolerance=0).tiles[0][0][-1].first == 0
    *read, last = steep[-1].steps
    assert all(step.terms and step.bound > math.log(1e-6) for step in read)
    assert not last.terms and last.bound <= math.log(1e-6)
    assert [step.end for step in (*read, last)] == list(range(496, 495 - 16 * len(read), -16))


# How many bfloat16 terms suffice. For each number of them, what is computed so may cost lse eight
# roundings of a score, 8 u |a||q||k|, and a little more where weights move: (e^x - 1) / x, for the
# largest x that a score may be off by, 1/4.

U, ROOM = 2.0**-24, math.expm1(0.25) / 0.25


def bfloat16_terms(x: np.ndarray, terms: int) -> list[np.ndarray]:
    """The first terms of numbers: each is what is left, rounded to the nearest bfloat16."""
    parts, rest = [], np.float32(x)
    for _ in range(terms):
        bits = rest.view(np.uint32)
        nearest = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
        parts.append(nearest.astype(np.uint32).view(np.float32))
        rest = rest - parts[-1]
    return parts


def product(x: np.ndarray, y: np.ndarray, terms: int) -> np.ndarray:
    """x @ y in float32, of the products of terms i and j with i + j < terms."""
    left, right = bfloat16_terms(x, terms), bfloat16_terms(y, terms)
    return sum(left[i] @ right[j] for i in range(terms) for j in range(terms - i))


def in_terms(q, k, v, bias, terms) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of rows whose key s is computed in terms[s] terms: 3 are float64, 0 none."""
    scores = q @ k.T
    coarse = [(t, terms == t) for t in (1, 2)]
    for t, here in coarse:
        scores[:, here] = product(q, k[here].T, t)
    scores = np.where(terms > 0, scores + bias, -np.inf)
    row_max = scores.max(1, keepdims=True)
    weights = np.exp(scores - row_max)
    out = weights[:, terms == 3] @ v[terms == 3]
    for t, here in coarse:
        out += product(weights[:, here], v[here], t)
    row_sum = weights.sum(1, keepdims=True)
    return out / row_sum, (row_max + np.log(row_sum))[:, 0]


def costs_of_terms(q, k, v, left, right, start, kinds, size=16):
    """What computing blocks in as many terms as `Step` says costs, as shares of what it may, where
    these are among `kinds`: the largest of lse and of out; and all numbers of terms that are said.
    """
    q, k, v = (np.float32(x).astype(np.float64) for x in (q, k, v))
    said, costs = set(), [(0.0, 0.0)]
    options = {"right_slopes": [right], "causal": False, "query_start": start}
    visit = near_to_far.attention(
        q[None], k[None], v[None], [left], rows=size, keys=size, scale=1.0, **options
    )
    out, lse = linbias.attention(
        q[None], k[None], v[None], [left], **options, scale=1.0, return_lse=True
    )
    bias = linbias.bias([left], len(q), len(k), right_slopes=[right], query_start=start)[0]
    spread, most = np.ptp(v, axis=0).max(), np.abs(v).max()
    for tile in visit.tiles[0][0]:
        here = slice(tile.first_row, tile.first_row + size)
        terms = np.full(len(k), 3)
        terms[: tile.first], terms[tile.end :] = 0, 0
        for step in tile.steps:
            block = slice(step.first, step.end)
            terms[block] = step.terms if step.terms in kinds else min(3, 3 * step.terms)
            said.add(step.terms)
            if step.terms in (1, 2):  # and then a score is not off by more than 1/4
                largest = _longest(q[here]) * _longest(k[block])
                assert largest <= {1: 2**5, 2: 2**12}[step.terms]
        used = set(terms) & {1, 2}
        largest = max((_longest(k[terms == t]) for t in used), default=0.0) * _longest(q[here])
        score = len(used) * 8 * U * largest * ROOM
        found_out, found_lse = in_terms(q[here], k, v, bias[here], terms)
        of_lse = np.abs(found_lse - lse[0, here]).max() / (score + U)
        may = (score + U) * spread + len(used) * 8 * U * most
        costs.append((of_lse, np.abs(found_out - out[0, here]).max() / may))
    return *np.max(costs, axis=0), said


def _longest(x: np.ndarray) -> float:
    return np.linalg.norm(x, axis=-1).max()


@pytest.mark.parametrize("slopes", ((0.5, math.inf), (0.03, 0.1), (0.0, 0.1)))
@pytest.mark.parametrize("D", (3, 64))
def test_blocks_in_as_few_terms_as_steps_say_cost_no_more_than_rounding(slopes, D):
    rng = np.random.default_rng(D)
    q, k, v = (rng.normal(size=(n, D)) for n in (40, 1000, 1000))
    shared, seen = 3 * rng.normal(size=D), set()
    long_ones = np.exp(rng.uniform(-3, 3, (1000, 1)))
    for keys, size in ((k, 1.0), (k + shared, 1.0), (k * long_ones, 0.3), (k, 30.0), (k, 1e4)):
        of_lse, of_out, said = costs_of_terms(
            size * D**-0.5 * q, size * keys, v, *slopes, 480, {1, 2}
        )
        assert max(of_lse, of_out) <= 1
        seen |= said
    assert seen == {0, 1, 2, 3}
    of_lse, of_out, said = costs_of_terms(1e4 * q, 1e4 * k, v, *slopes, 480, {1, 2})
    assert said <= {0, 3}  # no score of a hundred million is computed coarsely


@pytest.mark.parametrize(
    ("terms", "entry", "share"),
    [(1, 1 + 2**-8, 0.75), (1, 1 + 2**-8 + 2**-23, 0.9), (2, 1 + 2**-8 - 2**-17 - 2**-23, 0.39)],
)
@pytest.mark.parametrize(("start", "right"), ((2999, math.inf), (1500, 0.01)))
def test_where_bfloat16_is_at_its_worst_blocks_cost_as_much_as_they_may(
    terms, entry, share, start, right
):
    """All entries are rounded the same way, as far as they can be; all keys are alike, and values
    tell those that are computed coarsely from the others.
    """
    size = {1: 1.0, 2: 8.0}[terms]  # scores as large as the rule allows
    q, k = np.full((1, 15), 2 * size * entry), np.full((3000, 15), size * entry)
    near = -100 * math.log(25 * U * 2 ** (7 * terms))
    v = (np.abs(np.arange(3000) - start) > near)[:, None]
    of_lse, of_out, said = costs_of_terms(q, k, v, 0.01, right, start, {terms}, size=1)
    assert terms in said and share < min(of_lse, of_out) and max(of_lse, of_out) <= 1


def test_all_terms_are_needed_where_the_tolerance_is_below_rounding_or_a_value_is_not_finite():
    def said(**options):
        tiles = near_to_far.attention(q, k, v, [0.1], rows=16, keys=16, **options).tiles
        return [step.terms for step in tiles[0][0][-1].steps]

    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 512, 16))
    assert set(said()) == {0, 1, 2, 3}
    assert set(said(tolerance=0)) == {3} and set(said(tolerance=2.0**-25)) == {0, 3}
    v[0, 0] = np.nan
    assert set(said()) == {3}


@pytest.mark.parametrize("size", (1e-165, 1e165))
def test_keys_count_although_squares_of_entries_vanish_or_overflow(size):
    arrays, slope, scale = far_block(size, 1 / size)
    visit = near_to_far.attention(*arrays, [slope], scale=scale)
    np.testing.assert_allclose(
        visit.out, linbias.attention(*arrays, [slope], scale=scale), atol=1e-12
    )
    # The bound is a number: it tells what may be left out.
    bounds = [step.bound for step in visit.tiles[0][0][-1].steps]
    assert np.isfinite(bounds).all()
    steep = near_to_far.attention(*arrays, [1.0], scale=scale).tiles[0][0][-1]
    assert steep.end - steep.first < 500


def test_a_key_that_is_not_finite_is_always_read():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 300, 4))
    v[0, 16] = np.nan
    out = near_to_far.attention(q, k, v, [0.5], rows=16, keys=16).out
    assert np.isfinite(out[0, :16]).all() and np.isnan(out[0, 16:]).all()


@pytest.mark.parametrize("slope", (4.0, 0.5, 0.02))
@pytest.mark.parametrize("tolerance", (1e-2, 2.0**-24))
def test_no_key_beyond_the_reach_matters_whatever_its_value(slope, tolerance):
    """The worst case: far keys along the query, near ones against it, of the largest norm."""
    D, S = 4, 4000
    q = np.full((1, 1, D), 1.5)
    for num_far in (1, S // 2, S - 1):
        k = np.full((1, S, D), -0.8)
        k[:, :num_far] = 0.8
        lead = 2 * 0.5 * np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
        distance = near_to_far.reach(slope, lead, tolerance=tolerance, num_keys=S)
        first = max(0, S - 1 - math.floor(distance))
        outside = near_to_far.share_outside(q, k, first, S, [slope], scale=0.5)
        assert outside.max() <= tolerance


@pytest.mark.parametrize("lead", (0.0, 3.0, 40.0))
def test_the_reach_is_no_further_than_far_keys_that_all_lead_ask_for(lead):
    """In NumPy, and in the arrays of the two front ends."""
    slope = np.array([0.5, 2**-4, 2**-8])
    distance = near_to_far.reach(slope, lead, tolerance=1e-6)
    share = np.exp(lead - slope * distance) / -np.expm1(-slope)
    assert (share[distance > 0] > 1e-6 * (1 - 1e-9)).all() and (share <= 1e-6 * (1 + 1e-9)).all()
    assert (near_to_far.reach(slope, lead, tolerance=1e-6, num_keys=9) <= distance).all()
    for name in ("torch", "jax.numpy"):
        xp = pytest.importorskip(name)
        found = near_to_far.reach(xp.asarray(slope), xp.asarray(lead), tolerance=1e-6, xp=xp)
        np.testing.assert_allclose(found, distance, rtol=1e-5)


def test_the_reach_of_heads_that_see_everything_or_nothing():
    found = near_to_far.reach([0.0, math.inf, 0.5, 0.5], [1, 1, math.inf, -99], tolerance=0.1)
    assert found.tolist() == [math.inf, 0, math.inf, 0]
    assert near_to_far.reach(0.5, 1.0, tolerance=0.0) == math.inf
    assert np.isnan(near_to_far.reach(0.5, math.nan, tolerance=0.1))


def test_bad_input():
    ones = np.ones((1, 2, 3))
    for options in ({"tolerance": 1.0}, {"tolerance": math.nan}, {"rows": 0}, {"keys": 0}):
        with pytest.raises(ValueError, match="near_to_far: tolerance must be in"):
            near_to_far.attention(ones, ones, ones, **options)
    for tolerance in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"reach: tolerance must be in \[0, 1\)"):
            near_to_far.reach(0.5, 1.0, tolerance=tolerance)
    with pytest.raises(ValueError, match="reach: slope must be at least 0"):
        near_to_far.reach(-0.5, 1.0, tolerance=0.1)
    with pytest.raises(ValueError, match=r"near_to_far: slopes must have shape \[H\]"):
        near_to_far.attention(ones, ones, ones, [1.0, 2.0])
