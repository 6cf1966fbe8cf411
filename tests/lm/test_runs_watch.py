"""The stop watch that tells how long a step of training takes."""

import pytest

from linbias.lm.watch import StopWatch


@pytest.mark.parametrize(
    ("times", "after", "expected"),
    [
        ([], 1, None),
        ([10.0], 1, None),
        ([10.0, 11.0], 1, 1.0),
        ([10.0, 11.0, 14.0, 15.0], 1, 1.0),  # a validation of three seconds does not show
        ([10.0, 15.0, 16.0, 17.0], 2, 1.0),
    ],
)
def test_step_seconds_is_the_median_without_the_first(
    times: list[float], after: int, expected: float | None
) -> None:
    watch = StopWatch()
    watch.times = times
    assert watch.step_seconds(after) == expected
