"""linbias.jax.attention, with the implementation that it takes by itself."""

import jax.numpy as jnp
import numpy as np

from adapters import parts
from linbias.jax import attention as ours

NAME, PACKAGE, RUNS = "linbias, JAX", "linbias", "all"
DTYPES = ("float32", "bfloat16")


def attention(q, k, v, *, dtype, return_lse=False, **arguments):
    qkv = (jnp.asarray(x, dtype).swapaxes(1, 2) for x in (q, k, v))
    out, lse = ours(*qkv, **parts.for_linbias(q, k, **arguments), return_lse=True)
    out = np.asarray(out.swapaxes(1, 2), np.float32)
    return (out, np.asarray(lse.swapaxes(1, 2))) if return_lse else out
