"""The compiled CPU core as an XLA custom call (how it works: csrc/kernel/attention-inl.h)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linbias import _machine
from linbias._request import Problem
from linbias.jax import operator
from linbias.jax.operator import Gradients, Inputs
from linbias.kernels import core

NAME = core.NAME
ABILITIES = replace(
    core.ABILITIES,
    how="near to far in compiled code, called by XLA",
    has=("positions", "dropout", "transformed"),
)

WHY_MISSING: str | None = None
try:
    from linbias import _xla
except ImportError as error:  # not compiled here, or for another Python
    WHY_MISSING = f"the binding of the core to XLA cannot be imported ({error}); reinstall with"
    WHY_MISSING += " a C++20 compiler"


def why_not(problem: Problem) -> str | None:
    if WHY_MISSING is not None:
        return WHY_MISSING
    if problem.device.endswith("cpu devices"):
        return (
            f"the arrays lie in parts on {problem.device};"
            " call it inside jax.shard_map over batch and heads"
        )
    return core.why_not(problem)


class Results(NamedTuple):
    """What the core writes and backward reads: lse = row_max + log_sum."""

    out: Array  # [B, H, T, E], wide
    row_max: Array  # [B, H, T]
    log_sum: Array  # [B, H, T]
    visited: Array  # [B, H, tiles, 2], int32


def _forward(inputs: Inputs) -> tuple[Array, Array, Results]:
    (B, T, H, _), E, wide = inputs.q.shape, inputs.v.shape[3], inputs.left.dtype
    rows = jax.ShapeDtypeStruct((B, H, T), wide)
    shapes = (
        jax.ShapeDtypeStruct((B, H, T, E), wide),
        rows,
        rows,
        jax.ShapeDtypeStruct((B, H, core.num_tiles(T), 2), np.int32),
    )
    results = Results(*_call_core("forward", shapes, _operands(inputs), inputs))
    out = results.out.swapaxes(1, 2).astype(inputs.q.dtype)
    return out, (results.row_max + results.log_sum).swapaxes(1, 2), results


def _backward(inputs: Inputs, saved: Results, dout: Array, dlse: Array) -> Gradients:
    wide = inputs.left.dtype
    sizes = (x.shape for x in (inputs.q, inputs.k, inputs.v))
    shapes = [
        jax.ShapeDtypeStruct((n, heads, length, size), wide) for n, length, heads, size in sizes
    ]
    slopes = jax.ShapeDtypeStruct(inputs.left.shape, wide)
    places = [
        jax.ShapeDtypeStruct((0,) if x is None else x.shape[:3], wide)
        for x in (inputs.positions, inputs.query_positions)
    ]
    operands = (*_operands(inputs), *saved, dout.swapaxes(1, 2), dlse.swapaxes(1, 2))
    inputs = replace(inputs, precise=True)
    gradients = _call_core("backward", [*shapes, slopes, slopes, *places], operands, inputs)
    return Gradients(*(x.swapaxes(1, 2) for x in gradients[:3]), *gradients[3:])


attention = operator.define(NAME, _forward, _backward)


def _operands(inputs: Inputs) -> tuple[Array, ...]:
    """The arrays in the order of the handlers; what the call lacks is there but not read."""
    left, (B, _, G) = inputs.left, inputs.k.shape[:3]
    nowhere = jnp.zeros((B, 1, 1, 1), jnp.float32)
    optional = (
        (inputs.right, left),
        (inputs.key_range, jnp.zeros((B, G, 2), jnp.int32)),
        (inputs.query_start, jnp.zeros((B,), jnp.int32)),
        (inputs.key_bound, jnp.zeros((B, G), left.dtype)),
        (inputs.positions, nowhere),
        (inputs.query_positions, nowhere),
        (inputs.query_range, jnp.zeros((B, 1, 2), jnp.int32)),
        (inputs.seed, jnp.uint32(0)),
    )
    given = (instead if x is None else x for x, instead in optional)
    return (inputs.q, inputs.k, inputs.v, left, *given)


def _call_core(
    name: str, results: Sequence[jax.ShapeDtypeStruct], operands: Sequence[Array], inputs: Inputs
) -> Sequence[Array]:
    _register()
    (B, T, H, D), (S, G, E) = inputs.q.shape, inputs.v.shape[1:]
    run = jax.ffi.ffi_call(f"linbias_{name}", results, vmap_method="broadcast_all")
    written = run(
        *operands,
        causal=inputs.right is None,
        ranged=inputs.key_range is not None,
        started=inputs.query_start is not None,
        bounded=inputs.key_bound is not None and name == "forward",
        placed=inputs.positions is not None,
        limited=inputs.query_range is not None,
        precise=inputs.precise,
        num_threads=np.int32(core.num_threads((B, H, G, T, S, D, E), _machine.num_cores())),
        scale=np.float64(inputs.scale),
        dropout=np.float64(inputs.dropout),
        tolerance=np.float64(inputs.tolerance),
    )
    return operator.with_the_same_mesh_axes((written, inputs.q))[0]


@cache
def _register() -> None:
    for name in ("forward", "backward"):
        jax.ffi.register_ffi_target(f"linbias_{name}", getattr(_xla, name), platform="cpu")
