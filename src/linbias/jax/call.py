"""A call of attention: check its arguments, fill in what is left open, choose, run."""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from linbias import _dispatch, _request
from linbias._request import Described, Problem, Request, checks, stamps
from linbias.jax import standing
from linbias.jax.dropout import draw_seed
from linbias.jax.impl import blocked, cpu, dense
from linbias.jax.operator import Inputs, own_code
from linbias.schedules import slopes as slopes_of_paper

count = functools.partial(jnp.arange, dtype=np.int32)

# In the order in which "auto" asks them.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (cpu, blocked, dense)

ArrayLike = Array | np.ndarray[Any, Any]
Slopes = ArrayLike | Sequence[float]


_FIELDS = {field.name for field in dataclasses.fields(Inputs)}


@own_code()
def prepare(
    function: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None,
    *,
    right_slopes: Slopes | None = None,
    sequence_axes: Sequence[str] = (),
    **options: Any,
) -> tuple[Inputs, Problem]:
    """Check the arguments of a call and fill in what they leave open: what the implementations
    take.

    sequence_axes: mesh axes of a shard_map over which the length is split, and the heads are not.
    """
    x, xq = options.get("positions"), options.get("query_positions")
    if isinstance(x, np.ndarray) and (xq is None or isinstance(xq, np.ndarray)):
        x, xq = stamps.as_numbers(function, x, xq)
        options.update(positions=x, query_positions=xq)
    of_call = [_describe(function, name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    # Where one lies in parts on several devices, so does the call; the rest is JAX's to check.
    device = max((x.device for x in of_call), key=lambda name: " " in name)
    wide = np.float64 if of_call[0].dtype == "float64" else np.float32
    left, right = (
        None if slope is None else _as_slopes(function, name, slope, wide)
        for name, slope in (("slopes", slopes), ("right_slopes", right_slopes))
    )
    request = Request(q=q, k=k, v=v, slopes=left, right_slopes=right, **options)
    given = {name: getattr(request, name) for name in _request.ARRAYS}
    described: Any = {
        name: _describe(function, name, x)._replace(device=device)
        for name, x in given.items()
        if x is not None
    }
    problem = _request.check(function, request._replace(**described), "BTHD")
    _request.warn_of_layout(function, problem, "BTHD", depth=4)
    checks.check_slopes(function, request, _read)
    checks.check_values(function, problem, request, _read, depth=4)
    if problem.dropout and request.dropout_key is None:
        raise ValueError(
            f"{function}: dropout needs a dropout_key, got None (dropout {problem.dropout})"
        )
    if left is None:
        _refuse_in_shard_map(function, sequence_axes)
        left = np.asarray(slopes_of_paper(problem.H) if problem.H else (), wide)
    mask = request.mask
    if mask is not None:
        mask = jnp.asarray(mask, wide if problem.added else bool)
    # Traced values are unchecked: limits keep every index among the keys and every loop short.
    farthest = _request.LARGEST_START
    limited = request._replace(
        key_range=_clamp(request.key_range, 0, problem.S),
        query_start=_clamp(request.query_start, -farthest, farthest),
        query_range=_clamp(request.query_range, 0, problem.S),
        mask=mask,
    )
    filled = _request.fill(
        limited,
        problem,
        left,
        jnp,
        lambda ranges: ranges[..., 1].max(1, initial=0),
        count,
    )
    of_heads, key_bound, mask = (problem.B, problem.H), filled["key_bound"], filled["mask"]
    right = filled["right"]
    x, xq = request.positions, request.query_positions
    if x is not None:
        x, xq = standing.in_parts(x, xq, _known_ranges(request, problem))
    inputs = Inputs(
        **{
            **{name: x for name, x in filled.items() if name in _FIELDS},
            **{name: jnp.asarray(filled[name]) for name in "qkv"},
            "left": jnp.broadcast_to(filled["left"], of_heads),
            "right": None if right is None else jnp.broadcast_to(right, of_heads),
            "key_bound": None if key_bound is None else jnp.asarray(key_bound).astype(wide),
            "mask": None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:3], problem.S)),
        },
        positions=x,
        query_positions=xq,
        seed=draw_seed(request.dropout_key) if problem.dropout else None,
    )
    return inputs, problem


