"""Positions as a caller has them: lists, arrays, and the time stamps of NumPy, as numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from linbias._request import as_array, check_position_type

Array = npt.NDArray[Any]
_NEVER = np.iinfo(np.int64).min  # how NumPy writes NaT


def as_numbers(
    function: str, positions: npt.ArrayLike, query_positions: npt.ArrayLike | None
) -> tuple[Array, Array | None]:
    """What is given for keys and queries as arrays of numbers, time stamps in their own unit."""
    x = as_array(function, "positions", positions)
    xq = None
    if query_positions is not None:
        xq = as_array(function, "query_positions", query_positions)
    stamps = [y for y in (x, xq) if y is not None and y.dtype.kind in "mM"]
    if stamps:
        if xq is not None and x.dtype.kind != xq.dtype.kind:
            raise TypeError(
                f"{function}: positions and query_positions must be of one kind,"
                f" got {x.dtype} and {xq.dtype}"
            )
        return _as_ticks(function, x, xq)
    for name, y in (("positions", x), ("query_positions", xq)):
        if y is not None:
            check_position_type(function, name, y.dtype.name)
    return x, xq


def _as_ticks(function: str, x: Array, xq: Array | None) -> tuple[Array, Array | None]:
    """Time stamps in the finer of their units, as float64 since the earliest key of their row; NaN
    for NaT.
    """
    for name, y in (("positions", x), ("query_positions", xq)):
        unit, _ = np.datetime_data(y.dtype) if y is not None else ("s", 1)
        if unit in ("generic", "Y", "M"):
            raise TypeError(
                f"{function}: {name} must count weeks or a shorter unit, which all are equally"
                f" long, got {y.dtype}"  # type: ignore[union-attr]
            )
    finest = np.result_type(x, x if xq is None else xq)
    given = ("positions", x), ("query_positions", xq)
    ticks = [_ticks(function, name, y, finest) for name, y in given]
    keys = ticks[0]
    assert keys is not None, "whoever has positions has those of keys"
    highest = np.iinfo(np.int64).max
    base = keys.min(-1, keepdims=True, where=keys != _NEVER, initial=highest)
    base = np.where(base == highest, 0, base)
    counted: list[Array | None] = []
    for y in ticks:
        if y is None:
            counted.append(None)
            continue
        first = base
        if y.ndim < base.ndim > 2:  # queries of all heads, keys of each
            y = np.expand_dims(y, -2) if y.ndim > 1 else y
        elif y.ndim > base.ndim > 1:
            first = np.expand_dims(base, -2)
        counted.append(np.where(y == _NEVER, np.nan, np.asarray(y - first, np.float64)))
    return counted[0], counted[1]  # type: ignore[return-value]


def _ticks(function: str, name: str, y: Array | None, unit: np.dtype[Any]) -> Array | None:
    """Time stamps counted in a unit at least as fine as theirs."""
    if y is None:
        return None
    fine = y.astype(unit)
    lost = (fine.astype(y.dtype) != y) & ~np.isnat(y)
    if lost.any():
        raise ValueError(
            f"{function}: {name} must lie within what 64 bits count in {unit}, got {y[lost][0]}"
        )
    return fine.view(np.int64)
