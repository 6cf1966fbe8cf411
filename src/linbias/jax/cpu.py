"""The compiled CPU core as an XLA custom call. What it computes, and how: csrc/attention-inl.h."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linbias import _machine
from linbias._checks import Problem
from linbias.jax import operator
from linbias.jax.operator import Arguments, Gradients, Numbers
from linbias.kernels import core

NAME = core.NAME

WHY_MISSING: str | None = None
try:
    from linbias import _xla
except ImportError as error:  # not compiled here, or for another Python
    WHY_MISSING = f"the binding of the core to XLA cannot be imported ({error}); reinstall with a C++20 compiler"


def why_not(problem: Problem) -> str | None:
    """Say why the core cannot run a call, or None if it can."""
    if WHY_MISSING is not None:
        return WHY_MISSING
    if problem.mask:
        return "it takes a key_range but no mask"
    if problem.device.endswith("cpu devices"):
        return f"the arrays lie in parts on {problem.device}; call it inside jax.shard_map over batch and heads"
    return core.why_not(problem)


class Kept(NamedTuple):
    """What the core writes and backward reads: lse = row_max + log_sum."""

    out: Array  # [B, H, T, E], wide
    row_max: Array  # [B, H, T]
    log_sum: Array  # [B, H, T]
    visited: Array  # [B, H, tiles, 2], int32


def _forward(call: Arguments, numbers: Numbers, precise: bool) -> tuple[Array, Array, Kept]:
    (B, T, H, _), E, wide = call.q.shape, call.v.shape[3], call.left.dtype
    rows = jax.ShapeDtypeStruct((B, H, T), wide)
    results = (
        jax.ShapeDtypeStruct((B, H, T, E), wide),
        rows,
        rows,
        jax.ShapeDtypeStruct((B, H, core.num_tiles(T), 2), np.int32),
    )
    kept = Kept(*_call_core("forward", results, _operands(call), call, numbers, precise))
    out = kept.out.swapaxes(1, 2).astype(call.q.dtype)
    return out, (kept.row_max + kept.log_sum).swapaxes(1, 2), kept


def _backward(
    call: Arguments, numbers: Numbers, kept: Kept, dout: Array, dlse: Array
) -> Gradients:
    wide = call.left.dtype
    shapes = [
        (n, heads, T, size) for n, T, heads, size in (call.q.shape, call.k.shape, call.v.shape)
    ]
    slopes = jax.ShapeDtypeStruct(call.left.shape, wide)
    results = [*(jax.ShapeDtypeStruct(shape, wide) for shape in shapes), slopes, slopes]
    operands = (*_operands(call), *kept, dout.swapaxes(1, 2), dlse.swapaxes(1, 2))
    gradients = _call_core("backward", results, operands, call, numbers, precise=True)
    return Gradients(*(x.swapaxes(1, 2) for x in gradients[:3]), *gradients[3:])


_run = operator.define(NAME, _forward, _backward)


def attention(arguments: Arguments, call: Problem) -> tuple[Array, Array]:
    """Return out [B, T, H, E] and lse [B, T, H]."""
    return _run(arguments, call)


def _operands(call: Arguments) -> tuple[Array, ...]:
    """The arrays of a call in the order of the handlers; what it lacks is there but not read."""
    q, k, v, left, right, _, key_bound, _, seed = call
    B, G = k.shape[0], k.shape[2]
    key_range, query_start = _placement(call)
    return (
        q,
        k,
        v,
        left,
        left if right is None else right,
        jnp.zeros((B, G, 2), jnp.int32) if key_range is None else key_range,
        jnp.zeros((B,), jnp.int32) if query_start is None else query_start,
        jnp.zeros((B, G), left.dtype) if key_bound is None else key_bound,
        jnp.uint32(0) if seed is None else seed,
    )


def _placement(call: Arguments) -> tuple[Array | None, Array | None]:
    """Ranges [B, G, 2] and starts [B]. For ranges [B, 2], the last query stands at the last key of its range."""
    if call.key_range is None:
        return None, None
    (B, T), G = call.q.shape[:2], call.k.shape[2]
    key_range = jnp.broadcast_to(call.key_range[:, None], (B, G, 2))
    return key_range, call.key_range[:, 1] - T


def _call_core(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Array],
    call: Arguments,
    numbers: Numbers,
    precise: bool,
) -> Sequence[Array]:
    _register()
    (B, T, H, D), (S, G, E) = call.q.shape, call.v.shape[1:]
    run = jax.ffi.ffi_call(f"linbias_{name}", results, vmap_method="broadcast_all")
    found = run(
        *operands,
        causal=call.right is None,
        ranged=call.key_range is not None,
        started=call.key_range is not None,
        bounded=call.key_bound is not None and name == "forward",
        precise=precise,
        num_threads=np.int32(core.num_threads((B, H, G, T, S, D, E), _machine.num_cores())),
        **{field: np.float64(value) for field, value in numbers._asdict().items()},
    )
    return operator.vary_alike((found, call.q))[0]


@cache
def _register() -> None:
    for name in ("forward", "backward"):
        jax.ffi.register_ffi_target(f"linbias_{name}", getattr(_xla, name), platform="cpu")
