"""Where keys and queries stand that are given positions, as numbers whose differences lose nothing.

Positions may be large where their differences are small: 1.7e9 seconds, and a millisecond from one to the next. float32, the
widest type that JAX has while jax_enable_x64 is off, tells no such neighbours apart. So a position is the sum of its parts, the last
axis here, and a distance is the sum of their differences:

    jax_enable_x64            one part, float64
    without it
        NumPy arrays          two parts, float32, of the float64 difference from the largest position of the row: distances are
                              right to 2^-23 of themselves and 2^-45 of the largest distance in the row
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
from linbias.jax.operator import Inputs

ArrayLike = Array | np.ndarray[Any, Any]


def in_parts(
    positions: ArrayLike, query_positions: ArrayLike | None
) -> tuple[Array, Array | None]:
    """[S], [B, S] or [B, H, S], and alike for T -> [B or 1, 1 or H, S, parts], and [B or 1, 1 or H, T, parts]."""
    given = [
        x if x.ndim == 3 else x[None, None] if x.ndim == 1 else x[:, None]
        for x in (positions, query_positions)
        if x is not None
    ]
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        parts = [jnp.asarray(x).astype(jnp.float64)[..., None] for x in given]
    else:
        known = [x for x in given if isinstance(x, np.ndarray)]
        same = len(known) == len(given)  # both are to be counted from the same place
        parts = [_split(x) for x in (_from_the_largest(known) if same else given)]
    num_parts = max(x.shape[-1] for x in parts)
    parts = [jnp.pad(x, [(0, 0)] * 3 + [(0, num_parts - x.shape[-1])]) for x in parts]
    return parts[0], parts[1] if len(parts) > 1 else None


def stand(inputs: Inputs) -> Inputs:
    """Say where every query stands, for all heads; of positions outside the ranges of keys nothing is used."""
    x, xq = inputs.positions, inputs.query_positions
    if x is None:
        return inputs
    (B, T, H, _), (S, G) = inputs.q.shape, inputs.k.shape[1:3]
    start = jnp.full(1, S - T) if inputs.query_start is None else inputs.query_start
    own_key = (start[:, None] + jnp.arange(T))[:, None]
    if inputs.key_range is not None:
        limits = jnp.repeat(inputs.key_range, H // max(1, G), axis=1)
        first, end, keys = limits[..., :1], limits[..., 1:], jnp.arange(S)
        x = jnp.where(((keys >= first) & (keys < end))[..., None], x, 0)
        own_key = jnp.clip(own_key, first, end - 1)
    x = jnp.broadcast_to(x, (B, H, *x.shape[2:]))
    if xq is None and S == 0:
        xq = jnp.zeros((1, 1, T, x.shape[-1]), x.dtype)
    elif xq is None:
        own_key = jnp.clip(own_key, 0, S - 1)[..., None]
        xq = jnp.take_along_axis(x, own_key, axis=2, mode="clip")
    return replace(
        inputs, positions=x, query_positions=jnp.broadcast_to(xq, (B, H, *xq.shape[2:]))
    )


def stand_near(inputs: Inputs) -> tuple[Inputs, Array | None]:
    """`stand`; queries that see keys on one side alone stand at the nearest of these, and [B, T, H] is the bias that all keys lack.

    Softmax does not see what all scores of a row have in common, which in a narrow type would round off what they differ by.
    """
    given, inputs = inputs.query_positions, stand(inputs)
    x, xq, S = inputs.positions, inputs.query_positions, inputs.k.shape[1]
    if given is None or x is None or xq is None or S == 0:
        return inputs, None
    (B, T, H, _), G = inputs.q.shape, inputs.k.shape[2]
    start = jnp.full(1, S - T) if inputs.query_start is None else inputs.query_start
    place = (start[:, None] + jnp.arange(T))[:, None]
    limits = jnp.array([[[0, S]]])
    if inputs.key_range is not None:
        limits = jnp.repeat(inputs.key_range, H // max(1, G), axis=1)
    first, end = limits[..., :1], limits[..., 1:]
    left = inputs.left[..., None]
    right = jnp.full_like(left, jnp.inf) if inputs.right is None else inputs.right[..., None]
    before = place < first
    beyond = ~before & ((place >= end - 1) | jnp.isinf(right))
    own_key = jnp.broadcast_to(jnp.clip(place, first, end - 1).clip(0, S - 1), (B, H, T))
    nearest = jnp.take_along_axis(x, own_key[..., None], axis=2, mode="clip")
    away = jnp.where(before, -1, 1) * (xq - nearest).sum(-1)
    slope = jnp.where(before, right, left)
    # Of a side that an infinite slope hides, the query's own key is seen at most.
    bias = away * jnp.where(jnp.isinf(slope) | ~(before | beyond), 0, slope)
    xq = jnp.where((before | beyond)[..., None], nearest, xq)
    return replace(inputs, query_positions=xq), bias.astype(inputs.left.dtype).swapaxes(1, 2)


def distance(xq: Array, x: Array) -> Array:
    """[..., rows, parts], [..., keys, parts] -> [..., rows, keys]: how far each key lies back."""
    apart = (xq[..., :, None, i] - x[..., None, :, i] for i in range(x.shape[-1]))
    return functools.reduce(jnp.add, apart)


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
