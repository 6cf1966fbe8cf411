"""`attention`: check, choose an implementation, call it."""

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linbias import _checks, _dispatch
from linbias.jax import blocked, cpu, dense
from linbias.jax.dropout import draw_seed
from linbias.jax.operator import Inputs
from linbias.schedules import slopes as slopes_of_paper

# In the order in which "auto" asks them.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (cpu, blocked, dense)

ArrayLike = Array | np.ndarray[Any, Any]
Slopes = ArrayLike | Sequence[float]


class Placement(TypedDict, total=False):
    """The keywords of `attention` that say which keys a query sees, and how their scores fall."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: ArrayLike | None
    query_start: ArrayLike | None


class Options(Placement, total=False):
    """The keywords of `attention` but for return_lse."""

    key_bound: ArrayLike | None
    dropout: float
    dropout_key: Array | None
    tolerance: float | None
    implementation: str


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = ...,
    *,
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
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Array: ...
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: ArrayLike | None = None,
    query_start: ArrayLike | None = None,
    key_bound: ArrayLike | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
    **unknown: object,
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

    A query that may see no key gives a row of zeros and lse = -inf. Query head h reads key/value head
    h // (H // G). Scores, softmax and sums are float32 for 16-bit inputs and in q's dtype otherwise.
    Differentiable in q, k, v, slopes, right_slopes, through both out and lse; twice, and in forward mode, only by `dense`. Works
    under jit, vmap, jax.checkpoint, and shard_map over batch and heads (there, give the slopes of the shard's own heads). Traced
    values of key_range and query_start are not checked but moved to the nearest that is allowed.

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64 (which needs jax_enable_x64).
        k: [B, S, G, D], dtype of q. H must be a multiple of G.
        v: [B, S, G, E], dtype of q.
        slopes: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys. None means
            `linbias.slopes(H)`; zeros mean no bias. Values, here and below, are checked where they are known and on
            the CPU.
        causal: Hide the keys after the query. With False and right_slopes=None the bias is symmetric.
        right_slopes: Like slopes: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        key_range: [B, 2] or [B, G, 2], integers: first and one past last key of each batch row, or of each of its
            key/value heads; keys outside are never used, whatever they hold. For left padding,
            [[num_padding, S], ...]; for a partly filled cache, [[0, num_filled], ...].
        query_start: [B], integers: the position of query 0 of each batch row, anywhere from -2^30 to 2^30, before
            the keys or beyond them too. None means that the last query stands at the last key of the range (of the
            range that ends last, where heads have their own). For right padding with T = S, zeros.
        key_bound: [B, G], floating point: at least the norm of every key in the range; all keys and values must be
            finite. Decoding then reads the near keys only. It is a promise, not checked; an implementation may do
            without it.
        dropout: Probability that a weight is dropped, in [0, 1 - 2^-32]; the others are divided by 1 - dropout. lse is
            that without dropout. The mask is the same for all implementations.
        dropout_key: A key of `jax.random` to draw the mask from; needed if dropout is not 0.
        tolerance: Largest share of a row's probability that far keys, never read, may hold together. None
            means 2^-53, 2^-24, 2^-14 and 2^-12 for float64, float32, float16 and bfloat16; 0 reads every key.
        implementation: "auto" takes the first that can run the call: `cpu` (the compiled core, near to far),
            `blocked` (near to far in JAX operations, any device) or `dense` (the whole score matrix). A name is
            obeyed or refused, never replaced. Where q is traced, its device is taken to be JAX's default one.
        return_lse: Also return lse.

    Returns:
        [B, T, H, E] in q's dtype; with return_lse also lse [B, T, H], float32 (float64 for float64 inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument, such as a traced value where a number is needed.
        ValueError: A shape or value breaks a rule above; the message names argument, rule and value.
        NotImplementedError: The implementation cannot run this call, or give this derivative (in forward mode under
            jit, JAX raises a TypeError of its own).

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> attention(q, k, v).shape
        (1, 3, 2, 4)

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    if unknown:
        _checks.refuse_unknown("attention", unknown, attention)
    inputs, problem = prepare(
        "attention",
        q,
        k,
        v,
        slopes,
        causal=causal,
        right_slopes=right_slopes,
        scale=scale,
        key_range=key_range,
        query_start=query_start,
        key_bound=key_bound,
        dropout=dropout,
        dropout_key=dropout_key,
        tolerance=tolerance,
    )
    out, lse = run("attention", inputs, problem, implementation)
    return (out, lse) if return_lse else out


def attention_weights(
    q: ArrayLike,
    k: ArrayLike,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: ArrayLike | None = None,
    query_start: ArrayLike | None = None,
    **unknown: Never,
) -> Array:
    """Compute the weights that `attention` gives to each key: softmax(score), to look at.

    The whole matrix is in memory, which `attention` avoids. Differentiable in q, k and the slopes.

    Args:
        q, k, slopes, causal, right_slopes, scale, key_range, query_start: As for `attention`.

    Returns:
        [B, H, T, S], float32 (float64 for float64 inputs). A query that sees no key has zeros.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> q = k = jnp.zeros((1, 2, 1, 4))
        >>> attention_weights(q, k, [0.0])[0, 0].tolist()
        [[1.0, 0.0], [0.5, 0.5]]
    """
    if unknown:
        _checks.refuse_unknown("attention_weights", unknown, attention_weights)
    inputs, _ = prepare(
        "attention_weights",
        q,
        k,
        k,
        slopes,
        causal=causal,
        right_slopes=right_slopes,
        scale=scale,
        key_range=key_range,
        query_start=query_start,
    )
    return dense.attention_weights(inputs)[0]


def prepare(
    function: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None,
    *,
    causal: bool,
    right_slopes: Slopes | None,
    scale: float | None = None,
    key_range: ArrayLike | None = None,
    query_start: ArrayLike | None = None,
    key_bound: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    tolerance: float | None = None,
) -> tuple[Inputs, _checks.Problem]:
    """Check the arguments of a call and fill in what they leave open: what the implementations take.

    mask is [B or 1, H or 1, T or 1, S], bool, already checked; False hides a key.
    """
    described = describe_all(function, q, k, v)
    wide = np.float64 if described[0].dtype == "float64" else np.float32
    left, right = (
        None if slope is None else _as_slopes(function, name, slope, wide)
        for name, slope in (("slopes", slopes), ("right_slopes", right_slopes))
    )
    optional = [
        None if array is None else describe(name, array, function)
        for name, array in (
            ("slopes", left),
            ("right_slopes", right),
            ("key_range", key_range),
            ("query_start", query_start),
            ("key_bound", key_bound),
        )
    ]
    problem = _checks.check(
        function,
        *described,
        *optional,
        causal=causal,
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
        layout="BTHD",
    )
    problem = replace(problem, mask=mask is not None)
    _checks.warn_of_layout(function, problem, "BTHD")
    _check_values(function, left, right, key_range, query_start, problem.S)
    if problem.dropout and dropout_key is None:
        raise ValueError(f"{function}: dropout needs a dropout_key, got None (dropout {dropout})")
    if left is None:
        left = np.asarray(slopes_of_paper(problem.H) if problem.H else (), wide)
    if not causal and right is None:
        right = left
    of_heads = problem.B, problem.H
    key_range, query_start = _positions(key_range, query_start, problem)
    inputs = Inputs(
        q=jnp.asarray(q),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        left=jnp.broadcast_to(left, of_heads),
        right=None if right is None else jnp.broadcast_to(right, of_heads),
        key_range=key_range,
        query_start=query_start,
        key_bound=None if key_bound is None else jnp.asarray(key_bound).astype(wide),
        mask=None if mask is None else jnp.asarray(mask, bool),
        seed=draw_seed(dropout_key) if problem.dropout and dropout_key is not None else None,
        scale=problem.scale,
        dropout=problem.dropout,
        tolerance=problem.tolerance,
    )
    return inputs, problem


def run(
    function: str, inputs: Inputs, problem: _checks.Problem, implementation: str
) -> tuple[Array, Array]:
    """Choose an implementation and call it: out [B, T, H, E] and lse [B, T, H]."""
    chosen = _dispatch.choose(function, implementation, problem, IMPLEMENTATIONS)
    if 0 in (problem.B, problem.T, problem.H):
        lse = jnp.zeros((problem.B, problem.T, problem.H), inputs.left.dtype)
        return jnp.zeros((*lse.shape, problem.E), inputs.q.dtype), lse
    out, lse = chosen.attention(inputs)
    return out, lse


def _positions(
    key_range: ArrayLike | None, query_start: ArrayLike | None, problem: _checks.Problem
) -> tuple[Array | None, Array | None]:
    """The range [B, G, 2] and the start [B] as the implementations take them, int32, or None.

    Traced values are unchecked: limits keep every index among the keys and every loop short.
    """
    if key_range is not None:
        key_range = _clamp(key_range, 0, problem.S)
        if key_range.ndim == 2:
            key_range = key_range[:, None]
        key_range = jnp.broadcast_to(key_range, (problem.B, problem.G, 2))
        if query_start is None:
            query_start = key_range[..., 1].max(1, initial=0) - problem.T
    if query_start is not None:
        query_start = _clamp(query_start, -_checks.LARGEST_START, _checks.LARGEST_START)
    return key_range, query_start


def _clamp(integers: ArrayLike, low: int, high: int) -> Array:
    integers = jnp.asarray(integers)
    limits = jnp.iinfo(integers.dtype)
    clamped = jnp.clip(integers, max(low, limits.min), min(high, limits.max))
    return clamped.astype(jnp.int32)


def describe_all(function: str, *arrays: Any) -> list[_checks.Described]:
    """Describe q, k and v. Where one lies in parts on several devices, so does the call; the rest is JAX's to check."""
    found = [describe(name, x, function) for name, x in zip("qkv", arrays, strict=True)]
    device = max((x.device for x in found), key=lambda name: " " in name)
    return [x._replace(device=device) for x in found]


