"""The comparing helper itself: a check that cannot fail checks nothing."""

import numpy as np
import pytest

from budget import EPSILON, assert_within_budget
from cases import round_to

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
