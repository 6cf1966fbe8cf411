"""One sequence over a mesh axis: each device has a piece of it and fetches the keys that its heads can see beyond.

A query needs the keys of a window and no others. So each device sends the rows beside its edge, for each key/value head
as many as that head's halo, and calls attention once over what it has then:

    keys of a device    [ . . left halo ][ own piece ][ right halo . . ]        position of query 0: where the own begin
                          . no keys, or not fetched for this head: outside its key_range

A halo longer than a piece comes in hops, hop i straight from the i-th neighbour. Backward, the gradients of fetched keys go
back to where the keys came from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from linbias import _request
from linbias.jax.call import ArrayLike, Slopes, prepare, run
from linbias.jax.impl.certificate import norm
from linbias.jax.impl.tiles import LEFT, RIGHT

__all__ = ["attention", "needed_halo"]

Halo = int | Sequence[int] | ArrayLike
AxisName = str | tuple[str, ...]


class Weighing(TypedDict, total=False):
    """The keywords of `linbias.jax.attention` that a sequence in shares has too."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    tolerance: float | None


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
@_request.takes(Weighing)
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
    """Attend over one sequence that lies in pieces on the devices of a mesh axis, inside `jax.shard_map`.

    The result is the device's piece of what `linbias.jax.attention` gives for the whole sequence, if every key that can
    matter lies in the own piece or within the halo:

        keys of piece i of T:    i * T - halo  ..  (i + 1) * T - 1 (causal), or  (i + 1) * T + halo - 1

    A halo below `needed_halo` can give another result without a word. Each device sends B * (D + E) * (sum of the halos
    over the key/value heads) numbers to each open side, and as many backward. Differentiable in q, k, v, slopes and
    right_slopes, once, through out and lse; gradients of slopes that devices share are added up.

    Args:
        q: [B, T, H, D], as for `linbias.jax.attention`: the device's piece. All pieces have T queries and T keys, and follow
            each other in the order of the mesh axis.
        k: [B, T, G, D], dtype of q.
        v: [B, T, G, E], dtype of q.
        slopes: [H] or [B, H]. None means `linbias.slopes(H)`, and is refused where another mesh axis may split the heads.
        axis_name: The mesh axis, or several as in a PartitionSpec, over which the sequence lies.
        halo: An integer, or G integers, one for each key/value head, known when the program is traced: how many keys to
            fetch beyond each open side of the piece. Causal attention, and slopes known to be inf for all query heads of a
            key/value head, close a side. More than there are is cut.
        causal, right_slopes, scale: As for `linbias.jax.attention`.
        tolerance: As for `linbias.jax.attention`: half for keys that are not read, half for keys beyond `needed_halo`.
        implementation, return_lse: As for `linbias.jax.attention`.

    Returns:
        [B, T, H, E] in q's dtype; with return_lse also lse [B, T, H], float32 (float64 for float64 inputs).

    Raises:
        TypeError: As `linbias.jax.attention`; the halo is traced or no integer; masks, key_range, query_start and dropout are
            for whole sequences.
        ValueError: As `linbias.jax.attention`; q, k and v are not equally long; a halo breaks the rule above; no shard_map around
            the call has the axis.
        NotImplementedError: As `linbias.jax.attention`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh, pieces = jax.make_mesh((jax.device_count(),), ("x",)), P(None, "x")
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 4))
        >>> q, k, v = jax.device_put((q, k, v), NamedSharding(mesh, pieces))
        >>> measure = partial(needed_halo, axis_name="x")
        >>> halo = jax.shard_map(measure, mesh=mesh, in_specs=pieces, out_specs=P())(q, k)
        >>> attend = partial(attention, axis_name="x", halo=np.asarray(halo))
        >>> jax.shard_map(attend, mesh=mesh, in_specs=pieces, out_specs=pieces)(q, k, v).shape
        (1, 128, 2, 4)
    """
    function = "context_parallel.attention"
    _refuse_unknown(function, options)
    num_pieces = _num_pieces(function, axis_name)
    inputs, problem = prepare(
        function, q, k, v, slopes, sequence_axes=_names(axis_name), **options
    )
    _check_lengths(function, problem)
    B, T, G = problem.B, problem.T, problem.G
    halos = np.minimum(_check_halo(function, halo, G), (num_pieces - 1) * T)
    on_the_left = np.where(_hidden(slopes, problem), 0, halos)
    on_the_right = np.zeros_like(halos)
    if not problem.causal:
        right_slopes = options.get("right_slopes")
        hidden = _hidden(slopes if right_slopes is None else right_slopes, problem)
        on_the_right = np.where(hidden, 0, halos)
    own = inputs.k, inputs.v
    before = _fetch(own, on_the_left, axis_name, num_pieces, LEFT)
    after = _fetch(own, on_the_right, axis_name, num_pieces, RIGHT)
    together = (jnp.concatenate(x, axis=1) for x in zip(before, own, after, strict=True))
    index = lax.axis_index(axis_name)
    start = int(on_the_left.max(initial=0))
    first = start - jnp.minimum(on_the_left, index * T)
    end = start + T + jnp.minimum(on_the_right, (num_pieces - 1 - index) * T)
    key_range = jnp.stack([first, end], axis=-1).astype(jnp.int32)
    k, v = together
    inputs = replace(
        inputs,
        k=k,
        v=v,
        key_range=jnp.broadcast_to(key_range, (B, G, 2)),
        query_start=jnp.full(B, start, jnp.int32),
        tolerance=problem.tolerance / 2,
    )
    problem = replace(
        problem,
        S=k.shape[1],
        key_range=True,
        query_start=True,
        tolerance=inputs.tolerance,
    )
    out, lse = run(function, inputs, problem, implementation)
    return (out, lse) if return_lse else out


