"""linbias.jax.attention, with the implementation that it takes by itself."""

import jax.numpy as jnp
import numpy as np

import linbias
from linbias.jax import attention as ours

NAME, PACKAGE, RUNS = "linbias, JAX", "linbias", "all"
DTYPES = ("float32", "bfloat16")


def attention(
    q, k, v, *, slopes, causal, scale, dtype, right_slopes=None, key_range=None, query_start=None, segments=None,
    schedule="paper", max_bias=8.0, return_lse=False,
):  # fmt: skip
    if slopes is None:
        slopes = linbias.slopes(q.shape[1], schedule, max_bias)
    if query_start is None:
        query_start = np.full(len(q), k.shape[2] - q.shape[2])
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]
    out, lse = ours(
        *(jnp.asarray(x, dtype).swapaxes(1, 2) for x in (q, k, v)), slopes, causal=causal, scale=scale,
        right_slopes=right_slopes, key_range=key_range, query_start=query_start, mask=mask, return_lse=True,
    )  # fmt: skip
    out = np.asarray(out.swapaxes(1, 2), np.float32)
    return (out, np.asarray(lse.swapaxes(1, 2))) if return_lse else out
