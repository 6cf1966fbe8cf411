"""JAX front end: `attention` and what goes with it.

`linbias.jax.context_parallel` runs it over one sequence on several devices, and `linbias.jax.flax`
fits it into Flax's multi-head attention.
"""

from linbias import _extras

_extras.require("linbias.jax")

from linbias.jax import context_parallel as context_parallel
from linbias.jax.functional import attention, attention_weights, bias, merge

__all__ = ["attention", "attention_weights", "bias", "merge"]