def describe(name: str, array: Any, function: str = "attention") -> _checks.Described:
    """Describe an array to the argument rules; raise for what is none, or needs 64 bits that JAX has switched off."""
    if not isinstance(array, Array | np.ndarray):
        raise TypeError(
            f"{function}: {name} must be a jax.Array or numpy.ndarray, got {_kind(array)}"
        )
    if (
        name in "qkv"
        and array.dtype == np.float64
        and jax.dtypes.canonicalize_dtype(np.float64) != np.float64
    ):
        raise TypeError(
            f"{function}: {name} must be at most float32 while jax_enable_x64 is off, got float64"
        )
    return _checks.Described(tuple(array.shape), array.dtype.name, _device(array))


def _device(array: ArrayLike) -> str:
    """The platform, or "n platform devices" for an array known to lie in parts on several."""
    if isinstance(array, Array) and not isinstance(array, jax.core.Tracer):
        devices = array.devices()
        platform = next(iter(devices)).platform
        if len(devices) > 1 and not array.is_fully_replicated:
            return f"{len(devices)} {platform} devices"
        return platform
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        return jax.default_backend()
    return default if isinstance(default, str) else str(default.platform)


def _as_slopes(function: str, name: str, values: Slopes, wide: type) -> ArrayLike:
    """Slopes in the wide dtype. What is no JAX array stays in NumPy, where values can be read even when tracing."""
    if not isinstance(values, Array):
        return _checks.real_array(function, name, values).astype(wide)
    if jnp.iscomplexobj(values):
        raise TypeError(f"{function}: {name} must hold real numbers, got {values.dtype.name}")
    return values.astype(wide)


def _check_values(
    function: str,
    left: ArrayLike | None,
    right: ArrayLike | None,
    key_range: ArrayLike | None,
    query_start: ArrayLike | None,
    S: int,
) -> None:
    """Check what only the values tell, where they are known and reading them does not wait for a device."""
    for name, slope in (("slopes", left), ("right_slopes", right)):
        if slope is not None and _is_known(slope):
            _checks.check_slope_values(function, name, np.asarray(slope))
    if key_range is not None and _is_known(key_range):
        _checks.check_key_range_values(function, np.asarray(key_range), S)
    if query_start is not None and _is_known(query_start):
        _checks.check_query_start_values(function, np.asarray(query_start))


def _is_known(array: ArrayLike) -> bool:
    if isinstance(array, jax.core.Tracer):
        return False
    return isinstance(array, np.ndarray) or _device(array) == "cpu"


def _kind(value: Any) -> str:
    return type(value).__name__
