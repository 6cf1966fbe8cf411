"""Linear-bias attention with the whole bias in memory: the definition (DESIGN section 1) in JAX
operations.

For any device and every option, differentiable any number of times; several arrays of [B, H, T,
S].
"""

import jax
import jax.numpy as jnp
from jax import Array

from linbias._dispatch import Abilities
from linbias._request import SPECIAL, Problem
from linbias.jax import standing
from linbias.jax.dropout import keep_mask
from linbias.jax.operator import Inputs

NAME = "dense"

_EXACT = jax.lax.Precision.HIGHEST


ABILITIES = Abilities(
    runs_on="any JAX device",
    how="the whole score matrix, for reading and checking",
    memory="length x length",
    has=tuple(SPECIAL),
    higher_derivatives=True,
)


def why_not(problem: Problem) -> str | None:
    return ABILITIES.lacks(problem)


@jax.jit
def attention(inputs: Inputs) -> tuple[Array, Array]:
    """Return out [B, T, H, E] in q's dtype and lse [B, T, H], wide."""
    weight, lse = attention_weights(inputs)
    if inputs.seed is not None:
        B, H, T, S = weight.shape
        batch_heads = jnp.arange(B * H).reshape(B, H)
        keep = keep_mask(inputs.seed, inputs.dropout, batch_heads, jnp.arange(T), jnp.arange(S))
        weight = jnp.where(keep, weight / (1 - inputs.dropout), 0)
    v = _per_query_head(_blank_outside(inputs.v, inputs).astype(weight.dtype), inputs)
    out = jnp.einsum("bhts,bshe->bthe", weight, v, precision=_EXACT)
    return out.astype(inputs.q.dtype), lse.swapaxes(1, 2)


@jax.jit
def attention_weights(inputs: Inputs) -> tuple[Array, Array]:
    """Return softmax(score) [B, H, T, S] before dropout and lse; an empty row is 0 and -inf."""
    wide = inputs.left.dtype
    k = _per_query_head(_blank_outside(inputs.k, inputs).astype(wide), inputs)
    score = inputs.scale * jnp.einsum(
        "bthd,bshd->bhts", inputs.q.astype(wide), k, precision=_EXACT
    )
    T, S = score.shape[2:]
    start = jnp.full(1, S - T) if inputs.query_start is None else inputs.query_start
    order = distance = ((start[:, None] + jnp.arange(T))[..., None] - jnp.arange(S))[:, None]
    if inputs.positions is not None and inputs.query_positions is not None:
        distance = standing.distance(inputs.query_positions, inputs.positions).astype(wide)
    visible = jnp.bool_(True)
    for slope, here, reach in (
        (inputs.left, order >= 0, distance),
        (inputs.right, order < 0, -distance),
    ):
        if slope is None:
            visible = visible & ~here
        else:
            hidden = jnp.isinf(slope)[:, :, None, None]
            # A query always sees the key at its own position. 0 * inf would be NaN.
            visible = visible & ~(here & hidden & (order != 0))
            slope = jnp.where(hidden, 0, slope[:, :, None, None])
            score = score - jnp.where(here, slope * reach, 0)
    inside = _inside(inputs)
    if inside is not None:
        inside = _per_query_head(inside, inputs)  # [B, S, H]
        visible = visible & inside.swapaxes(1, 2)[:, :, None]
    if inputs.query_range is not None:
        first, end = jnp.split(inputs.query_range[:, None], 2, -1)  # [B, 1, T, 1]
        visible = visible & (jnp.arange(S) >= first) & (jnp.arange(S) < end)
    if inputs.mask is not None and inputs.mask.dtype == bool:
        visible = visible & inputs.mask
    elif inputs.mask is not None:
        score = score + inputs.mask
    score = jnp.where(visible, score, -jnp.inf)
    empty = (score == -jnp.inf).all(-1, keepdims=True)
    score = jnp.where(empty, 0, score)
    lse = jnp.where(empty[..., 0], -jnp.inf, jax.nn.logsumexp(score, -1))
    return jnp.where(empty, 0, jax.nn.softmax(score)), lse


def _inside(inputs: Inputs) -> Array | None:
    """[B, S, G]: whether a key lies in the range."""
    if inputs.key_range is None:
        return None
    keys = jnp.arange(inputs.k.shape[1])[:, None]
    first, end = (inputs.key_range[:, None, :, i] for i in (0, 1))
    return (keys >= first) & (keys < end)


def _blank_outside(array: Array, inputs: Inputs) -> Array:
    """Zero what [B, S, G, size] holds outside the range: it may be NaN, and 0 * NaN is NaN."""
    inside = _inside(inputs)
    return array if inside is None else jnp.where(inside[..., None], array, 0)


def _per_query_head(array: Array, inputs: Inputs) -> Array:
    """[B, S, G, ...] -> [B, S, H, ...]."""
    H, G = inputs.q.shape[2], inputs.k.shape[2]
    return array if H == G else jnp.repeat(array, H // G, axis=2)
