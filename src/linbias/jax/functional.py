"""The functions that a program calls: `attention`, `attention_weights`, `bias` and `merge`."""

from collections.abc import Sequence
from typing import Literal, Never, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from linbias import _request
from linbias._request import checks, keywords
from linbias.jax import standing
from linbias.jax.call import ArrayLike, Slopes, on_its_mesh, prepare, run, spec_on_mesh
from linbias.jax.impl import dense
from linbias.jax.operator import own_code


class Sides(TypedDict, total=False):
    """The keywords that every function of attention has."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None


class Weighing(Sides, total=False):
    """The keywords of `attention` that say what each key weighs."""

    key_range: ArrayLike | None
    query_start: ArrayLike | None
    mask: ArrayLike | None
    positions: ArrayLike | None
    query_positions: ArrayLike | None
    window: tuple[int, int] | None
    query_range: ArrayLike | None


class Options(Weighing, total=False):
    """The keywords of `attention` that say what is computed."""

    key_bound: ArrayLike | None
    dropout: float
    dropout_key: Array | None
    tolerance: float | None


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = ...,
    *,
    implementation: str = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = ...,
    *,
    implementation: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Array: ...
@keywords.show_keywords(Options)
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Array | tuple[Array, Array]:
    """Softmax attention whose scores fall linearly with distance (ALiBi).

    Key s stands at position s, and query t at p = query_start + t; by default the last query
    stands at the last key, p = t + S - T. With causal=True only keys s <= p take part:

        score[t, s] = scale * (q[t] . k[s]) - slope       * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right_slope * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    Scores, softmax and sums are float32 for 16-bit inputs and in q's dtype otherwise.
    Differentiable in q, k, v, slopes, right_slopes and positions, through out and lse; twice, and
    in forward mode, only by `dense`. Works under jit, vmap, jax.checkpoint and jax.export, on
    meshes of any axis types, and in shard_map over batch and heads, where slopes must be given:
    those of the shard's heads.

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64 (which needs jax_enable_x64).
        k: [B, S, G, D], dtype of q. H must be a multiple of G.
        v: [B, S, G, E], dtype of q.
        slopes, causal, right_slopes, scale: As for `linbias.torch.attention`. Values, here and
            below, are checked where they are known and on the CPU.
        key_range: [B, 2] or [B, G, 2], integers, as there. Traced values are moved to the nearest
            that is allowed, here and in query_start and query_range.
        query_start: [B], integers, as there.
        mask: Broadcasts to [B, H, T, S]. Bool: True takes part. Floating point: added, as the
            `bias` of `jax.nn.dot_product_attention`. Keys that it hides must still be finite,
            unless it hides them from every query. `blocked` takes bool; `dense` takes both, and is
            differentiable in the numbers.
        positions: [S], [B, S] or [B, H, S], where B may be 1, as there, but always sorted. NumPy
            arrays lose nothing: they are counted from the largest first, also inside jit, where
            they are constants. JAX arrays are float32 or int32 unless jax_enable_x64: int32 is
            exact, float32 counts in steps of 64 at 1e9, so that time stamps must first be counted
            from one of their own.
        query_positions: [T], [B, T] or [B, H, T], likewise.
        window, key_bound, dropout, tolerance: As there.
        query_range: [T, 2] or [B, T, 2], integers, as there.
        dropout_key: A key of `jax.random` to draw the dropout mask from, the same for all
            implementations; needed if dropout is not 0.
        implementation: "auto" takes the first that can run the call: `cpu` (the compiled core) and
            `blocked` (any device) are near to far, `dense` is the whole score matrix. A name is
            obeyed or refused. Where q is traced, its device is taken to be JAX's default one.
        return_lse: Also return lse.

    Returns:
        [B, T, H, E] in q's dtype; with return_lse also lse [B, T, H], float32 (float64 for float64
        inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument, such as a traced value for a number.
        ValueError: A shape or value breaks a rule above; the message names argument and rule.
        NotImplementedError: The implementation cannot run this call, or give this derivative (in
            forward mode under jit, JAX raises a TypeError of its own).

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> attention(q, k, v).shape
        (1, 3, 2, 4)

    Source: Press, Smith and Lewis, ICLR 2022, section 3.
    """
    if not options.keys() <= Options.__annotations__.keys():
        keywords.refuse_unknown("attention", options, attention)
    inputs, problem = prepare("attention", q, k, v, slopes, **options)
    out, lse = run("attention", inputs, problem, implementation)
    return (out, lse) if return_lse else out


@keywords.show_keywords(Weighing)
def attention_weights(
    q: ArrayLike, k: ArrayLike, slopes: Slopes | None = None, **options: Unpack[Weighing]
) -> Array:
    """Compute the weights that `attention` gives to each key: softmax(score), all of them.

    Differentiable in q, k, the slopes and positions.

    Args:
        q, k, slopes, causal, right_slopes, scale, key_range, query_start, mask, positions,
            query_positions, window, query_range: As for `attention`.

    Returns:
        [B, H, T, S], float32 (float64 for float64 inputs). A query that sees no key has zeros.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> q = k = jnp.zeros((1, 2, 1, 4))
        >>> attention_weights(q, k, [0.0])[0, 0].tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """
    if not options.keys() <= Weighing.__annotations__.keys():
        keywords.refuse_unknown("attention_weights", options, attention_weights)
    inputs, _ = prepare("attention_weights", q, k, k, slopes, **options)
    B, T, H, _ = spec_on_mesh(inputs.q)
    return on_its_mesh(
        lambda x: dense.attention_weights(standing.stand_near(x)[0])[0], inputs, P(B, H, T, None)
    )


@own_code()
def bias(
    slopes: jax.typing.ArrayLike,
    T: int,
    S: int,
    right_slopes: jax.typing.ArrayLike | None = None,
    query_start: jax.typing.ArrayLike | None = None,
    **unknown: Never,
) -> Array:
    """Build the bias that attention adds to its scores, for code that needs it in memory.

        bias[h, t, s] = -slopes[h]       * (p - s)    for s <= p        (p = query_start + t)
        bias[h, t, s] = -right_slopes[h] * (s - p)    for s >  p

    It fits `bias=` of `jax.nn.dot_product_attention` and of `flax.linen.dot_product_attention`;
    `attention` needs no such matrix. Differentiable in the slopes; works under `jit`, where values
    are not checked.

    Args:
        slopes, T, S, query_start: As for `linbias.bias`.
        right_slopes: Like slopes, or one number for all heads, as for `linbias.bias`.

    Returns:
        [H, T, S] (or [B, H, T, S]) in the dtype of slopes if that is floating, and at least
        float32.

    Raises:
        ValueError: T or S is negative, slopes has not one or two axes, right_slopes another shape,
            or a slope is negative or NaN.

    Example:
        >>> bias(jnp.array([0.5]), 2, 3).tolist()
        [[[-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]]
        >>> bias(jnp.array([0.5]), 2, 2, jnp.inf).tolist()
        [[[0.0, -inf], [-0.5, 0.0]]]

    Source: Press, Smith and Lewis, ICLR 2022, section 3.
    """
    if unknown:
        keywords.refuse_unknown("bias", unknown, bias)
    left = jnp.asarray(slopes)
    left = left.astype(jnp.promote_types(left.dtype, jnp.float32))
    if left.ndim not in (1, 2):
        raise ValueError(f"bias: slopes must have shape [H] or [B, H], got {list(left.shape)}")
    for name, size in (("T", T), ("S", S)):
        if size < 0:
            raise ValueError(f"bias: {name} must be at least 0, got {size}")
    right = left if right_slopes is None else jnp.asarray(right_slopes, left.dtype)
    for name, slope in (("slopes", left), ("right_slopes", right)):
        if not isinstance(slope, jax.core.Tracer):
            checks.check_slope_values("bias", name, np.asarray(slope))
    if right.shape not in ((), left.shape):
        raise ValueError(
            "bias: right_slopes must be one number or have the shape of slopes,"
            f" {list(left.shape)}, got {list(right.shape)}"
        )
    right = jnp.broadcast_to(right, left.shape)
    start = S - T if query_start is None else query_start
    distance = (jnp.arange(T)[:, None] + start) - jnp.arange(S)
    return _one_side(left, distance) + _one_side(right, -distance)


@own_code()
def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge the results of `attention` over disjoint sets of keys into that over all of them.

        lse = log sum over i of exp(lses[i])      out = sum over i of exp(lses[i] - lse) * outs[i]

    Each part's call needs its own `query_start`, counted from the first key of the part. A row
    that sees no key gives zeros and -inf. Differentiable.

    Args:
        outs: n arrays [B, T, H, E], or one [n, B, T, H, E], any floating dtype.
        lses: n arrays [B, T, H], or one [n, B, T, H], in the dtype that the merging is to be done
            in.

    Returns:
        out [B, T, H, E] in the dtype of outs, and lse [B, T, H].

    Raises:
        ValueError: There is nothing to merge, or the shapes do not fit together.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
        >>> halves = [(k[:, :3], v[:, :3], 0), (k[:, 3:], v[:, 3:], -3)]
        >>> parts = [
        ...     attention(q, *kv, query_start=jnp.array([n]), return_lse=True) for *kv, n in halves
        ... ]
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


def _one_side(slope: Array, reach: Array) -> Array:
    """-slope * reach where reach is positive, else 0, without 0 * inf in either direction."""
    slope = slope[..., None, None]
    infinite = jnp.isinf(slope)
    lost = jnp.where(infinite, 0, slope) * jnp.maximum(reach, 0)
    return jnp.where(infinite & (reach > 0), -jnp.inf, 0.0 - lost)
