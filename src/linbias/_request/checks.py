"""Rules on the values of arguments, for front ends that can read them cheaply."""

import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from linbias._request import LARGEST_POSITION, LARGEST_START, Problem, Request

A = TypeVar("A")


def real_array(function: str, name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """The values as an array of real numbers, in their own dtype."""
    array = as_array(function, name, values)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{function}: {name} must hold real numbers, got {array.dtype}")
    return array


def as_array(function: str, name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{function}: {name} must be an array, got {values!r}") from error


def as_int64(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Integers as int64, in which no sum with a length wraps around; other numbers as they are.

    Of uint64, what int64 cannot hold becomes its largest number, which the rules refuse likewise.
    """
    if x.dtype == np.uint64:
        x = x.clip(max=np.iinfo(np.int64).max)
    return x.astype(np.int64, copy=False) if x.dtype.kind in "iu" else x


def check_slopes(function: str, request: Request[A], read: Callable[[A], Any]) -> None:
    """Check the values of slopes; `read` answers None where they are not known."""
    for name in ("slopes", "right_slopes"):
        slopes = getattr(request, name)
        values = None if slopes is None else read(slopes)
        if values is not None:
            check_slope_values(function, name, values)


def check_values(
    function: str,
    problem: Problem,
    request: Request[A],
    read: Callable[[A], Any],
    depth: int = 3,
    any_order: bool = False,
) -> bool:
    """Check where keys and queries stand, as far as `read` gives values; depth as in a warning.

    With any_order, of those who can sort, return whether they stand in order, or are not known.
    """
    names = ("query_range", "key_range", "query_start", "positions", "query_positions")
    given = [getattr(request, name) for name in names]
    known = [None if x is None else read(x) for x in given]
    of_queries, ranges, starts = (None if n is None else as_int64(n) for n in known[:3])
    if of_queries is not None:
        check_ranges(function, "query_range", of_queries, problem.S)
    if ranges is not None:
        check_ranges(function, "key_range", ranges, problem.S)
    if starts is not None:
        check_query_start_values(function, starts)
    x, xq = known[3:]
    if x is None or [y is None for y in given[1:]] != [y is None for y in known[1:]]:
        return True
    return check_position_values(function, problem, x, xq, ranges, starts, depth + 1, any_order)


def refuse_ranges_in_any_order(function: str) -> NoReturn:
    raise NotImplementedError(
        f"{function}: window and query_range count keys as they stand, and these positions are in"
        " another order; sort keys and queries by their positions"
    )


def check_slope_values(function: str, name: str, values: np.ndarray, finite: bool = False) -> None:
    """Slopes are at least 0, or inf to hide their side; finite: points have no sides."""
    good = (values >= 0) & ~(finite & np.isinf(values))
    if not good.all():
        rule = "finite and at least 0" if finite else "at least 0 (or inf)"
        raise ValueError(f"{function}: {name} must be {rule}, got {values[~good][0]}")


def check_mask_values(function: str, mask: np.ndarray) -> None:
    """Numbers that are added to scores are below inf; -inf hides."""
    bad = np.isnan(mask) | np.isposinf(mask)
    if bad.any():
        raise ValueError(f"{function}: a mask of numbers must be below inf, got {mask[bad][0]}")


def check_ranges(function: str, name: str, ranges: np.ndarray, S: int) -> None:
    """key_range [B, 2] or [B, G, 2], query_range [T, 2] or [B, T, 2]: they lie within the keys."""
    first, end = ranges[..., 0], ranges[..., 1]
    for where in _first(~((first >= 0) & (first <= end) & (end <= S))):
        axes = ["batch row", "key/value head"][: len(where)]
        if name == "query_range":
            axes = ["batch row", "query"][-len(where) :]
        place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, where, strict=True))
        raise ValueError(
            f"{function}: {name} must be 0 <= first <= end <= S = {S},"
            f" got {ranges[tuple(where)].tolist()} in {place}"
        )


def check_query_start_values(function: str, starts: np.ndarray) -> None:
    """Every start is so small that 32-bit integers can count from it."""
    for b in np.flatnonzero(np.abs(starts.astype(np.float64)) > LARGEST_START)[:1]:
        raise ValueError(
            f"{function}: query_start must be within 2^30 of key 0,"
            f" got {starts[b]} in batch row {b}"
        )


def check_position_values(
    function: str,
    problem: Problem,
    positions: np.ndarray,
    query_positions: np.ndarray | None,
    ranges: np.ndarray | None,
    starts: np.ndarray | None,
    depth: int = 3,
    any_order: bool = False,
) -> bool:
    """Positions do not fall within a range, and a query stands between the keys beside it.

    The shapes are those that `check` allows; None stands for what a call leaves open. With
    any_order, and neither causal nor starts, they may stand otherwise: return whether they do not.
    """
    H, G, T, S = problem.H, problem.G, problem.T, problem.S
    positions = np.atleast_2d(positions)
    query_positions = None if query_positions is None else np.atleast_2d(query_positions)
    sorts = any_order and not problem.causal and starts is None
    # What has no range or position of its own is looked at once: [B or 1, H or 1, ...].
    ranges = np.array([[0, S]]) if ranges is None else ranges
    ranges = ranges[:, None] if ranges.ndim == 2 else ranges.repeat(H // max(1, G), axis=1)
    first, end = ranges[..., :1], ranges[..., 1:]
    x = positions[:, None] if positions.ndim == 2 else positions
    base = a_key(x, end)
    if not _in_order(x) or x.dtype == np.float32:
        inside = (np.arange(S) >= first) & (np.arange(S) < end)
        _refuse_far(function, "positions", positions, base, inside)
        known = np.where(inside, x, base)
        pairs = inside[..., 1:] & inside[..., :-1]
        for b, h, s in _first(pairs & (known[..., 1:] < known[..., :-1])):
            if sorts:
                return False
            way = ", or say causal=False, where any order will do" if any_order else ""
            raise ValueError(
                f"{function}: positions must not fall, got {known[b, h, s + 1]}"
                f" after {known[b, h, s]} at {_index(positions, b, h, s + 1)}; sort keys, values"
                f" and queries by their positions{way}"
            )
        if x.dtype == np.float32:
            _warn_of_alike(function, "positions", known, pairs, depth)
    starts = end[..., 0].max(1, initial=0) - T if starts is None else starts
    own_key = (starts[:, None] + np.arange(T))[:, None]
    if query_positions is None:
        nowhere = ((own_key < 0) | (own_key >= S)) & (first < end)
        for b, h, t in _first(nowhere):
            key = np.broadcast_to(own_key, nowhere.shape)[b, h, t]
            raise ValueError(
                f"{function}: query {t} of batch row {b} would stand at key {key} of {S};"
                " say where with query_start (0: each at its own key) or query_positions"
            )
        return True
    _refuse_far(function, "query_positions", query_positions, base, np.ones((1, 1, T), bool))
    xq = query_positions[:, None] if query_positions.ndim == 2 else query_positions
    if xq.dtype == np.float32:
        _warn_of_alike(function, "query_positions", xq, np.bool_(True), depth)
    if not S:
        return True
    before, after = np.minimum(own_key, end - 1), np.maximum(own_key + 1, first)
    for words, key, there, is_beyond in (
        ("at least that of every key before the query", before, before >= first, np.less),
        ("at most that of every key after the query", after, after < end, np.greater),
    ):
        key = np.clip(key, 0, S - 1)
        stands = np.take_along_axis(x, key, -1)
        beyond = there & is_beyond(xq, stands)
        for b, h, t in _first(beyond):
            if sorts:
                return False
            x_of, k_of, s_of = (
                np.broadcast_to(a, beyond.shape)[b, h, t] for a in (xq, key, stands)
            )
            way = "; causal=False without query_start finds them by itself" if any_order else ""
            raise ValueError(
                f"{function}: query_positions must be {words}, got {x_of}"
                f" at {_index(query_positions, b, h, t)} where key {k_of} stands at {s_of}{way}"
            )
    return True


def less(x: np.ndarray, base: np.ndarray) -> npt.NDArray[np.float64]:
    """Positions less that of `a_key`, float64: exact where both are integers."""
    if x.dtype.kind in "iu" and base.dtype.kind in "iu":
        return (x.astype(np.int64) - base.astype(np.int64)).astype(np.float64)
    return x.astype(np.float64) - base.astype(np.float64)


def a_key(x: np.ndarray, end: np.ndarray) -> np.ndarray:
    """[B, H, 1]: where the last key of each range stands if x [B, H, S] are integers, else 0.

    Differences of integers are exact, and become floats when they are small.
    """
    if x.dtype.kind not in "iu" or not x.shape[-1]:
        return np.zeros((1, 1, 1), x.dtype)
    return np.take_along_axis(x, np.clip(end - 1, 0, x.shape[-1] - 1), -1)


def _warn_of_alike(
    function: str,
    name: str,
    x: npt.NDArray[np.float32],
    used: npt.NDArray[np.bool_] | np.bool_,
    depth: int,
) -> None:
    """Warn where float32 has evidently made one of different stamps: alike beyond 2^24."""
    for b, h, i in _first(used & (x[..., 1:] == x[..., :-1]) & (np.abs(x[..., 1:]) > 2**24)):
        warnings.warn(
            f"{function}: {name} are float32, which rounds to 2 and more beyond 2^24, and"
            f" neighbours are alike, {x[b, h, i]} both; if they were not, give float64 or int64"
            " (to JAX as NumPy arrays), or subtract the first stamp from all before",
            stacklevel=depth + 2,
        )


def _in_order(x: np.ndarray) -> bool:
    """Whether all of [..., n] lie within 2^53 of 0, or integers of each other, and none falls;
    quick, for decode steps.
    """
    lowest, highest = x[..., :1], x[..., -1:]
    if not (x[..., 1:] >= x[..., :-1]).all():
        return False
    if x.dtype.kind in "iu":
        return bool((_apart(highest, lowest) <= LARGEST_POSITION).all())
    return bool((lowest >= -LARGEST_POSITION).all() and (highest <= LARGEST_POSITION).all())


def _apart(x: np.ndarray, y: np.ndarray) -> npt.NDArray[np.uint64]:
    """|x - y| of integers, exact: modulo 2^64 no difference is lost."""
    ours, theirs = x.astype(np.uint64), y.astype(np.uint64)
    return np.where(x >= y, ours - theirs, theirs - ours)


def _first(wrong: np.ndarray) -> npt.NDArray[np.int64]:
    """[1, axes], the index of the first that is wrong; [0, axes] if none is."""
    return np.argwhere(wrong)[:1] if wrong.any() else np.empty((0, wrong.ndim), np.int64)


def _refuse_far(
    function: str, name: str, positions: np.ndarray, base: np.ndarray, used: np.ndarray
) -> None:
    """Raise for numbers [B, n] or [B, H, n], where used, whose differences lose digits."""
    x = positions[:, None] if positions.ndim == 2 else positions
    if x.dtype.kind in "iu" and base.dtype.kind in "iu":
        known, rule = _apart(x, base) <= LARGEST_POSITION, "integers within 2^53 of each other"
    else:
        known = (x <= LARGEST_POSITION) & (x >= -LARGEST_POSITION)
        rule = "numbers within 2^53 of 0 (or integers within 2^53 of each other)"
    for b, h, i in _first(used & ~known):
        where = _index(positions, b, h, i)
        value = positions[tuple(where)]
        if x.dtype.kind == "i" and value == np.iinfo(np.int64).min:
            value = f"NaT, or {value},"  # as NumPy writes it
        raise ValueError(f"{function}: {name} must be {rule}, got {value} at {where}")


def _index(array: np.ndarray, b: int, h: int, i: int) -> list[int]:
    """An index of [B, H, n], as an array has it that may be [B, n], and B be 1."""
    b = min(b, len(array) - 1)
    return [int(n) for n in ((b, i) if array.ndim == 2 else (b, h, i))]
