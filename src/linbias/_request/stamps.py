"""Positions as a caller has them: lists, arrays, and the time stamps of NumPy, as numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from linbias._request import check_holds
from linbias._request.checks import as_array

Array = npt.NDArray[Any]


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
            check_holds(function, name, y.dtype.name, "positions")
    return x, xq


def _as_ticks(function: str, x: Array, xq: Array | None) -> tuple[Array, Array | None]:
    """Time stamps as integers that count the finer of their units; the lowest one for NaT."""
    for name, y in (("positions", x), ("query_positions", xq)):
        unit, _ = np.datetime_data(y.dtype) if y is not None else ("s", 1)
        if unit in ("generic", "Y", "M"):
            raise TypeError(
                f"{function}: {name} must count weeks or a shorter unit, which all are equally"
                f" long, got {y.dtype}"  # type: ignore[union-attr]
            )
    finest = np.result_type(x, x if xq is None else xq)
    keys = _ticks(function, "positions", x, finest)
    return keys, None if xq is None else _ticks(function, "query_positions", xq, finest)


def _ticks(function: str, name: str, x: Array, unit: np.dtype[Any]) -> Array:
    """Time stamps counted in a unit at least as fine as theirs."""
    fine = x.astype(unit)
    lost = (fine.astype(x.dtype) != x) & ~np.isnat(x)
    if lost.any():
        raise ValueError(
            f"{function}: {name} must lie within what 64 bits count in {unit}, got {x[lost][0]}"
        )
    return fine.view(np.int64)