@_request.takes(Weighing)
def needed_halo(
    q: ArrayLike,
    k: ArrayLike,
    slopes: Slopes | None = None,
    *,
    axis_name: AxisName,
    **options: Unpack[Weighing],
) -> Array:
    """Measure how many keys beyond the edges of a piece each key/value head needs, inside `jax.shard_map`.

    With c the mean key, and a radius within which the keys of all devices lie around it, the keys left of a query q from
    distance d on weigh together at most

        exp(scale * q . c + |scale| * |q| * radius - slope * d) / (1 - exp(-slope))

    and so on the right. The answer is the smallest halo for which that is at most half of the tolerance (a quarter on
    each side, where two are open) of what the keys of the own piece weigh, for every query of all devices. It holds for
    these finite q, k and slopes: leave a margin, or measure again now and then. A head with slope 0 needs all keys, one whose
    slopes are inf none. Costs a forward pass over the own piece. Not differentiable.

    Args:
        q, k, slopes, axis_name, causal, right_slopes, scale: As for `attention`.
        tolerance: As for `attention`; 0 needs all keys.

    Returns:
        [G], int32, the same on all devices of the mesh axis: what `attention` takes as `halo`, as NumPy array or list.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh, pieces = jax.make_mesh((1,), ("x",)), P(None, "x")  # one device, which has all keys
        >>> q = jax.device_put(jnp.ones((1, 6, 2, 4)), NamedSharding(mesh, pieces))
        >>> measure = partial(needed_halo, axis_name="x")
        >>> jax.shard_map(measure, mesh=mesh, in_specs=pieces, out_specs=P())(q, q).tolist()
        [0, 0]
    """
    function = "context_parallel.needed_halo"
    _refuse_unknown(function, options)
    num_pieces = _num_pieces(function, axis_name)
    inputs, problem = prepare(
        function, q, k, k, slopes, sequence_axes=_names(axis_name), **options
    )
    _check_lengths(function, problem)
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
    reach = (radius + 2 * slack * largest)[:, None, :, None]
    aligned = jnp.einsum("btgnd,bgd->btgn", rows, center, precision=lax.Precision.HIGHEST)
    most = aligned + norm(rows) * (1 + slack) * reach
    share = problem.tolerance / (2 if inputs.right is None else 4)
    above = most - lse - (math.log(share) if share else -math.inf)

    def needed(slope: Array, nearest: Array, num_keys: Array) -> Array:
        """[G]: nearest [T, 1, 1] is the distance of each row to the nearest of num_keys keys beyond its side."""
        slope = slope.reshape(B, 1, G, H // G)
        count = jnp.log(jnp.maximum(num_keys, 1).astype(wide))
        count = jnp.minimum(count, -jnp.log(-jnp.expm1(-slope)))
        distance = (above + count) / slope * (1 + 2 * slack)
        found = jnp.ceil(distance) - nearest
        few = (found < num_keys) & (slope > 0)  # False for NaN
        found = jnp.where(few, jnp.where(few, found, 0).astype(jnp.int32), num_keys)
        return jnp.where(jnp.isinf(slope), 0, jnp.maximum(found, 0)).max((0, 1, 3))

    index, row = lax.axis_index(axis_name), jnp.arange(T)[:, None, None]
    halo = needed(inputs.left, row + 1, index * T)
    if inputs.right is not None:
        on_the_right = needed(inputs.right, T - row, (num_pieces - 1 - index) * T)
        halo = jnp.maximum(halo, on_the_right)
    return lax.pmax(halo, axis_name).astype(jnp.int32)


def _fetch(
    own: tuple[Array, Array],
    halos: np.ndarray[Any, Any],
    axis_name: AxisName,
    num_pieces: int,
    side: int,
) -> tuple[Array, Array]:
    """Fetch the keys and values beside the piece, [B, max(halos), G, size]; zeros where a head fetches none."""
    k, v = own
    T = k.shape[1]
    fetched = []
    for hop in range(1, num_pieces):
        counts = np.clip(halos - (hop - 1) * T, 0, T)
        num_rows = int(counts.max(initial=0))
        if num_rows == 0:
            break
        nearest = slice(T - num_rows, T) if side == LEFT else slice(0, num_rows)
        rows = jnp.concatenate([k[:, nearest], v[:, nearest]], axis=-1)
        pairs = [(i, i - side * hop) for i in range(num_pieces)]
        pairs = [(source, to) for source, to in pairs if 0 <= to < num_pieces]
        fetched.append(_exchange(rows, counts, axis_name, pairs, side))
    if not fetched:
        return k[:, :0], v[:, :0]
    both = jnp.concatenate(fetched[::side], axis=1)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _exchange(
    rows: Array,
    counts: np.ndarray[Any, Any],
    axis_name: AxisName,
    pairs: list[tuple[int, int]],
    side: int,
) -> Array:
    """Send of rows [B, n, G, size] the counts[g] that are nearest to the receiver, and return what comes in their place.

    Heads of equal counts go together, all in one message.
    """
    B, num_rows, _, size = rows.shape
    groups = [np.flatnonzero(counts == n) for n in np.unique(counts)]
    sent = []
    for heads in groups:
        n = counts[heads[0]]
        nearest = slice(num_rows - n, num_rows) if side == LEFT else slice(0, n)
        sent.append(rows[:, nearest, heads].reshape(B, -1))
    message = lax.ppermute(jnp.concatenate(sent, axis=1), axis_name, pairs)
    ends = np.cumsum([part.shape[1] for part in sent])[:-1]
    received = []
    for heads, part in zip(groups, jnp.split(message, ends, axis=1), strict=True):
        n = int(counts[heads[0]])
        missing = (num_rows - n, 0) if side == LEFT else (0, num_rows - n)
        part = part.reshape(B, n, len(heads), size)
        received.append(jnp.pad(part, ((0, 0), missing, (0, 0), (0, 0))))
    return jnp.concatenate(received, axis=2)[:, :, np.argsort(np.concatenate(groups))]


def _num_pieces(function: str, axis_name: AxisName) -> int:
    if not all(isinstance(name, str) for name in _names(axis_name)):
        raise TypeError(
            f"{function}: axis_name must be a string or a tuple of strings, got {axis_name!r}"
        )
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{function}: axis_name must be an axis of the jax.shard_map around the call, got {axis_name!r}"
        ) from None


