"""A call of attention from its arguments to its results: check them, fill in what they leave open, choose, run."""

import types
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from linbias import _dispatch, _request
from linbias.jax import places
from linbias.jax.dropout import draw_seed
from linbias.jax.impl import blocked, cpu, dense
from linbias.jax.operator import Inputs
from linbias.schedules import slopes as slopes_of_paper

# In the order in which "auto" asks them.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (cpu, blocked, dense)

ArrayLike = Array | np.ndarray[Any, Any]
Slopes = ArrayLike | Sequence[float]


class Options(TypedDict, total=False):
    """The keywords of `attention` but for return_lse."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: ArrayLike | None
    query_start: ArrayLike | None
    mask: ArrayLike | None
    positions: ArrayLike | None
    query_positions: ArrayLike | None
    key_bound: ArrayLike | None
    dropout: float
    dropout_key: Array | None
    tolerance: float | None
    implementation: str


def prepare(
    function: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: ArrayLike | None = None,
    query_start: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    key_bound: ArrayLike | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    tolerance: float | None = None,
    sequence_axes: Sequence[str] = (),
) -> tuple[Inputs, _request.Problem]:
    """Check the arguments of a call and fill in what they leave open: what the implementations take.

    sequence_axes: mesh axes of a shard_map over which the length is split, and the heads are not.
    """
    described = describe_all(function, q, k, v)
    wide = np.float64 if described[0].dtype == "float64" else np.float32
    left, right = (
        None if slope is None else _as_slopes(function, name, slope, wide)
        for name, slope in (("slopes", slopes), ("right_slopes", right_slopes))
    )
    optional = {"slopes": left, "right_slopes": right, "key_range": key_range}
    optional |= {"query_start": query_start, "key_bound": key_bound, "mask": mask}
    optional |= {"positions": positions, "query_positions": query_positions}
    problem = _request.check(
        function,
        *described,
        *(
            None if x is None else describe(name, x, function)._replace(device=described[0].device)
            for name, x in optional.items()
        ),
        causal=causal,
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
        layout="BTHD",
    )
    _request.warn_of_layout(function, problem, "BTHD")
    _check_values(function, left, right, key_range, query_start, problem.S)
    if positions is not None:
        _check_places(function, problem, positions, query_positions, key_range, query_start)
    if problem.dropout and dropout_key is None:
        raise ValueError(f"{function}: dropout needs a dropout_key, got None (dropout {dropout})")
    if left is None:
        _refuse_in_shard_map(function, sequence_axes)
        left = np.asarray(slopes_of_paper(problem.H) if problem.H else (), wide)
    if not causal and right is None:
        right = left
    of_heads = problem.B, problem.H
    stands = (None, None) if positions is None else places.in_parts(positions, query_positions)
    key_range, query_start = _start_and_range(key_range, query_start, problem)
    inputs = Inputs(
        q=jnp.asarray(q),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        left=jnp.broadcast_to(left, of_heads),
        right=None if right is None else jnp.broadcast_to(right, of_heads),
        key_range=key_range,
        query_start=query_start,
        key_bound=None if key_bound is None else jnp.asarray(key_bound).astype(wide),
        mask=None if mask is None else _with_four_axes(mask, problem, wide),
        positions=stands[0],
        query_positions=stands[1],
        seed=draw_seed(dropout_key) if problem.dropout and dropout_key is not None else None,
        scale=problem.scale,
        dropout=problem.dropout,
        tolerance=problem.tolerance,
    )
    return inputs, problem


def run(
    function: str, inputs: Inputs, problem: _request.Problem, implementation: str
) -> tuple[Array, Array]:
    """Choose an implementation and call it: out [B, T, H, E] and lse [B, T, H]."""
    chosen = _dispatch.choose(function, implementation, problem, IMPLEMENTATIONS)
    if 0 in (problem.B, problem.T, problem.H):
        lse = jnp.zeros((problem.B, problem.T, problem.H), inputs.left.dtype)
        return jnp.zeros((*lse.shape, problem.E), inputs.q.dtype), lse
    q_spec = spec_on_mesh(inputs.q)[:3]

    def attend(inputs: Inputs) -> tuple[Array, Array]:
        near, bias = places.stand_near(inputs)
        out, lse = chosen.attention(near)
        return out, lse if bias is None else lse - bias

    return on_its_mesh(attend, inputs, (P(*q_spec, None), P(*q_spec)))


def on_its_mesh(function: Callable[[Inputs], Any], inputs: Inputs, specs: Any) -> Any:
    """Run an implementation; where q lies on explicit axes of a mesh, the results lie as their specs say.

    Inside, the compiler decides what lies where, as for a mesh whose axes are not explicit.
    """
    mesh = jax.typeof(inputs.q).sharding.mesh
    if not mesh.explicit_axes:
        return function(inputs)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.sharding.auto_axes(function, out_sharding=specs)(inputs)


def spec_on_mesh(q: Array) -> tuple[Any, ...]:
    """How each axis of q is split over explicit axes of a mesh; None for one that is not."""
    spec = tuple(jax.typeof(q).sharding.spec)
    return (*spec, *[None] * (q.ndim - len(spec)))


def _refuse_in_shard_map(function: str, sequence_axes: Sequence[str]) -> None:
    """A shard cannot tell whether its heads are all there are, or those of a part, whose slopes are others."""
    mesh = jax.sharding.get_abstract_mesh()
    others = (name for name in mesh.manual_axes if name not in sequence_axes)
    split = [f"{name!r}" for name in others if mesh.shape[name] > 1]
    if split:
        raise ValueError(
            f"{function}: slopes must be given inside shard_map, here over {', '.join(split)}: those of the heads of"
            " the shard, a part of linbias.slopes(H) where heads are split, else all"
        )


def _start_and_range(
    key_range: ArrayLike | None, query_start: ArrayLike | None, problem: _request.Problem
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
        query_start = _clamp(query_start, -_request.LARGEST_START, _request.LARGEST_START)
    return key_range, query_start


def _with_four_axes(mask: ArrayLike, problem: _request.Problem, wide: type) -> Array:
    """[B or 1, H or 1, T or 1, S], bool or wide."""
    mask = jnp.asarray(mask, wide if problem.added else bool)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return jnp.broadcast_to(mask, (*mask.shape[:3], problem.S))


def _clamp(integers: ArrayLike, low: int, high: int) -> Array:
    integers = jnp.asarray(integers)
    limits = jnp.iinfo(integers.dtype)
    if isinstance(high, int):  # and no symbol of jax.export
        high = min(high, limits.max)
    clamped = jnp.clip(integers, max(low, limits.min), high)
    return clamped.astype(jnp.int32)


def describe_all(function: str, *arrays: Any) -> list[_request.Described]:
    """Describe q, k and v. Where one lies in parts on several devices, so does the call; the rest is JAX's to check."""
    found = [describe(name, x, function) for name, x in zip("qkv", arrays, strict=True)]
    device = max((x.device for x in found), key=lambda name: " " in name)
    return [x._replace(device=device) for x in found]


