"""JAX front end: `attention`. `linbias.jax.flax` fits it into Flax's multi-head attention."""

from linbias.jax.functional import attention

__all__ = ["attention"]
