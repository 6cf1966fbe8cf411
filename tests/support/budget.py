"""How much may a result differ? A tolerance is earned, never chosen (DESIGN section 7)."""

from collections.abc import Sequence

import numpy as np

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def assert_within_budget(
    what: str,
    actual: np.ndarray,
    truth: np.ndarray,
    plains: Sequence[np.ndarray],
    dtype: str,
    tolerance: float = 0.0,
) -> None:
    """Raise unless actual is as good as a plain computation.

    Allowed at every entry: twice the largest error of the `plains` against `truth`, plus one
    rounding step of `dtype` at the largest value of `truth`, plus `tolerance` (the certificate's
    share) times the spread of `truth`. Values that are not finite must be the same ones.
    """
    share, words = compare(actual, truth, plains, dtype, tolerance)
    if share > 1:
        raise AssertionError(f"{what}: {words}")


def compare(
    actual: np.ndarray,
    truth: np.ndarray,
    plains: Sequence[np.ndarray],
    dtype: str,
    tolerance: float = 0.0,
) -> tuple[float, str]:
    """The largest error over what is allowed, inf where shapes, infinities or NaN differ."""
    for array in (actual, *plains):
        if array.shape != truth.shape:
            return np.inf, f"shape {array.shape}, but the truth has {truth.shape}"
    finite = np.isfinite(truth)
    if not np.array_equal(actual[~finite], truth[~finite], equal_nan=True):
        return np.inf, "infinities or NaN differ from the truth's"
    actual, truth, *plains = (array[finite] for array in (actual, truth, *plains))
    error = np.nan_to_num(np.abs(actual - truth), nan=np.inf, posinf=np.inf)
    if not error.any():
        return 0.0, "no error"
    size = np.abs(truth).max()
    spread = size + np.ptp(truth)
    plain_error = max(np.abs(plain - truth).max() for plain in plains)
    allowed = 2 * plain_error + EPSILON[dtype] * size + 2 * tolerance * spread
    where = int(error.argmax())
    words = (
        f"error {error[where]:.3g} at flat entry {where} is over the budget {allowed:.3g}"
        f" (actual {actual[where]:.9g}, truth {truth[where]:.9g})"
    )
    return float(error[where] / allowed) if allowed > 0 else np.inf, words