def describe(name: str, array: Any, function: str = "attention") -> _request.Described:
    """Describe an array to the argument rules. Anything else is refused, and so is float64 while JAX has it switched off."""
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
    return _request.Described(tuple(array.shape), array.dtype.name, _device(array))


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
        return _request.real_array(function, name, values).astype(wide)
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
            _request.check_slope_values(function, name, np.asarray(slope))
    if key_range is not None and _is_known(key_range):
        _request.check_key_range_values(function, np.asarray(key_range), S)
    if query_start is not None and _is_known(query_start):
        _request.check_query_start_values(function, np.asarray(query_start))


def _check_places(
    function: str,
    problem: _request.Problem,
    positions: ArrayLike,
    query_positions: ArrayLike | None,
    key_range: ArrayLike | None,
    query_start: ArrayLike | None,
) -> None:
    """Check the values of positions where all that tells which of them count is known."""
    given = positions, query_positions, key_range, query_start
    if all(x is None or _is_known(x) for x in given):
        x, xq, ranges, starts = (None if x is None else np.asarray(x) for x in given)
        assert x is not None
        _request.check_position_values(function, problem, x, xq, ranges, starts, depth=4)


def _is_known(array: ArrayLike) -> bool:
    if isinstance(array, jax.core.Tracer):
        return False
    return isinstance(array, np.ndarray) or _device(array) == "cpu"


def _kind(value: Any) -> str:
    return type(value).__name__
