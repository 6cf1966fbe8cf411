"""Distances and bias matrices, in NumPy: what the kernels never materialise."""

import numpy as np
import numpy.typing as npt


def distances(T: int, S: int) -> npt.NDArray[np.int64]:
    """Signed distance from each query back to each key, the last query standing at the last key.

        distances(2, 4)        distances(3, 2)
        [[2, 1, 0, -1],        [[-1, -2],
         [3, 2, 1,  0]]         [ 0, -1],
                                [ 1,  0]]

    Args:
        T: Number of queries, at least 0.
        S: Number of keys, at least 0.

    Returns:
        [T, S], int64: p - s with p = t + S - T. Positive: the key lies to the left of the query.

    Raises:
        ValueError: T or S is negative.

    Example:
        >>> distances(1, 3).tolist()
        [[2, 1, 0]]
    """
    if T < 0 or S < 0:
        raise ValueError(f"distances: T and S must be at least 0, got T={T}, S={S}")
    position = np.arange(T)[:, None] + (S - T)
    return position - np.arange(S)[None, :]


def bias(
    left: npt.ArrayLike, T: int, S: int, right: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """Build the bias that linear-bias attention adds to its scores.

        bias[h, t, s] = -left[h]  * (p - s)    for s <= p        (p = t + S - T)
        bias[h, t, s] = -right[h] * (s - p)    for s >  p

    An infinite slope hides its side (-inf); the query's own position, at distance 0, is always 0.

    Args:
        left: [H] or [B, H], at least 0 or inf: slope towards keys before the query.
        T: Number of queries.
        S: Number of keys.
        right: Like left: slope towards keys after the query. None means symmetric (right = left);
            `np.inf` (any shape that broadcasts) gives the causal bias.

    Returns:
        [H, T, S] (or [B, H, T, S]), float64.

    Raises:
        ValueError: A slope is negative or NaN, or T or S is negative.

    Example:
        >>> bias([0.5], 1, 3).tolist()
        [[[-1.0, -0.5, 0.0]]]
        >>> bias([0.5], 2, 2, right=[np.inf]).tolist()
        [[[0.0, -inf], [-0.5, 0.0]]]

    Source: Press, Smith and Lewis, ICLR 2022, section 3; two-sided forms: the discussion of encoder attention in
    the paper's repository.
    """
    left = np.asarray(left, dtype=np.float64)
    right = left if right is None else np.asarray(right, dtype=np.float64)
    for name, values in (("left", left), ("right", right)):
        if not (values >= 0).all():
            raise ValueError(f"bias: {name} must be at least 0 (or inf), got {values.tolist()}")
    left, right = np.broadcast_arrays(left, right)
    distance = distances(T, S).astype(np.float64)
    slope = np.where(distance > 0, left[..., None, None], right[..., None, None])
    # inf * 0 would be NaN, and a query always sees its own position. Subtracted from 0 to give 0, not -0.
    return 0.0 - np.where(distance == 0, 0.0, slope) * np.abs(distance)
