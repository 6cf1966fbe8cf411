"""`bias`: the matrix of linear biases as a JAX array, for functions that take one."""

from typing import Never

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from linbias import _request


def bias(
    slopes: ArrayLike,
    T: int,
    S: int,
    right_slopes: ArrayLike | None = None,
    query_start: ArrayLike | None = None,
    **unknown: Never,
) -> Array:
    """Build the bias that linear-bias attention adds to its scores, for code that has to have it in memory.

        bias[h, t, s] = -slopes[h]       * (p - s)    for s <= p        (p = query_start + t)
        bias[h, t, s] = -right_slopes[h] * (s - p)    for s >  p

    It fits `bias=` of `jax.nn.dot_product_attention` and of `flax.linen.dot_product_attention`; `attention` needs no such
    matrix. Differentiable in the slopes; works under `jit`, where values are not checked.

    Args:
        slopes, T, S, query_start: As for `linbias.bias`.
        right_slopes: Like slopes, or one number for all heads, as for `linbias.bias`.

    Returns:
        [H, T, S] (or [B, H, T, S]) in the dtype of slopes if that is floating, and at least float32.

    Raises:
        ValueError: T or S is negative, slopes has not one or two axes, right_slopes another shape, or a slope is negative or NaN.

    Example:
        >>> bias(jnp.array([0.5]), 2, 3).tolist()
        [[[-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]]
        >>> bias(jnp.array([0.5]), 2, 2, jnp.inf).tolist()
        [[[0.0, -inf], [-0.5, 0.0]]]

    Source: Press, Smith and Lewis, ICLR 2022, section 3.
    """
    if unknown:
        _request.refuse_unknown("bias", unknown, bias)
    left = jnp.asarray(slopes)
    left = left.astype(jnp.promote_types(left.dtype, jnp.float32))
    if left.ndim not in (1, 2):
        raise ValueError(f"bias: slopes must have shape [H] or [B, H], got {list(left.shape)}")
    for name, size in (("T", T), ("S", S)):
        if size < 0:
            raise ValueError(f"bias: {name} must be at least 0, got {size}")
    right = left if right_slopes is None else jnp.asarray(right_slopes, left.dtype)
    for name, slope in (("slopes", left), ("right_slopes", right)):
        if not isinstance(slope, jax.core.Tracer):
            _request.check_slope_values("bias", name, np.asarray(slope))
    if right.shape not in ((), left.shape):
        raise ValueError(
            f"bias: right_slopes must be one number or have the shape of slopes, {list(left.shape)}, got {list(right.shape)}"
        )
    right = jnp.broadcast_to(right, left.shape)
    start = S - T if query_start is None else query_start
    distance = (jnp.arange(T)[:, None] + start) - jnp.arange(S)
    return _one_side(left, distance) + _one_side(right, -distance)


def _one_side(slope: Array, reach: Array) -> Array:
    """-slope * reach where reach is positive, else 0; 0 * inf would be NaN, forward and backward."""
    slope = slope[..., None, None]
    infinite = jnp.isinf(slope)
    lost = jnp.where(infinite, 0, slope) * jnp.maximum(reach, 0)
    return jnp.where(infinite & (reach > 0), -jnp.inf, 0.0 - lost)
