"""What judges others can fail: the budget, the search for dropped mass, random calls."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from attack_calls import find_truth, random_call, run_torch, worst_share
from attack_mass import Attacked, Setting, climb
from budget import EPSILON, assert_within_budget
from cases import round_to
from linbias.kernels import core

SETTING = Setting(
    "float32", T=5, S=300, D=4, causal=True, tolerance=1e-3, num_chains=16, own_starts=True
)
# Blocks of 256 keys, and candidates are heads: batch rows would stop together.
LARGE_BLOCKS = replace(SETTING, S=768, num_chains=8, own_starts=False)
DECODE = replace(SETTING, T=3)
SUBJECTS = [
    (f"cpu {core.target()}", "forward", SETTING, 30),
    (f"cpu {core.target()}", "backward", SETTING, 30),
    (f"cpu {core.target()}", "decode", DECODE, 10),
    (f"cpu {core.target()}", "decode, key_bound", DECODE, 10),
    ("torch blocked", "forward", LARGE_BLOCKS, 6),
    ("torch blocked", "forward", replace(LARGE_BLOCKS, placed=True), 6),
    pytest.param("jax blocked", "forward", LARGE_BLOCKS, 6, marks=pytest.mark.thorough),
    ("near_to_far", "forward", replace(SETTING, dtype="float64", num_chains=4), 20),
    ("near_to_far", "forward", replace(SETTING, dtype="float64", num_chains=4, placed=True), 20),
]


@pytest.mark.parametrize(("implementation", "mode", "setting", "steps"), SUBJECTS)
def test_a_broken_certificate_is_found_at_once_and_a_right_one_holds(
    implementation, mode, setting, steps
):
    subject = Attacked(implementation, mode, setting.dtype, setting.placed).subject
    right = climb(setting, subject, seed=2, steps=steps)
    assert 0.02 < right <= 1
    broken = climb(setting, functools.partial(with_tolerance, 10, subject), seed=2, steps=steps)
    assert broken > 1


def with_tolerance(factor, subject, setting, chains):
    """What a certificate does that is wrong by this factor."""
    return subject(replace(setting, tolerance=setting.tolerance * factor), chains)


@pytest.mark.parametrize("implementation", ("dense", "blocked", "cpu"))
def test_random_calls_are_right_functions_of_the_seed_and_see_an_error(implementation):
    for number in range(12):
        call = random_call([0, number], "float32")
        truth = find_truth(call)
        actual = run_torch(call, implementation)
        assert worst_share(call, actual, truth, range(8))[0] <= 1
        again = run_torch(random_call([0, number], "float32"), implementation)
        assert all(np.array_equal(x, again[name], equal_nan=True) for name, x in actual.items())
        if actual["out"].any():
            wrong = actual | {"out": actual["out"] * 1.1}
            share, words = worst_share(call, wrong, truth, range(8))
            assert share > 1 and words.startswith("out: error")


TRUTH = np.array([1.0, -2.0, 0.5])


def check(actual, plain=TRUTH, dtype="float32", tolerance=0.0):
    assert_within_budget("x", np.asarray(actual), TRUTH, [np.asarray(plain)], dtype, tolerance)


def test_errors_up_to_twice_the_plain_one_or_a_rounding_step_pass():
    check(TRUTH)
    check(TRUTH + 1.9e-3, plain=TRUTH + 1e-3)
    check(TRUTH + 2 * EPSILON["float32"])


@pytest.mark.parametrize(
    ("actual", "plain", "words"),
    [
        (TRUTH + 2.1e-3, TRUTH + 1e-3, r"x: error 0\.0021 .* over the budget 0\.002"),
        (TRUTH + 3 * EPSILON["float32"], TRUTH, "over the budget"),
        ([1.0, np.nan, 0.5], TRUTH, "over the budget"),
        ([1.0, -np.inf, 0.5], TRUTH, "over the budget"),
        ([1.0, -2.0], TRUTH, "shape"),
    ],
)
def test_what_is_over_the_budget_raises(actual, plain, words):
    with pytest.raises(AssertionError, match=words):
        check(actual, plain)


def test_infinities_of_the_truth_must_be_there():
    with pytest.raises(AssertionError, match="infinities"):
        assert_within_budget("x", TRUTH, np.array([1.0, -np.inf, 0.5]), [TRUTH], "float32")


def test_rounding_to_bfloat16_is_to_nearest_even():
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-7, -3.14159])
    expected = np.array([1.0, 1.0, 1.0 + 2**-6, 1.0 + 2**-7, -3.140625])
    np.testing.assert_array_equal(round_to(values, "bfloat16"), expected)
