"""`attention`: check, choose an implementation, call it."""

import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linbias import _checks, _dispatch
from linbias.jax import blocked, cpu, dense
from linbias.jax.dropout import draw_seed
from linbias.jax.operator import Arguments
from linbias.schedules import slopes

# In the order in which "auto" asks them.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (cpu, blocked, dense)

ArrayLike = Array | np.ndarray[Any, Any]
Slopes = ArrayLike | Sequence[float]


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    left: Slopes | None = None,
    *,
    causal: bool = True,
    right: Slopes | None = None,
    scale: float | None = None,
    key_range: ArrayLike | None = None,
    key_bound: ArrayLike | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Softmax attention whose scores fall linearly with distance (ALiBi).

    The last query stands at the last key, so query t has position p = t + S - T:

        score[t, s] = scale * (q[t] . k[s]) - left  * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    With causal=True only keys s <= p take part. T=2, S=4 and T=4, S=2 (x = takes part):

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    A query that may see no key gives a row of zeros and lse = -inf. Query head h reads key/value head
    h // (H // G). Scores, softmax and sums are float32 for 16-bit inputs and in q's dtype otherwise.
    Differentiable in q, k, v, left, right, through both out and lse; twice only by `dense`. Works under jit, vmap,
    jax.checkpoint, and shard_map over batch and heads (there, give the slopes of the shard's own heads).

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64 (which needs jax_enable_x64).
        k: [B, S, G, D], dtype of q. H must be a multiple of G.
        v: [B, S, G, E], dtype of q.
        left: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys. None means
            `linbias.slopes(H)`; zeros mean no bias. Values are checked where they are known and on the CPU.
        causal: Hide the keys after the query. With False and right=None the bias is symmetric.
        right: Like left: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        key_range: [B, 2], integers: first and one past last key of each batch row; keys outside are never
            used, whatever they hold, and the last query stands at the last key inside. For left padding,
            [[num_padding, S], ...]; for a partly filled cache, [[0, num_filled], ...].
        key_bound: [B, G], floating point: at least |k| of every key in the range; all keys and values must be
            finite. Decoding then reads the near keys only. It is a promise, not checked; an implementation may do
            without it.
        dropout: Probability that a weight is dropped, in [0, 1); the others are divided by 1 - dropout. lse is
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
        NotImplementedError: The implementation cannot run this call, or give a second derivative.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> attention(q, k, v).shape
        (1, 3, 2, 4)

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"attention: causal must be True or False, got {_kind(causal)}")
    described = describe_all("attention", q, k, v)
    wide = np.float64 if described[0].dtype == "float64" else np.float32
    sides = [None if s is None else as_slopes(s, wide) for s in (left, right)]
    names = ("left", "right", "key_range", "query_start", "key_bound")
    optional = (*sides, key_range, None, key_bound)
    call = _checks.check(
        "attention",
        *described,
        *(None if x is None else describe(n, x) for n, x in zip(names, optional, strict=True)),
        causal=bool(causal),
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
        layout="BTHD",
    )
    _check_values(sides[0], sides[1], key_range, call.S)
    if call.dropout and dropout_key is None:
        raise ValueError(f"attention: dropout needs a dropout_key, got None (dropout {dropout})")
    out, lse = run(
        call,
        implementation,
        (q, k, v),
        sides,
        key_range=key_range,
        key_bound=key_bound,
        dropout_key=dropout_key if call.dropout else None,
    )
    return (out, lse) if return_lse else out


def run(
    call: _checks.Problem,
    implementation: str,
    arrays: Sequence[ArrayLike],
    sides: Sequence[ArrayLike | None],
    *,
    key_range: ArrayLike | None = None,
    key_bound: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, Array]:
    """Choose an implementation for checked arguments and call it: out [B, T, H, E] and lse [B, T, H].

    mask is [B or 1, H or 1, T or 1, S], bool; False hides a key.
    """
    chosen = _dispatch.choose("attention", implementation, call, IMPLEMENTATIONS)
    q, k, v = map(jnp.asarray, arrays)
    wide = np.float64 if call.dtype == "float64" else np.float32
    if 0 in (call.B, call.T, call.H):
        lse = jnp.zeros((call.B, call.T, call.H), wide)
        return jnp.zeros((*lse.shape, call.E), q.dtype), lse
    left, right = sides
    left = jnp.asarray(slopes(call.H) if left is None else left, wide)
    right = None if call.causal else left if right is None else jnp.asarray(right, wide)
    arguments = Arguments(
        q,
        k,
        v,
        jnp.broadcast_to(left, (call.B, call.H)),
        None if right is None else jnp.broadcast_to(right, (call.B, call.H)),
        None if key_range is None else jnp.asarray(key_range).astype(jnp.int32),
        None if key_bound is None else jnp.asarray(key_bound).astype(wide),
        None if mask is None else jnp.asarray(mask, bool),
        None if dropout_key is None else draw_seed(dropout_key),
    )
    out, lse = chosen.attention(arguments, call)
    return out, lse


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


def as_slopes(values: Slopes, wide: type) -> ArrayLike:
    """Slopes in the wide dtype; what JAX has not seen yet stays in NumPy, where values can be read when tracing."""
    return values.astype(wide) if isinstance(values, Array) else np.asarray(values, wide)


def _check_values(
    left: ArrayLike | None, right: ArrayLike | None, key_range: ArrayLike | None, S: int
) -> None:
    """Check what only the values tell, where they are known and reading them does not wait for a device."""
    for name, slope in (("left", left), ("right", right)):
        if slope is not None and _is_known(slope):
            _checks.check_slope_values("attention", name, np.asarray(slope))
    if key_range is not None and _is_known(key_range):
        _checks.check_key_range_values("attention", np.asarray(key_range), S)


def _is_known(array: ArrayLike) -> bool:
    if isinstance(array, jax.core.Tracer):
        return False
    return isinstance(array, np.ndarray) or _device(array) == "cpu"


def _kind(value: Any) -> str:
    return type(value).__name__
