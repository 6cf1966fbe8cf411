"""Which keys a query sees: by `window` and `query_range`, and on one side alone."""

import numbers
from collections.abc import Callable
from typing import Any

LARGEST_WINDOW = 3 * 2**29  # no key lies as far from a query; 32-bit integers have the sums
NO_WINDOW = (-1, -1)


def check_window(function: str, window: Any, causal: bool) -> tuple[int, int]:
    """A window is (left, right), keys before and after a query that it sees, -1 for no limit."""
    if window is None:
        return NO_WINDOW
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or any(isinstance(n, bool) or not is_number(n, numbers.Integral) for n in window)
    ):
        raise TypeError(
            f"{function}: window must be (left, right), two integers: how many keys before and"
            f" after its own a query sees, -1 for no limit; got {window!r}"
        )
    left, right = (int(n) if isinstance(n, numbers.Integral) else n for n in window)
    if min(left, right) < -1:
        raise ValueError(f"{function}: window must be at least -1 on each side, got {window}")
    return left, -1 if causal else right


def ranges_of_queries(
    query_range: Any,
    window: tuple[int, int] | None,
    problem: Any,
    start: Any,
    xp: Any,
    count: Callable[[int], Any],
) -> Any:
    """The ranges that window and query_range leave of each query, [B, T, 2]; None: all keys."""
    if not problem.query_range:
        return None
    T, S = problem.T, problem.S
    limits = []
    if query_range is not None:
        limits.append((query_range[..., 0], query_range[..., 1]))
    left, right = (min(n, LARGEST_WINDOW) for n in check_window("", window, problem.causal))
    own_key = count(T) + (S - T if start is None else start[:, None])  # [T] or [B, T]
    if left >= 0:
        limits.append((own_key.clip(0, None) - left, 0 * own_key + S))
    if right >= 0:
        limits.append((0 * own_key, own_key.clip(None, S) + right + 1))
    first, end = limits[0]
    for other_first, other_end in limits[1:]:
        first, end = xp.maximum(first, other_first), xp.minimum(end, other_end)
    first, end = first.clip(0, S), end.clip(0, S)
    ranges = xp.stack((first, xp.maximum(first, end)), -1)
    return xp.broadcast_to(ranges, (problem.B, T, 2))


def beside_all(
    xp: Any, apart: Any, own_key: Any, first: Any, end: Any, left: Any, right: Any
) -> tuple[Any, Any]:
    """Which queries see keys on one side alone, and the bias that they lack once they are moved to
    the nearest of these.

    Softmax does not see what all scores of a row share, but in a narrow type it would cost digits.

    Args:
        xp: The functions of arrays, such as `numpy`.
        apart: How far each query stands beyond its own key, or the nearest to it in the range.
        own_key: The key at which the order has it; the range is first .. end - 1.
        left, right: Slopes; where nothing is seen to the right, inf.
    """
    before = own_key < first
    beyond = ~before & ((own_key >= end - 1) | xp.isinf(right))
    slope = xp.where(before, right, left)
    # Of a side that an infinite slope hides, the query's own key is seen at most.
    lacking = xp.where(xp.isinf(slope) | ~(before | beyond), 0.0, slope)
    return before | beyond, xp.where(before, -apart, apart) * lacking


def is_number(value: object, kind: type) -> bool:
    """Whether a value is of an abstract kind, or a symbol of PyTorch's for one, made of a size."""
    return isinstance(value, kind) or type(value).__name__ in ("SymInt", "SymFloat")
