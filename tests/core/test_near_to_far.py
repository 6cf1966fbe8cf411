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
    assert all(step.read and step.bound > math.log(1e-6) for step in read)
    assert not last.read and last.bound <= math.log(1e-6)
    assert [step.end for step in (*read, last)] == list(range(496, 495 - 16 * len(read), -16))


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
def test_no_key_outside_the_window_matters_whatever_its_value(slope, tolerance):
    """The worst case: far keys along the query, near ones against it, of the largest norm."""
    D, S = 4, 4000
    q = np.full((1, 1, D), 1.5)
    for num_far in (1, S // 2, S - 1):
        k = np.full((1, S, D), -0.8)
        k[:, :num_far] = 0.8
        norms = np.linalg.norm(q, axis=-1).max(), np.linalg.norm(k, axis=-1).max()
        distance = near_to_far.window(slope, *norms, scale=0.5, tolerance=tolerance, num_keys=S)
        first = max(0, S - 1 - math.floor(distance))
        outside = near_to_far.share_outside(q, k, first, S, [slope], scale=0.5)
        assert outside.max() <= tolerance


def test_the_window_is_not_much_wider_than_the_worst_case_asks_for():
    """A row is sure of its own key only; the other near keys shorten what it needs here."""
    distance = float(near_to_far.window(0.1, 3.0, 1.6, scale=0.5, tolerance=1e-6))
    q, k = np.full((1, 1, 4), 1.5), np.full((1, 1000, 4), -0.8)
    first = 1000 - math.ceil(distance) + 30
    assert distance == near_to_far.window(0.1, 3.0, 1.6, scale=-0.5, tolerance=1e-6)
    k[:, :first] = 0.8
    assert near_to_far.share_outside(q, k, first, 1000, [0.1], scale=0.5).max() > 1e-6


def test_bad_input():
    ones = np.ones((1, 2, 3))
    for options in ({"tolerance": 1.0}, {"tolerance": math.nan}, {"rows": 0}, {"keys": 0}):
        with pytest.raises(ValueError, match="near_to_far: tolerance must be in"):
            near_to_far.attention(ones, ones, ones, **options)
    for tolerance in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"window: tolerance must be in \(0, 1\)"):
            near_to_far.window(0.5, 1.0, 1.0, scale=1.0, tolerance=tolerance)
    with pytest.raises(ValueError, match="window: slope must be at least 0"):
        near_to_far.window(-0.5, 1.0, 1.0, scale=1.0, tolerance=0.1)
    with pytest.raises(ValueError, match=r"near_to_far: slopes must have shape \[H\]"):
        near_to_far.attention(ones, ones, ones, [1.0, 2.0])
