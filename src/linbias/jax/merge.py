"""`merge`: attention over several sets of keys from the results over each."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from linbias import _request


def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge the results of `attention` over disjoint sets of keys into that over all of them.

        lse = log sum over i of exp(lses[i])        out = sum over i of exp(lses[i] - lse) * outs[i]

    Each part's call needs its own `query_start`, counted from the first key of the part. A row that sees no key gives zeros
    and -inf. Differentiable.

    Args:
        outs: n arrays [B, T, H, E], or one [n, B, T, H, E], any floating dtype.
        lses: n arrays [B, T, H], or one [n, B, T, H], in the dtype that the merging is to be done in.

    Returns:
        out [B, T, H, E] in the dtype of outs, and lse [B, T, H].

    Raises:
        ValueError: There is nothing to merge, or the shapes do not fit together.

    Example:
        >>> from linbias.jax import attention
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
        >>> halves = [(k[:, :3], v[:, :3], 0), (k[:, 3:], v[:, 3:], -3)]
        >>> parts = [attention(q, *kv, query_start=jnp.array([n]), return_lse=True) for *kv, n in halves]
        >>> out, lse = merge(*zip(*parts))
        >>> bool(jnp.allclose(out, attention(q, k, v), atol=1e-5))
        True
    """
    _request.check_parts([x.shape for x in outs], [x.shape for x in lses])
    parts, scores = jnp.stack(list(outs)), jnp.stack(list(lses))
    empty = scores == -jnp.inf
    nothing = empty.all(0)
    # Where a row has seen nothing, zeros in place of -inf keep NaN out of its gradients.
    lse = jax.nn.logsumexp(jnp.where(nothing, 0, scores), axis=0)
    weight = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, scores) - lse))[..., None]
    wide = parts.astype(scores.dtype)
    out = (weight * jnp.where(empty[..., None], 0, wide)).sum(0)
    return out.astype(parts.dtype), jnp.where(nothing, -jnp.inf, lse)
