"""Linear-bias attention with the whole bias in memory: the definition in JAX operations.

Computes DESIGN section 1 for any device, any sizes and every option, differentiable any number of times.
Memory: several arrays of [B, H, T, S]. For short sequences, for higher derivatives, and for reading.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from linbias._checks import Problem
from linbias.jax.dropout import keep_mask
from linbias.jax.operator import Arguments

NAME = "dense"


def why_not(call: Problem) -> str | None:
    return None


@partial(jax.jit, static_argnums=1)
def attention(arguments: Arguments, call: Problem) -> tuple[Array, Array]:
    """Return out [B, T, H, E] and lse [B, T, H]."""
    q, k, v, left, right, key_range, _, mask, seed = arguments
    wide = left.dtype
    distance, visible = _distance(key_range, call)
    if key_range is not None:
        # Keys outside may hold anything, NaN included, and 0 * NaN is NaN.
        inside = visible[:, 0, 0, :, None, None]
        k, v = jnp.where(inside, k, 0), jnp.where(inside, v, 0)
    if mask is not None:
        visible = visible & mask
    k, v = (jnp.repeat(x.astype(wide), call.H // call.G, axis=2) for x in (k, v))
    exact = jax.lax.Precision.HIGHEST
    score = call.scale * jnp.einsum("bthd,bshd->bhts", q.astype(wide), k, precision=exact)
    for slope, reach in ((left, distance), (right, -distance)):
        if slope is None:
            visible = visible & (reach <= 0)
        else:
            slope = slope[:, :, None, None]
            visible = visible & ((reach <= 0) | ~jnp.isinf(slope))
            # 0 * inf would be NaN: a query always sees its own position.
            score = score - jnp.where((reach > 0) & ~jnp.isinf(slope), slope * reach, 0)
    weight, lse = _softmax(jnp.where(visible, score, -jnp.inf))
    if seed is not None:
        B, H, T, S = (jnp.arange(n) for n in (call.B, call.H, call.T, call.S))
        keep = keep_mask(seed, call.dropout, B[:, None] * call.H + H, T, S)
        weight = jnp.where(keep, weight / (1 - call.dropout), 0)
    out = jnp.einsum("bhts,bshe->bthe", weight, v, precision=exact)
    return out.astype(q.dtype), lse.swapaxes(1, 2)


def _distance(key_range: Array | None, call: Problem) -> tuple[Array, Array]:
    """Position minus key, and whether the key is in the range: [B or 1, 1, T, S] and [B or 1, 1, 1, S]."""
    keys = jnp.arange(call.S)
    limits = jnp.array([[0, call.S]]) if key_range is None else key_range
    first, end = (limits[:, i, None, None, None] for i in (0, 1))
    position = jnp.arange(call.T)[:, None] + end - call.T
    return position - keys, (keys >= first) & (keys < end)


def _softmax(score: Array) -> tuple[Array, Array]:
    """Weights and log-sum-exp over the last axis; a row without a key gives zeros and -inf."""
    empty = (score == -jnp.inf).all(-1, keepdims=True)
    score = jnp.where(empty, 0, score)
    lse = jax.nn.logsumexp(score, -1)
    return jnp.where(empty, 0, jax.nn.softmax(score)), jnp.where(empty[..., 0], -jnp.inf, lse)
