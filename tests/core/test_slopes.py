"""The slope schedules against the authors' rule and against published lists."""

import math

import numpy as np
import pytest

import linbias


def authors_rule(n: int) -> list[float]:
    """The recursion of the paper's repository, in our words."""
    if (n & (n - 1)) == 0:
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first ** (i + 1) for i in range(n)]
    below = 2 ** math.floor(math.log2(n))
    return authors_rule(below) + authors_rule(2 * below)[::2][: n - below]


@pytest.mark.parametrize("n_heads", range(1, 257))
def test_paper_schedule_is_the_authors_rule(n_heads):
    np.testing.assert_allclose(linbias.slopes(n_heads), authors_rule(n_heads), rtol=1e-13)


def test_published_lists():
    assert linbias.slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    # The list that the annotated PyTorch implementation prints for 12 heads: eight, then the odd
    # ones of 16.
    twelve = [2.0**-i for i in range(1, 9)] + [2.0**-x for x in (0.5, 1.5, 2.5, 3.5)]
    np.testing.assert_allclose(linbias.slopes(12), twelve, rtol=1e-15)
    # The Flax exercise: two heads, and eight rounded to four digits.
    assert linbias.slopes(2, "geometric").tolist() == [0.0625, 0.00390625]
    assert linbias.slopes(8, "geometric").tolist() == linbias.slopes(8).tolist()
    # The book chapter: halves.
    assert linbias.slopes(2, "halving").tolist() == [0.5, 0.25]
    assert linbias.slopes(9, "halving")[8] == 2.0**-9


@pytest.mark.parametrize("n_heads", (3, 6, 12, 40))
def test_one_power_for_every_head_count_is_another_schedule(n_heads):
    """What attention-gym computes is `geometric`, and it differs from the authors' slopes."""
    assert np.abs(linbias.slopes(n_heads, "geometric") - linbias.slopes(n_heads)).max() > 0.2


@pytest.mark.parametrize("n_heads", range(1, 65))
def test_mpt_holds_the_paper_slopes_in_another_order(n_heads):
    mpt = linbias.slopes(n_heads, "mpt")
    np.testing.assert_allclose(np.sort(mpt), np.sort(linbias.slopes(n_heads)), rtol=1e-13)


def test_mpt_order_is_that_of_llm_foundry():
    np.testing.assert_allclose(
        linbias.slopes(6, "mpt"), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    )


@pytest.mark.parametrize("schedule", ("paper", "geometric", "mpt"))
def test_max_bias_is_the_exponent_of_the_flattest_slope(schedule):
    assert linbias.slopes(8, schedule, max_bias=16.0).min() == 2.0**-16


def test_slopes_are_float64_and_positive():
    for schedule in ("paper", "geometric", "halving", "mpt"):
        slopes = linbias.slopes(24, schedule)
        assert slopes.dtype == np.float64 and slopes.shape == (24,) and (slopes > 0).all()
