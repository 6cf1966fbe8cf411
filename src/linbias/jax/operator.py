"""The inputs of implementations, and how forward and backward become differentiable."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What an implementation is given, checked: arrays, then numbers.

    "Wide" is float64 for float64 inputs and float32 otherwise.
    """

    q: Array  # [B, T, H, D]
    k: Array  # [B, S, G, D]
    v: Array  # [B, S, G, E]
    left: Array  # [B, H], wide
    right: Array | None  # likewise; None: causal
    key_range: Array | None  # [B, G, 2], int32, within 0 and S; None: all keys
    query_start: Array | None  # [B], int32, the position of query 0; None: S - T
    key_bound: Array | None  # [B, G], wide; only forward may use it
    # [B or 1, H or 1, T or 1, S]: bool, False hides a key; or wide, added to the scores
    mask: Array | None
    # In parts, as `standing` has them: [B, 1 or H, S, parts], and [B, 1 or H, T, parts] or None.
    # Implementations are given all heads and both, or neither, where key s stands at s.
    positions: Array | None
    query_positions: Array | None
    query_range: Array | None  # [B, T, 2], int32, within 0 and S; None: all keys
    seed: Array | None  # [], uint32; None: no dropout
    # Numbers, which have to be known when the call is traced.
    scale: float = field(metadata={"static": True})
    dropout: float = field(metadata={"static": True})
    tolerance: float = field(metadata={"static": True})
    precise: bool = field(default=False, metadata={"static": True})  # will be differentiated


class Gradients(NamedTuple):
    """What backward gives, in any dtype."""

    dq: Array
    dk: Array
    dv: Array
    dleft: Array  # [B, H]
    dright: Array
    dpositions: Array | None = None  # [B, H, S]
    dquery_positions: Array | None = None  # [B, H, T]


@contextmanager
def own_code() -> Iterator[None]:
    """Let programs be strict with themselves alone: ours mixes ranks and dtypes as NumPy does, and
    an infinite score hides a key.
    """
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_infs(False),
    ):
        yield


def define(
    name: str,
    forward: Callable[[Inputs], tuple[Array, Array, Any]],
    backward: Callable[[Inputs, Any, Array, Array], Gradients],
) -> Callable[[Inputs], tuple[Array, Array]]:
    """Make one differentiable function of an implementation's forward and backward: out and lse of
    the inputs.

    forward: out [B, T, H, E] in the dtype of q, lse [B, T, H], wide, and what backward needs
    besides the inputs, row_max and log_sum among it.
    backward: of these, of dout [B, T, H, E] and of dlse [B, T, H], both wide.
    """
    forward_once = _differentiable_once(name, forward)
    backward_once = _differentiable_once(name, backward)

    @jax.custom_vjp
    def attention(inputs: Inputs) -> tuple[Array, Array]:
        return forward(inputs)[:2]

    @own_code()
    def save(inputs: Inputs) -> tuple[Any, Any]:
        out, lse, saved = forward_once(replace(inputs, precise=True))
        return (out, lse), _with_bounds(_finite, inputs, saved)

    @own_code()
    def differentiate(residuals: Any, cotangents: Any) -> tuple[Inputs]:
        inputs, saved = _with_bounds(_infinite, *residuals)
        dout, dlse = (x.astype(inputs.left.dtype) for x in cotangents)
        return (_cotangents(inputs, backward_once(inputs, saved, dout, dlse)),)

    attention.defvjp(save, differentiate)
    compiled = jax.jit(lambda inputs: attention(with_the_same_mesh_axes(inputs)))

    def run(inputs: Inputs) -> tuple[Array, Array]:
        try:
            return compiled(inputs)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise NotImplementedError(
                f"attention: {name} has no forward-mode derivative; implementation='dense' has it"
            ) from error

    return run


def _with_bounds(
    bound: Callable[[Array], Array], inputs: Inputs, saved: Any
) -> tuple[Inputs, Any]:
    """What backward is given, with infinities as `bound` writes them: jax_debug_infs looks at what
    a compiled function keeps.
    """
    right = None if inputs.right is None else bound(inputs.right)
    rows = {name: bound(getattr(saved, name)) for name in ("row_max", "log_sum")}
    return replace(inputs, left=bound(inputs.left), right=right), saved._replace(**rows)


def _finite(x: Array) -> Array:
    return jnp.clip(x, jnp.finfo(x.dtype).min, jnp.finfo(x.dtype).max)


def _infinite(x: Array) -> Array:
    return jnp.where(jnp.abs(x) == jnp.finfo(x.dtype).max, jnp.sign(x) * jnp.inf, x)


def with_the_same_mesh_axes(arrays: Any) -> Any:
    """Let all arrays of a tree vary over the same mesh axes: inside shard_map a loop's state and a
    gradient must.

    Only operations on several arrays bring them together in every version of JAX; the compiler
    removes these.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    never = jnp.bool_(False)
    for x in leaves:
        never = never & (x.ravel()[:1] != x.ravel()[:1]).any()
    return jax.tree.unflatten(tree, [jnp.where(never, x, x) for x in leaves])


def _differentiable_once(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a second derivative while it is traced, with a message."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"attention: {name} gives first derivatives only; implementation='dense' gives all"
        )

    once = jax.custom_vjp(function)
    once.defvjp(refuse, refuse)
    return once


def _cotangents(inputs: Inputs, gradients: Gradients) -> Inputs:
    """Gradients in the dtypes of their inputs; an infinite slope hides its side and has none."""
    left, right = inputs.left, inputs.right
    return replace(
        inputs,
        q=gradients.dq.astype(inputs.q.dtype),
        k=gradients.dk.astype(inputs.k.dtype),
        v=gradients.dv.astype(inputs.v.dtype),
        left=jnp.where(jnp.isinf(left), 0, gradients.dleft),
        right=None if right is None else jnp.where(jnp.isinf(right), 0, gradients.dright),
        key_range=None,
        query_start=None,
        key_bound=None,
        mask=None,
        query_range=None,
        seed=None,
        positions=_of_parts(inputs.positions, gradients.dpositions),
        query_positions=_of_parts(inputs.query_positions, gradients.dquery_positions),
    )


def _of_parts(x: Array | None, gradient: Array | None) -> Array | None:
    """[B, H, n] as that of each part of x [B, H, n, parts]: x is their sum."""
    if x is None or gradient is None:
        return None
    return jnp.broadcast_to(gradient[..., None], x.shape).astype(x.dtype)
