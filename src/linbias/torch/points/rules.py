"""The rules of points: shapes, and as far as they are known, values."""

import numpy as np

from linbias._request import Described, Rule, axes, check_array, check_holds

# How distances of points are measured, and how far from 0 a coordinate may lie.
METRICS = ("euclidean", "manhattan")
LARGEST_COORDINATE = 2.0**100


POINTS = Rule(axes("N A", "B N A"), "reals", one_row=True)
QUERY_POINTS = Rule(axes("T A", "B T A"), "reals", one_row=True)
NUM_POINTS = Rule(axes("B"), "integers")


def check_points(
    function: str, sizes: dict[str, int], points: Described, metric: object, global_tokens: object
) -> int:
    """points is [N, A] or [B, N, A], A = 1, 2 or 3; return how many tokens stand nowhere."""
    N, A = sizes["N"], points.shape[-1] if len(points.shape) in (2, 3) else "A"
    check_array(function, "points", points, POINTS, {**sizes, "A": A})
    if A not in (1, 2, 3):
        raise ValueError(
            f"{function}: points must have A = 1, 2 or 3 coordinates, got {A} (points {points})"
        )
    if metric not in METRICS:
        raise ValueError(f"{function}: metric must be one of {METRICS}, got {metric!r}")
    if isinstance(global_tokens, bool) or not isinstance(global_tokens, (int, np.integer)):
        raise TypeError(f"{function}: global_tokens must be an integer, got {global_tokens!r}")
    if not 0 <= global_tokens <= N:
        raise ValueError(
            f"{function}: global_tokens must be from 0 to N = {N}, got {global_tokens}"
        )
    return int(global_tokens)


def check_num_points(function: str, B: int, num_points: Described) -> None:
    """num_points is [B], integers."""
    of_mask = "; of a mask of padding that is (~mask).sum(1)" * (num_points.dtype == "bool")
    check_holds(function, "num_points", num_points.dtype, "integers", of_mask)
    check_array(function, "num_points", num_points, NUM_POINTS, {"B": B})


def check_num_points_values(function: str, num_points: np.ndarray, N: int) -> None:
    for b in np.flatnonzero((num_points < 0) | (num_points > N))[:1]:
        raise ValueError(
            f"{function}: num_points must be from 0 to N = {N}, got {num_points[b]}"
            f" in batch row {b}"
        )


def check_point_values(
    function: str,
    points: np.ndarray,
    first_token: int = 0,
    num_points: np.ndarray | None = None,
    name: str = "points",
) -> None:
    """Coordinates [..., N, A], from first_token on, are finite and so small that distances are."""
    if points.dtype.kind in "iu":
        # Compared as they are, unsigned ones above 2^63 too.
        bad, rule = (points > 2**53) | (points < -(2**53)), "integers within 2^53"
    else:
        with np.errstate(invalid="ignore"):
            bad, rule = ~(np.abs(points) <= LARGEST_COORDINATE), "finite, within 2^100"
    if num_points is not None:  # nobody reads what padding holds
        tokens = first_token + np.arange(points.shape[-2])
        own = points.ndim == 3 and len(points) > 1
        counts = num_points if own else num_points.max(initial=0)
        bad = bad & (tokens < np.expand_dims(counts, -1))[..., None]
    if bad.any():
        *row, token, axis = np.argwhere(bad)[0].tolist()
        of_row = f" of batch row {row[0]}" if row else ""
        value = points[(*row, token, axis)]
        raise ValueError(
            f"{function}: {name} must be {rule}, got {value} in token {token + first_token}"
            f"{of_row}, axis {axis}"
        )
