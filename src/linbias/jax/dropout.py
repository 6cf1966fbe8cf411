"""The dropout mask of `linbias.torch.dropout` in JAX: a function of (seed, batch, head, query,
key) alone.

mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
row  = mix(mix(mix(seed) ^ (b * H + h)) ^ t)
keep = mix(row ^ mix(s)) >= dropout * 2^32
"""

import jax
import jax.numpy as jnp
from jax import Array


def draw_seed(key: Array) -> Array:
    """Turn a key of `jax.random` into a seed, uint32."""
    return jax.random.bits(key, (), jnp.uint32)


def keep_mask(
    seed: Array, dropout: float, batch_heads: Array, queries: Array, keys: Array
) -> Array:
    """Which weights stay: batch_heads [...], queries [..., T], keys [..., S] -> [..., T, S]."""
    batch_heads, queries, keys = (x.astype(jnp.uint32) for x in (batch_heads, queries, keys))
    rows = _mix(_mix(_mix(seed) ^ batch_heads)[..., None] ^ queries)
    mixed = _mix(rows[..., None] ^ _mix(keys)[..., None, :])
    return mixed >= jnp.uint32(round(dropout * 2**32))


def _mix(x: Array) -> Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
