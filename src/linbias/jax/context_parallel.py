"""One sequence over a mesh axis: each device has a shard and fetches the keys that it lacks.

Each device sends the rows beside its edge, for each key/value head as many as that head's halo,
and calls attention once over what it has then; beyond a head's own halo lies its key_range:

    keys of a device    [ . . left halo ][ own shard ][ right halo . . ]

A halo longer than a shard comes in hops, hop i straight from the i-th neighbour.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linbias import _request
from linbias._request import Problem, checks, keywords, seen
from linbias.jax.call import ArrayLike, Slopes, count, prepare, run
from linbias.jax.functional import Sides
from linbias.jax.impl.certificate import norm
from linbias.jax.impl.tiles import LEFT, RIGHT
from linbias.jax.operator import Inputs, own_code
from linbias.near_to_far import reach

__all__ = ["attention", "needed_halo"]

Halo = int | Sequence[int] | ArrayLike
AxisName = str | tuple[str, ...]


class Weighing(Sides, total=False):
    """The keywords of `linbias.jax.attention` that a sequence in shards has too."""

    tolerance: float | None
    window: tuple[int, int] | None


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = ...,
    *,
    axis_name: AxisName,
    halo: Halo,
    implementation: str = ...,
    return_lse: Literal[True],
    **options: Unpack[Weighing],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = ...,
    *,
    axis_name: AxisName,
    halo: Halo,
    implementation: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Weighing],
) -> Array: ...
@keywords.show_keywords(Weighing)
@own_code()
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None = None,
    *,
    axis_name: AxisName,
    halo: Halo,
    implementation: str = "auto",
    return_lse: bool = False,
    **options: Unpack[Weighing],
) -> Array | tuple[Array, Array]:
    """Attend over one sequence in shards on the devices of a mesh axis, inside `jax.shard_map`.

    The result is the device's shard of what `linbias.jax.attention` gives for the whole sequence,
    if every key that can matter lies in the own shard or within the halo; a halo below
    `needed_halo` can give another one without a word:

        keys of shard i of T:    i * T - halo  ..  (i + 1) * T - 1 (causal), or + halo

    Each device sends B * (D + E) * (sum of the halos over the key/value heads) numbers to each
    open side, and as many backward. Differentiable once in q, k, v, slopes and right_slopes,
    through out and lse; gradients of slopes that devices share are added up.

    Args:
        q: [B, T, H, D], as for `linbias.jax.attention`: the device's shard. All shards have T
            queries and T keys, in the order of the mesh axis.
        k: [B, T, G, D], dtype of q.
        v: [B, T, G, E], dtype of q.
        slopes: [H] or [B, H]. None means `linbias.slopes(H)`, and is refused where another mesh
            axis may split heads.
        axis_name: The mesh axis, or several as in a PartitionSpec, over which the sequence lies.
        halo: An integer, or one for each key/value head, known when the program is traced: how
            many keys to fetch beyond each open side of the shard. Causal attention, and slopes
            known to be inf for all query heads of a key/value head, close a side, and no more is
            fetched than a window shows.
        causal, right_slopes, scale, implementation, return_lse: As for `linbias.jax.attention`.
        tolerance: Half for keys that are not read, half for keys beyond `needed_halo`.
        window: (left, right), as for `linbias.jax.attention`; a halo of the larger is enough.

    Returns:
        [B, T, H, E] in q's dtype; with return_lse also lse [B, T, H], float32 or float64.

    Raises:
        TypeError: As `linbias.jax.attention`; the halo is traced or no integer; an argument is for
            whole sequences.
        ValueError: As `linbias.jax.attention`; q, k and v are not equally long; a halo breaks the
            rule above; no shard_map around the call has the axis.
        NotImplementedError: As `linbias.jax.attention`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh, shards = jax.make_mesh((jax.device_count(),), ("x",)), P(None, "x")
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 4))
        >>> q, k, v = jax.device_put((q, k, v), NamedSharding(mesh, shards))
        >>> measure = partial(needed_halo, axis_name="x")
        >>> halo = jax.shard_map(measure, mesh=mesh, in_specs=shards, out_specs=P())(q, k)
        >>> attend = partial(attention, axis_name="x", halo=np.asarray(halo))
        >>> jax.shard_map(attend, mesh=mesh, in_specs=shards, out_specs=shards)(q, k, v).shape
        (1, 128, 2, 4)
    """
    function = "context_parallel.attention"
    inputs, problem, num_shards = _prepare(function, q, k, v, slopes, axis_name, options)
    B, T, G = problem.B, problem.T, problem.G
    halos = np.minimum(_check_halo(function, halo, G), (num_shards - 1) * T)
    right_slopes = options.get("right_slopes")
    right_slopes = slopes if right_slopes is None else right_slopes
    window = options.get("window")
    within = [
        halos if limit < 0 else np.minimum(halos, limit)
        for limit in seen.check_window(function, window, problem.causal)
    ]
    on_the_left = np.where(_hidden(slopes, problem), 0, within[0])
    on_the_right = np.where(problem.causal | _hidden(right_slopes, problem), 0, within[1])
    own = jnp.concatenate([inputs.k, inputs.v], axis=-1)
    before = _fetch(own, on_the_left, axis_name, num_shards, LEFT)
    after = _fetch(own, on_the_right, axis_name, num_shards, RIGHT)
    keys, values = jnp.split(jnp.concatenate([*before, own, *after], axis=1), [problem.D], axis=-1)
    index = lax.axis_index(axis_name)
    start = int(on_the_left.max(initial=0))
    first = start - jnp.minimum(on_the_left, index * T)
    end = start + T + jnp.minimum(on_the_right, (num_shards - 1 - index) * T)
    key_range = jnp.stack([first, end], axis=-1).astype(jnp.int32)
    tolerance = problem.tolerance / 2
    problem = replace(
        problem, S=keys.shape[1], key_range=True, query_start=True, tolerance=tolerance
    )
    query_start = jnp.full(B, start, jnp.int32)
    inputs = replace(
        inputs,
        k=keys,
        v=values,
        key_range=jnp.broadcast_to(key_range, (B, G, 2)),
        query_start=query_start,
        query_range=seen.ranges_of_queries(None, window, problem, query_start, jnp, count),
        tolerance=tolerance,
    )
    out, lse = run(function, inputs, problem, implementation)
    return (out, lse) if return_lse else out


@keywords.show_keywords(Weighing)
@own_code()
def needed_halo(
    q: ArrayLike,
    k: ArrayLike,
    slopes: Slopes | None = None,
    *,
    axis_name: AxisName,
    **options: Unpack[Weighing],
) -> Array:
    """Measure how many keys beyond its shard each key/value head needs, inside `jax.shard_map`.

    With c the mean key, and a radius within which the keys of all devices lie around it, the keys
    left of a query q from distance d on weigh together at most

        exp(scale * q . c + |scale| * |q| * radius - slope * d) / (1 - exp(-slope))

    and so on the right. The answer is the smallest halo for which that is at most half of the
    tolerance (a quarter on each side, where two are open) of what the keys of the own shard weigh,
    for every query of all devices. It holds for these finite q, k and slopes: leave a margin, or
    measure again now and then. Costs a forward pass over the own shard. Not differentiable.

    Args:
        q, k, slopes, axis_name, causal, right_slopes, scale, window: As for `attention`.
        tolerance: As for `attention`; 0 needs all keys.

    Returns:
        [G], int32, the same on all devices: what `attention` takes as `halo`, as NumPy array.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh, shards = jax.make_mesh((1,), ("x",)), P(None, "x")  # one device
        >>> q = jax.device_put(jnp.ones((1, 6, 2, 4)), NamedSharding(mesh, shards))
        >>> measure = partial(needed_halo, axis_name="x")
        >>> jax.shard_map(measure, mesh=mesh, in_specs=shards, out_specs=P())(q, q).tolist()
        [0, 0]
    """
    function = "context_parallel.needed_halo"
    inputs, problem, num_shards = _prepare(function, q, k, k, slopes, axis_name, options)
    B, T, H, G = problem.B, problem.T, problem.H, problem.G
    if 0 in (B, T, H):
        return jnp.zeros(G, jnp.int32)
    inputs = lax.stop_gradient(inputs)
    # What is visible at least: the own keys.
    lse = run(function, inputs, problem, "auto")[1].reshape(B, T, G, H // G)
    wide = inputs.left.dtype
    slack = (problem.D + 8) * float(jnp.finfo(wide).eps)  # as in certificate.py
    rows = inputs.q.astype(wide).reshape(B, T, G, H // G, -1) * inputs.scale
    keys = inputs.k.astype(wide)
    center = lax.pmean(keys.mean(1), axis_name)
    radius = norm(keys - center[:, None]).max(1) * (1 + slack)
    # A key that is not finite lies infinitely far away, and is needed.
    radius = lax.pmax(jnp.where(jnp.isnan(radius), jnp.inf, radius), axis_name)
    largest = norm(center) + radius
    spread = (radius + 2 * slack * largest)[:, None, :, None]
    aligned = jnp.einsum("btgnd,bgd->btgn", rows, center, precision=lax.Precision.HIGHEST)
    most = aligned + norm(rows) * (1 + slack) * spread
    share = problem.tolerance / (2 if inputs.right is None else 4)
    tolerance, lead = math.exp(_request.log_share(share)), most - lse

    def needed(slope: Array, nearest: Array, num_keys: Array, limit: int) -> Array:
        """[G]; nearest [T, 1, 1]: how far the first of num_keys keys beyond lies from a row, which
        sees as far as the limit of a window, if there is one.
        """
        slope = slope.reshape(B, 1, G, H // G)
        distance = reach(slope, lead, tolerance=tolerance, num_keys=num_keys, xp=jnp)
        keys = jnp.ceil(distance * (1 + 2 * slack)) - nearest
        few = keys < num_keys  # False for NaN
        keys = jnp.where(few, jnp.where(few, keys, 0).astype(jnp.int32), num_keys)
        if limit >= 0:
            keys = jnp.minimum(keys, min(limit, seen.LARGEST_WINDOW) + 1 - nearest)
        return jnp.maximum(keys, 0).max((0, 1, 3))

    left, right = seen.check_window(function, options.get("window"), problem.causal)
    index, row = lax.axis_index(axis_name), jnp.arange(T)[:, None, None]
    halo = needed(inputs.left, row + 1, index * T, left)
    if inputs.right is not None:
        on_the_right = needed(inputs.right, T - row, (num_shards - 1 - index) * T, right)
        halo = jnp.maximum(halo, on_the_right)
    return lax.pmax(halo, axis_name).astype(jnp.int32)


def _fetch(
    own: Array, halos: np.ndarray[Any, Any], axis_name: AxisName, num_shards: int, side: int
) -> list[Array]:
    """Fetch the rows beside the shard [B, T, G, size], a part for each hop; zeros for no rows."""
    T, parts = own.shape[1], []
    for hop in range(1, num_shards):
        counts = np.clip(halos - (hop - 1) * T, 0, T)
        num_rows = int(counts.max(initial=0))
        if num_rows == 0:
            break
        rows = own[:, T - num_rows :] if side == LEFT else own[:, :num_rows]
        # Which rows of which head the receiver is to have, and where: those nearest to it.
        row = np.arange(num_rows)[:, None]
        sent = np.nonzero(row >= num_rows - counts if side == LEFT else row < counts)
        pairs = [
            (i, i - side * hop) for i in range(num_shards) if 0 <= i - side * hop < num_shards
        ]
        message = lax.ppermute(rows[:, *sent], axis_name, pairs)
        parts.append(jnp.zeros_like(rows).at[:, *sent].set(message))
    return parts[::side]


def _prepare(
    function: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: Slopes | None,
    axis_name: AxisName,
    options: Mapping[str, Any],
) -> tuple[Inputs, Problem, int]:
    """What the own shard comes to, and the number of shards."""
    _refuse_unknown(function, options)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{function}: axis_name must be a string or a tuple of strings, got {axis_name!r}"
        )
    try:
        num_shards = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{function}: axis_name must be an axis of the jax.shard_map around the call,"
            f" got {axis_name!r}"
        ) from None
    inputs, problem = prepare(function, q, k, v, slopes, sequence_axes=names, **options)
    if problem.T != problem.S:
        raise ValueError(
            f"{function}: k must be as long as q, a shard of the same sequence,"
            f" got {problem.S} keys and {problem.T} queries"
        )
    return inputs, problem, num_shards


def _check_halo(function: str, halo: Halo, num_heads: int) -> np.ndarray[Any, Any]:
    """[G], at least 0."""
    if isinstance(halo, jax.core.Tracer):
        raise TypeError(
            f"{function}: halo must be known when the program is traced, got {halo};"
            " measure it in a program of its own"
        )
    given = checks.as_array(function, "halo", halo)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{function}: halo must hold integers, got {given.dtype}")
    if given.shape not in ((), (num_heads,)):
        raise ValueError(
            f"{function}: halo must be an integer, or one for each of the {num_heads} key/value"
            f" heads, got shape {list(given.shape)}"
        )
    if (given < 0).any():
        raise ValueError(f"{function}: halo must be at least 0, got {given.min()}")
    return np.broadcast_to(given.astype(np.int64), num_heads)


def _hidden(slopes: Slopes | None, problem: Problem) -> np.ndarray[Any, Any]:
    """[G]: whether a side is known to be hidden from all query heads of a key/value head."""
    if slopes is None or isinstance(slopes, jax.core.Tracer):
        return np.zeros(problem.G, bool)
    hidden = np.isinf(np.asarray(slopes)).reshape(-1, problem.G, problem.H // max(problem.G, 1))
    return hidden.all((0, 2))


def _refuse_unknown(function: str, options: Mapping[str, object]) -> None:
    for name in ("positions", "query_positions"):
        if name in options:
            raise NotImplementedError(
                f"{function}: {name} are not built yet for a sequence in shards;"
                " linbias.torch.context_parallel has positions"
            )
    unknown = [name for name in options if name not in Weighing.__annotations__]
    whole = {"key_range", "query_start", "query_range", "key_bound"}
    whole |= {"dropout", "dropout_key", "dropout_p"}
    for name in unknown:
        if name in whole or name.endswith("mask"):
            raise TypeError(
                f"{function}: there is no argument {name}; a sequence in shards has all its keys"
                " and no dropout, as linbias.jax.attention has them for a whole one"
            )
    if unknown:
        called = attention if function.endswith("attention") else needed_halo
        keywords.refuse_unknown(function, options, called)
