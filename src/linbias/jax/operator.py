"""What implementations share: their arguments, and how a pair of functions becomes differentiable."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from linbias._checks import Problem


class Arguments(NamedTuple):
    """The arrays of one call; "wide" is float64 for float64 inputs, else float32."""

    q: Array  # [B, T, H, D]
    k: Array  # [B, S, G, D]
    v: Array  # [B, S, G, E]
    left: Array  # [B, H], wide
    right: Array | None  # likewise; None: causal
    key_range: Array | None  # [B, 2], int32
    key_bound: Array | None  # [B, G], wide
    mask: (
        Array | None
    )  # [B or 1, H or 1, T or 1, S], bool: False hides a key that else would be seen
    seed: Array | None  # [], uint32; None: no dropout


class Numbers(NamedTuple):
    """What has to be known when a call is traced."""

    scale: float
    dropout: float
    tolerance: float


class Gradients(NamedTuple):
    """What backward gives, in any dtype."""

    dq: Array
    dk: Array
    dv: Array
    dleft: Array  # [B, H]
    dright: Array


class Forward(Protocol):
    """Return out [B, T, H, E] in the dtype of q, lse [B, T, H], wide, and what backward wants to be kept."""

    def __call__(
        self, arguments: Arguments, numbers: Numbers, precise: bool, /
    ) -> tuple[Array, Array, Any]: ...


class Backward(Protocol):
    """Take what forward kept, dout [B, T, H, E] and dlse [B, T, H], both wide."""

    def __call__(
        self, arguments: Arguments, numbers: Numbers, kept: Any, dout: Array, dlse: Array, /
    ) -> Gradients: ...


Attention = Callable[[Arguments, Problem], tuple[Array, Array]]


def define(name: str, forward: Forward, backward: Backward) -> Attention:
    """Make one differentiable function of an implementation's forward and backward."""

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def attention(arguments: Arguments, numbers: Numbers) -> tuple[Array, Array]:
        return forward(arguments, numbers, False)[:2]

    def keep(arguments: Arguments, numbers: Numbers) -> tuple[Any, Any]:
        once = _once(name, lambda arguments: forward(arguments, numbers, True))
        out, lse, kept = once(arguments)
        return (out, lse), (arguments, kept)

    def differentiate(numbers: Numbers, saved: Any, cotangents: Any) -> tuple[Arguments]:
        arguments, kept = saved
        dout, dlse = (x.astype(arguments.left.dtype) for x in cotangents)
        once = _once(name, lambda arguments, *rest: backward(arguments, numbers, *rest))
        return (_cotangents(arguments, once(arguments, kept, dout, dlse)),)

    attention.defvjp(keep, differentiate)

    @partial(jax.jit, static_argnums=1)
    def run(arguments: Arguments, numbers: Numbers) -> tuple[Array, Array]:
        return attention(vary_alike(arguments), numbers)

    return lambda arguments, call: run(
        arguments, Numbers(call.scale, call.dropout, call.tolerance)
    )


def vary_alike(arrays: Any) -> Any:
    """Make arrays vary over the same mesh axes: inside shard_map a loop's state and a gradient must.

    Only operations on several arrays bring them together in every version of JAX; the compiler removes these.
    """
    leaves, tree = jax.tree.flatten(arrays)
    never = jnp.bool_(False)
    for x in leaves:
        never = never & (x.ravel()[:1] != x.ravel()[:1]).any()
    return jax.tree.unflatten(tree, [jnp.where(never, x, x) for x in leaves])


def _once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a second derivative at trace time, in words."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"attention: {name} gives first derivatives only; implementation='dense' gives all"
        )

    once = jax.custom_vjp(function)
    once.defvjp(refuse, refuse)
    return once


def _cotangents(arguments: Arguments, gradients: Gradients) -> Arguments:
    """Gradients in the dtypes of their arguments; an infinite slope hides its side and has none."""
    dq, dk, dv, dleft, dright = gradients
    left, right = arguments.left, arguments.right
    return Arguments(
        dq.astype(arguments.q.dtype),
        dk.astype(arguments.k.dtype),
        dv.astype(arguments.v.dtype),
        jnp.where(jnp.isinf(left), 0, dleft),
        None if right is None else jnp.where(jnp.isinf(right), 0, dright),
        key_range=None,
        key_bound=None,
        mask=None,
        seed=None,
    )
