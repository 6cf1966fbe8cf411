"""`attention` and `attention_weights`, the functions that a program calls."""

from typing import Literal, TypedDict, Unpack, overload

from jax import Array
from jax.sharding import PartitionSpec as P

from linbias import _request
from linbias.jax import standing
from linbias.jax.call import ArrayLike, Slopes, on_its_mesh, prepare, run, spec_on_mesh
from linbias.jax.impl import dense


class Weighing(TypedDict, total=False):
    """The keywords of `attention` that say what each key weighs."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: ArrayLike | None
    query_start: ArrayLike | None
    mask: ArrayLike | None
    positions: ArrayLike | None
    query_positions: ArrayLike | None


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
@_request.takes(Options)
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

    Key s stands at position s, and query t at p = query_start + t; by default the last query stands at the last
    key, p = t + S - T:

        score[t, s] = scale * (q[t] . k[s]) - slope       * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right_slope * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    With causal=True only keys s <= p take part. T=2, S=4 and T=4, S=2 (x = takes part):

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    Rows that see no key, and shared key heads, are as in `linbias.attention`. Scores, softmax and sums are float32 for
    16-bit inputs and in q's dtype otherwise. Differentiable in q, k, v, slopes, right_slopes and positions, through out and
    lse; twice, and in forward mode, only by `dense`. Works under jit, vmap, jax.checkpoint and jax.export, on meshes of any axis
    types, and in shard_map over batch and heads, where slopes must be given: those of the shard's heads. Traced values of
    key_range and query_start are not checked but moved to the nearest that is allowed; those of positions are not checked.

    With positions, key s stands at x[s] and query t at xq[t] = x[p]: the distances p - s and s - p become xq[t] - x[s] and
    x[s] - xq[t], for time stamps, or the sums of -log of forget gates (slopes 1). Which side a key is on, and what is
    hidden, goes by order alone, also among keys at one place.

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64 (which needs jax_enable_x64).
        k: [B, S, G, D], dtype of q. H must be a multiple of G.
        v: [B, S, G, E], dtype of q.
        slopes, causal, right_slopes, scale: As for `linbias.attention`. Values, here and below, are checked where they are
            known and on the CPU.
        key_range: [B, 2] or [B, G, 2], integers, as for `linbias.attention`.
        query_start: [B], integers, as for `linbias.attention`.
        mask: Broadcasts to [B, H, T, S]. Bool: True takes part. Floating point: added to the scores, as the `bias` of
            `jax.nn.dot_product_attention`. Keys that it hides must still be finite, unless it hides them from every query.
            `blocked` takes bool; `dense` takes both, and is differentiable in the numbers.
        positions: [S] for all batch rows, [B, S] or [B, H, S], where B may be 1: float32, float64 or integers within 2^53 of 0,
            never falling within the range of keys: where keys stand; outside the range they may be anything. None: key s at s. JAX
            arrays are float32 or int32 unless jax_enable_x64: float32 counts in steps of 64 at 1e9, so that time
            stamps must be counted from one of their own before they become float32; int32 is exact. NumPy arrays, integers and float64 too, lose nothing: they are counted so in float64 first, also inside
            jit, where they are constants. An argument of jit is no NumPy array inside.
        query_positions: [T], [B, T] or [B, H, T], likewise, each between those of the keys before and after it: where queries
            stand. None: at key p, 0 <= p < S, or the nearest to it within the range.
        key_bound, dropout, tolerance: As for `linbias.torch.attention`.
        dropout_key: A key of `jax.random` to draw the dropout mask from, the same for all implementations; needed if
            dropout is not 0.
        implementation: "auto" takes the first that can run the call: `cpu` (the compiled core) and `blocked` (any device) are
            near to far, `dense` is the whole score matrix. A name is obeyed or refused. Where q is traced, its device is taken
            to be JAX's default one.
        return_lse: Also return lse.

    Returns:
        [B, T, H, E] in q's dtype; with return_lse also lse [B, T, H], float32 (float64 for float64 inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument, such as a traced value where a number is needed.
        ValueError: A shape or value breaks a rule above; the message names argument, rule and value.
        NotImplementedError: The implementation cannot run this call, or give this derivative (in forward mode under
            jit, JAX raises a TypeError of its own).

    Example:
        >>> from jax import numpy as jnp
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> attention(q, k, v).shape
        (1, 3, 2, 4)

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    if not options.keys() <= Options.__annotations__.keys():
        _request.refuse_unknown("attention", options, attention)
    inputs, problem = prepare("attention", q, k, v, slopes, **options)
    out, lse = run("attention", inputs, problem, implementation)
    return (out, lse) if return_lse else out


@_request.takes(Weighing)
def attention_weights(
    q: ArrayLike, k: ArrayLike, slopes: Slopes | None = None, **options: Unpack[Weighing]
) -> Array:
    """Compute the weights that `attention` gives to each key: softmax(score), the whole matrix, to look at.

    Differentiable in q, k, the slopes and positions.

    Args:
        q, k, slopes, causal, right_slopes, scale, key_range, query_start, mask, positions, query_positions: As for
            `attention`.

    Returns:
        [B, H, T, S], float32 (float64 for float64 inputs). A query that sees no key has zeros.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> from jax import numpy as jnp
        >>> q = k = jnp.zeros((1, 2, 1, 4))
        >>> attention_weights(q, k, [0.0])[0, 0].tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """
    if not options.keys() <= Weighing.__annotations__.keys():
        _request.refuse_unknown("attention_weights", options, attention_weights)
    inputs, _ = prepare("attention_weights", q, k, k, slopes, **options)
    B, T, H, _ = spec_on_mesh(inputs.q)
    return on_its_mesh(
        lambda x: dense.attention_weights(standing.stand_near(x)[0])[0],
        inputs,
        P(B, H, T, None),
    )
