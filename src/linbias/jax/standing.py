"""Where keys and queries stand that are given positions, as numbers whose differences lose
nothing.

float32, the widest type of JAX while jax_enable_x64 is off, tells no milliseconds apart at 1.7e9
seconds. So a position is the sum of its parts, the last axis here, and a distance is the sum of
their differences:

    jax_enable_x64            one part, float64
    without it
        NumPy arrays          two parts, float32, of the difference from the largest of the row:
                              right to 2^-23 of a distance and 2^-45 of the largest distance in the
                              row
        integers of JAX       two parts, exact
        float32 of JAX        one part: what it holds, and no more
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linbias._request import LARGEST_POSITION
from linbias._request.seen import beside_all
from linbias.jax.operator import Inputs

ArrayLike = Array | np.ndarray[Any, Any]


def in_parts(
    positions: ArrayLike,
    query_positions: ArrayLike | None,
    ranges: np.ndarray[Any, Any] | None = None,
) -> tuple[Array, Array | None]:
    """[S], [B, S] or [B, H, S] -> [B or 1, 1 or H, S, parts], and alike for T.

    ranges: [B, 1 or H, 2], of the keys, where they are known: positions beyond are not counted
    from.
    """
    given = [
        x if x.ndim == 3 else x[None, None] if x.ndim == 1 else x[:, None]
        for x in (positions, query_positions)
        if x is not None
    ]
    if ranges is not None and isinstance(given[0], np.ndarray) and given[0].shape[-1]:
        given[0] = _within(given[0], ranges)
    given = _from_one(given)
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        parts = [jnp.asarray(x).astype(jnp.float64)[..., None] for x in given]
    else:
        known = [x for x in given if isinstance(x, np.ndarray)]
        same = len(known) == len(given)  # both are to be counted from the same place
        parts = [_split(x) for x in (_from_the_largest(known) if same else given)]
    num_parts = max(x.shape[-1] for x in parts)
    parts = [jnp.pad(x, [(0, 0)] * 3 + [(0, num_parts - x.shape[-1])]) for x in parts]
    return parts[0], parts[1] if len(parts) > 1 else None


def stand_near(inputs: Inputs) -> tuple[Inputs, Array | None]:
    """Say where every query stands, for all heads; of positions outside the ranges of keys nothing
    is used.

    Given queries that see keys on one side alone stand at the nearest of these, and [B, T, H] is
    the bias that all keys lack.
    """
    x, xq = inputs.positions, inputs.query_positions
    if x is None:
        return inputs, None
    (B, T, H, _), (S, G) = inputs.q.shape, inputs.k.shape[1:3]
    start = jnp.full(1, S - T) if inputs.query_start is None else inputs.query_start
    order = (start[:, None] + jnp.arange(T))[:, None]
    limits = jnp.array([[[0, S]]])
    if inputs.key_range is not None:
        limits = jnp.repeat(inputs.key_range, H // max(1, G), axis=1)
    first, end, keys = limits[..., :1], limits[..., 1:], jnp.arange(S)
    if inputs.key_range is not None:
        x = jnp.where(((keys >= first) & (keys < end))[..., None], x, 0)
    x, bias = jnp.broadcast_to(x, (B, H, *x.shape[2:])), None
    nearest = jnp.zeros((B, H, T, x.shape[-1]), x.dtype)
    if S > 0:
        own_key = jnp.clip(jnp.clip(order, first, end - 1), 0, S - 1)
        own_key = jnp.broadcast_to(own_key, (B, H, T))[..., None]
        nearest = jnp.take_along_axis(x, own_key, axis=2, mode="clip")
    if xq is None:
        xq = nearest
    elif S > 0:
        left = inputs.left[..., None]
        right = jnp.full_like(left, jnp.inf) if inputs.right is None else inputs.right[..., None]
        apart = (xq - nearest).sum(-1)
        alone, bias = beside_all(jnp, apart, order, first, end, left, right)
        bias = bias.astype(inputs.left.dtype).swapaxes(1, 2)
        xq = jnp.where(alone[..., None], nearest, xq)
    xq = jnp.broadcast_to(xq, nearest.shape)
    return replace(inputs, positions=x, query_positions=xq), bias


def distance(xq: Array, x: Array) -> Array:
    """[..., rows, parts], [..., keys, parts] -> [..., rows, keys]: how far each key lies back."""
    apart = (xq[..., :, None, i] - x[..., None, :, i] for i in range(x.shape[-1]))
    return functools.reduce(jnp.add, apart)


def _within(x: np.ndarray[Any, Any], ranges: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions with that of the last key of the range in the place of those outside it."""
    keys, (first, end) = np.arange(x.shape[-1]), np.split(ranges, 2, -1)
    heads = max(x.shape[1], ranges.shape[1])
    x = np.broadcast_to(x, (len(ranges), heads, x.shape[-1]))
    last = np.broadcast_to(np.clip(end - 1, 0, x.shape[-1] - 1), (*x.shape[:2], 1))
    return np.where((keys >= first) & (keys < end), x, np.take_along_axis(x, last, -1))


def _from_one(given: list[ArrayLike]) -> list[ArrayLike]:
    """Integers of 64 bits less the largest of their row, which floats so far from 0 lose."""
    x = given[0]
    if x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or not x.shape[-1]:
        return given
    base = x.max(-1, keepdims=True)
    return [
        y.astype(np.int64) - base.astype(np.int64)
        if y.dtype.kind in "iu"
        else y.astype(np.float64) - base.astype(np.float64)
        for y in given
    ]


def _from_the_largest(given: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Positions in float64, counted from the largest of their row; what may not be used is 0."""
    wide = [x.astype(np.float64) for x in given]
    with np.errstate(invalid="ignore"):
        known = [np.abs(x) <= LARGEST_POSITION for x in wide]
    largest = wide[0].max(-1, keepdims=True, where=known[0], initial=-LARGEST_POSITION)
    return [np.where(use, x - largest, 0.0) for x, use in zip(wide, known, strict=True)]


def _split(x: ArrayLike) -> Array:
    """[...] -> [..., parts], float32."""
    if isinstance(x, np.ndarray):
        wide = x.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # of what lies outside the range
            high = wide.astype(np.float32)
            return jnp.stack([high, (wide - high).astype(np.float32)], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x[..., None]
    x = x if x.dtype.itemsize == 4 else x.astype(jnp.int32)
    parts = jnp.stack([x >> 12, x & 0xFFF], axis=-1)
    return parts.astype(jnp.float32) * jnp.array([4096.0, 1.0], jnp.float32)