def _known_ranges(request: Request[ArrayLike], problem: Problem) -> np.ndarray[Any, Any] | None:
    """The ranges of keys of all query heads, [B, 1 or H, 2], where they can be read."""
    if request.key_range is None or (ranges := _read(request.key_range)) is None:
        return None
    ranges = checks.as_int64(ranges)
    if ranges.ndim == 2:
        return ranges[:, None]
    return ranges.repeat(problem.H // max(1, problem.G), axis=1)


def run(
    function: str, inputs: Inputs, problem: Problem, implementation: str
) -> tuple[Array, Array]:
    """Choose an implementation and call it: out [B, T, H, E] and lse [B, T, H]."""
    chosen = _dispatch.choose(function, implementation, problem, IMPLEMENTATIONS)
    if 0 in (problem.B, problem.T, problem.H):
        lse = jnp.zeros((problem.B, problem.T, problem.H), inputs.left.dtype)
        return jnp.zeros((*lse.shape, problem.E), inputs.q.dtype), lse
    q_spec = spec_on_mesh(inputs.q)[:3]

    def attend(inputs: Inputs) -> tuple[Array, Array]:
        near, bias = standing.stand_near(inputs)
        out, lse = chosen.attention(near)
        return out, lse if bias is None else lse - bias

    return on_its_mesh(attend, inputs, (P(*q_spec, None), P(*q_spec)))


@own_code()
def on_its_mesh(function: Callable[[Inputs], Any], inputs: Inputs, specs: Any) -> Any:
    """Run an implementation; on explicit axes of a mesh the results lie as their specs say."""
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
    """A shard cannot tell whether its heads are all there are, or a part with other slopes."""
    mesh = jax.sharding.get_abstract_mesh()
    others = (name for name in mesh.manual_axes if name not in sequence_axes)
    split = [f"{name!r}" for name in others if mesh.shape[name] > 1]
    if split:
        raise ValueError(
            f"{function}: slopes must be given inside shard_map, here over {', '.join(split)}: of"
            " the heads of the shard, a part of linbias.slopes(H) where heads are split, else all"
        )


def _clamp(integers: ArrayLike | None, low: int, high: int) -> Array | None:
    """As int32, moved to the nearest that is allowed."""
    if integers is None:
        return None
    integers = jnp.asarray(integers)
    limits = jnp.iinfo(integers.dtype)
    if isinstance(high, int):  # and no symbol of jax.export
        high = min(high, limits.max)
    return jnp.clip(integers, max(low, limits.min), high).astype(jnp.int32)


def _describe(function: str, name: str, array: Any) -> Described:
    """Describe an array to the rules; refuse what is none, and float64 that JAX would round."""
    if not isinstance(array, Array | np.ndarray):
        raise TypeError(
            f"{function}: {name} must be a jax.Array or numpy.ndarray, got {type(array).__name__}"
        )
    rounded = jax.dtypes.canonicalize_dtype(np.float64) != np.float64
    if name in "qkv" and array.dtype == np.float64 and rounded:
        raise TypeError(
            f"{function}: {name} must be at most float32 while jax_enable_x64 is off, got float64"
        )
    return Described(tuple(array.shape), array.dtype.name, _device(array))


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
    """Slopes in the wide dtype; what is no JAX array stays in NumPy, known even when tracing."""
    if not isinstance(values, Array):
        return checks.real_array(function, name, values).astype(wide)
    if jnp.iscomplexobj(values):
        raise TypeError(f"{function}: {name} must hold real numbers, got {values.dtype.name}")
    return values.astype(wide)


def _read(array: ArrayLike) -> np.ndarray[Any, Any] | None:
    """The values, where they are known and reading them does not wait for a device."""
    if isinstance(array, jax.core.Tracer):
        return None
    return np.asarray(array) if isinstance(array, np.ndarray) or _device(array) == "cpu" else None