def _names(axis_name: AxisName) -> tuple[str, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _check_lengths(function: str, problem: _request.Problem) -> None:
    if problem.T != problem.S:
        raise ValueError(
            f"{function}: k must be as long as q, a piece of the same sequence, got {problem.S} keys and"
            f" {problem.T} queries"
        )


def _check_halo(function: str, halo: Halo, num_heads: int) -> np.ndarray[Any, Any]:
    """[G], at least 0."""
    if isinstance(halo, jax.core.Tracer):
        raise TypeError(
            f"{function}: halo must be known when the program is traced, got {halo}; measure it in a program of its own"
        )
    given = _request.as_array(function, "halo", halo)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{function}: halo must hold integers, got {given.dtype}")
    if given.shape not in ((), (num_heads,)):
        raise ValueError(
            f"{function}: halo must be an integer, or one for each of the {num_heads} key/value heads,"
            f" got shape {list(given.shape)}"
        )
    if (given < 0).any():
        raise ValueError(f"{function}: halo must be at least 0, got {given.min()}")
    return np.broadcast_to(given.astype(np.int64), num_heads)


def _hidden(slopes: Slopes | None, problem: _request.Problem) -> np.ndarray[Any, Any]:
    """[G]: whether the slopes are known to hide a side from all query heads of a key/value head."""
    if slopes is None or isinstance(slopes, jax.core.Tracer):
        return np.zeros(problem.G, bool)
    hidden = np.isinf(np.asarray(slopes)).reshape(-1, problem.G, problem.H // max(problem.G, 1))
    return hidden.all((0, 2))


def _refuse_unknown(function: str, options: Mapping[str, object]) -> None:
    unknown = [name for name in options if name not in Weighing.__annotations__]
    whole = {"key_range", "query_start", "key_bound", "dropout", "dropout_key", "dropout_p"}
    for name in unknown:
        if name in whole or name.endswith("mask"):
            raise TypeError(
                f"{function}: there is no argument {name}; a sequence in pieces has all its keys and no"
                " dropout, as linbias.jax.attention has them for a whole one"
            )
    if unknown:
        called = attention if function.endswith("attention") else needed_halo
        _request.refuse_unknown(function, options, called)
