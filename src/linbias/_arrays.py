"""NumPy arrays as calls of attention take them: checked, with one batch axis, nothing open."""

import functools
import math
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from linbias import _request
from linbias._request import Described, Problem, Request, checks, keywords, stamps
from linbias.schedules import slopes as slopes_of_paper

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)


class Unmasked(TypedDict, total=False):
    """The keywords of all that attends, near to far too."""

    causal: bool
    right_slopes: npt.ArrayLike | None
    scale: float | None
    key_range: npt.ArrayLike | None
    query_start: npt.ArrayLike | None
    positions: npt.ArrayLike | None
    query_positions: npt.ArrayLike | None
    window: tuple[int, int] | None
    query_range: npt.ArrayLike | None


class Options(Unmasked, total=False):
    """The keywords that `attention`, its gradients, its weights and its explanation share."""

    mask: npt.ArrayLike | None


@dataclass(frozen=True)
class Inputs:
    """Checked arguments as [B, heads, length, size] in float64, with nothing left open."""

    q: Float64
    k: Float64
    v: Float64
    left: Float64  # [H] or [B, H]
    right: Float64  # likewise; inf: causal
    query_start: npt.NDArray[np.int64]  # [B]
    hidden: npt.NDArray[np.bool_]  # [B, H, 1 or T, S]: a key lies outside a range or is masked
    added: Float64  # broadcasts with [B, H, T, S]: the numbers of a mask
    scale: float
    batch: tuple[int, ...]  # the batch axes as they were given
    dtype: np.dtype[Any]  # of the output
    positions: Float64 | None = None  # [B, H, S]; None: key s stands at s
    query_positions: Float64 | None = None  # [B, H, T]
    # [B, H, T]: where a query stands that was given no position
    own_key: npt.NDArray[np.int64] | None = None
    # Where keys [B, H, S] and queries [B, H, T] stand in the order of their positions; None: in
    # that of the arrays.
    ranks: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    @property
    def distance(self) -> Array:
        """[B, 1 or H, T, S]: position of the query minus that of the key."""
        if self.positions is None or self.query_positions is None:
            return self.order
        return self.query_positions[..., None] - self.positions[..., None, :]

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """[B, 1 or H, T, S]: by how many keys the key lies before the query."""
        if self.ranks is not None:
            of_keys, of_queries = self.ranks
            return of_queries[..., None] - of_keys[..., None, :]
        position = self.query_start[:, None] + np.arange(self.q.shape[2])
        return (position[..., None] - np.arange(self.k.shape[2]))[:, None]

    def per_query_head(self, array: Array) -> Array:
        """[B, G, ...] -> [B, H, ...]: query head h reads key/value head h // (H // G)."""
        return np.repeat(array, self.q.shape[1] // max(1, array.shape[1]), axis=1)

    def per_key_head(self, array: Float64) -> Float64:
        """[B, H, ...] -> [B, G, ...], summed: the transpose of `per_query_head`."""
        B, H, *rest = array.shape
        G = self.k.shape[1]
        return array.reshape(B, G, H // max(1, G), *rest).sum(2)

    def restore(self, array: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """[B, ...] -> [..., ...] with the batch axes as they were given."""
        return array.reshape((*self.batch, *array.shape[1:]))

    def sum_slope(self, dslope: Float64, slope: Float64) -> Float64:
        """Sum over all that share a slope; an infinite slope has no gradient."""
        total = dslope.sum((-1, -2))
        return np.where(np.isinf(slope), 0.0, total if slope.ndim == 2 else total.sum(0))

    def sum_position(self, gradient: Float64, given: npt.ArrayLike) -> Float64:
        """[B, H, n] -> the shape of positions as given, summed over all that share one."""
        shape = np.shape(given)
        shared = len(shape) <= len(self.batch) + 1  # by all heads
        gradient = self.restore(gradient.sum(1) if shared else gradient)
        if gradient.shape == shape:
            return gradient
        return gradient.sum(tuple(range(len(self.batch)))).reshape(shape)  # and by all batch rows


@keywords.show_keywords(Options)
def prepare(
    function: str,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None,
    **options: Unpack[Options],
) -> Inputs:
    """Check the arguments of a call and fill in what they leave open."""
    if not options.keys() <= Options.__annotations__.keys():
        keywords.refuse_unknown(function, options, prepare)
    request, batch = in_batches(function, np.dtype(np.float64), q, k, v, slopes, **options)
    dtype = request.q.dtype if request.q.dtype.kind not in "iu" else np.dtype(np.float64)
    q, k, v = (x.astype(np.float64) for x in (request.q, request.k, request.v))
    problem = check(function, request._replace(q=q, k=k, v=v))
    _request.warn_of_layout(function, problem)
    checks.check_slopes(function, request, np.asarray)
    in_order = checks.check_values(function, problem, request, np.asarray, any_order=True)
    B, H, G, T, S = problem.B, problem.H, problem.G, problem.T, problem.S
    filled = fill(request, problem)
    left, right = filled["left"], filled["right"]
    if right is None:
        right = np.full_like(left, np.inf)
    ranges, start, keys = filled["key_range"], filled["query_start"], np.arange(S)
    ranges = np.full((B, G, 2), (0, S)) if ranges is None else ranges
    start = np.full(B, S - T) if start is None else start
    outside = (keys < ranges[..., :1]) | (keys >= ranges[..., 1:])
    # Keys and values outside their range may hold anything, and 0 * NaN is NaN.
    k, v = (np.where(outside[..., None], 0.0, array) for array in (k, v))
    hidden = np.repeat(outside, H // max(1, G), axis=1)[:, :, None]
    if (of_rows := filled["query_range"]) is not None:
        beyond = (keys < of_rows[..., :1]) | (keys >= of_rows[..., 1:])
        hidden = hidden | beyond[:, None]
    mask, added = filled["mask"], np.zeros(())
    if mask is not None and mask.dtype != np.bool_:
        checks.check_mask_values(function, mask)
        hidden = hidden | np.isneginf(mask)
        added = np.where(np.isneginf(mask), 0.0, mask).astype(np.float64)
    elif mask is not None:
        hidden = hidden | ~mask
    standing = stand(request, problem, ranges, start)
    if not in_order:
        if request.window is not None:
            checks.refuse_ranges_in_any_order(function)
        standing["ranks"] = _ranks(standing, outside, request.query_positions is None)
    return Inputs(
        q=q,
        k=k,
        v=v,
        left=left,
        right=right,
        query_start=start,
        hidden=hidden,
        added=added,
        scale=problem.scale,
        batch=batch,
        dtype=dtype,
        **standing,
    )


def in_batches(
    function: str,
    wide: np.dtype[Any] | None,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None,
    **options: Any,
) -> tuple[Request[Array], tuple[int, ...]]:
    """A call as arrays with one batch axis, and the batch axes as given; slopes are wide."""
    arrays = []
    for name, argument in (("q", q), ("k", k), ("v", v)):
        array = checks.real_array(function, name, argument)
        if array.ndim < 3:
            splits = function in ("attention", "explain")
            hint = "; num_heads= splits the last of 2" if splits else ""
            raise ValueError(
                f"{function}: {name} must have at least 3 axes, heads, length, size,"
                f" got {list(array.shape)}{hint}"
            )
        arrays.append(array)
    batch = arrays[0].shape[:-3]
    for name, array in zip("kv", arrays[1:], strict=True):
        if array.shape[:-3] != batch:
            raise ValueError(
                f"{function}: {name} has batch axes {list(array.shape[:-3])}"
                f" but q has {list(batch)}"
            )
    q, k, v = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in arrays)
    given: dict[str, Any] = {**options, "slopes": slopes}
    if given.get("positions") is not None:
        x, xq = stamps.as_numbers(function, given["positions"], given.get("query_positions"))
        given.update(positions=x, query_positions=xq)
    for name, value in given.items():
        if value is None or name in _request.NUMBERS:
            continue
        if name in ("slopes", "right_slopes"):
            given[name] = checks.real_array(function, name, value).astype(wide or _wide(arrays))
        else:
            array = checks.as_array(function, name, value)
            array = checks.as_int64(array) if name in _request.INTEGERS else array
            given[name] = _FLATTEN[name](array, batch)
    return Request(q=q, k=k, v=v, **given), batch


def check(function: str, request: Request[Array]) -> Problem:
    described: Any = {}
    for name in _request.ARRAYS:
        x = getattr(request, name)
        if x is not None:
            described[name] = Described(x.shape, _name(x.dtype))
    return _request.check(function, request._replace(**described))


def fill(request: Request[Array], problem: Problem) -> dict[str, Any]:
    slopes = request.slopes
    if slopes is None:
        slopes = slopes_of_paper(problem.H) if problem.H else np.zeros(0)
    return _request.fill(
        request,
        problem,
        slopes,
        np,
        lambda ranges: ranges[..., 1].max(1, initial=0),
        np.arange,
    )


def stand(
    request: Request[Array], problem: Problem, ranges: Array | None, starts: Array | None
) -> dict[str, Any]:
    """Where keys and queries stand, [B, H, ...], and at which keys; 0 outside the ranges."""
    B, H, T, S = problem.B, problem.H, problem.T, problem.S
    if request.positions is None:
        return {}
    first, end = np.split(per_query_head(ranges, problem), 2, -1)
    starts = np.full(B, S - T) if starts is None else starts
    x, xq = request.positions, request.query_positions
    x = x if x.ndim == 3 else x[:, None]
    xq = xq if xq is None or xq.ndim == 3 else xq[:, None]
    base = checks.a_key(x, end)
    inside = (np.arange(S) >= first) & (np.arange(S) < end)
    x = np.where(inside, checks.less(x, base), 0)
    own_key = np.clip(starts[:, None, None] + np.arange(T), first, np.maximum(first, end - 1))
    if xq is None:
        # Without any key, or in an empty range, a query may stand anywhere.
        own_key = np.clip(own_key, 0, max(0, S - 1))
        xq = np.take_along_axis(x, own_key, -1) if S else np.zeros(())
    else:
        xq = checks.less(xq, base)
    xq = np.broadcast_to(xq, (B, H, T))
    return {"positions": x, "query_positions": xq, "own_key": own_key}


def _ranks(
    standing: dict[str, Array], outside: npt.NDArray[np.bool_], at_keys: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where keys and queries stand in the order of the positions of the keys in the range.

    A query stands at its own key, or at the last one that is not beyond it.
    """
    x, xq = standing["positions"], standing["query_positions"]
    outside = np.repeat(outside, x.shape[1] // outside.shape[1], axis=1)
    x = np.where(outside, np.inf, x)
    of_keys = np.argsort(np.argsort(x, -1, kind="stable"), -1, kind="stable")
    if at_keys:
        return of_keys, np.take_along_axis(of_keys, standing["own_key"], -1)
    return of_keys, (x[..., None, :] <= xq[..., None]).sum(-1) - 1


def per_query_head(ranges: Array | None, problem: Problem) -> Array:
    """Ranges [B, G, 2] as those of query heads, [B, H, 2]; None is all keys."""
    B, H, G, S = problem.B, problem.H, problem.G, problem.S
    if ranges is None:
        return np.broadcast_to([0, S], (B, H, 2))
    return ranges.repeat(H // max(1, G), axis=1)


def split_heads(
    function: str, num_heads: int, q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike
) -> tuple[Array, Array, Array]:
    """[..., length, heads * size] -> [..., heads, length, size]; k and v have as many heads."""
    if not isinstance(num_heads, int | np.integer) or num_heads < 1:
        raise ValueError(
            f"{function}: num_heads must be an integer of at least 1, got {num_heads}"
        )
    q = _as_heads(function, "q", q, num_heads)
    size = max(1, q.shape[-1])  # no columns are refused later
    columns = checks.as_array(function, "k", k).shape[-1:]
    num_kv_heads = max(1, sum(columns) // size)
    k, v = (_as_heads(function, name, x, num_kv_heads) for name, x in (("k", k), ("v", v)))
    return q, k, v


def _as_heads(function: str, name: str, values: npt.ArrayLike, num_heads: int) -> Array:
    array = checks.real_array(function, name, values)
    if array.ndim < 2 or array.shape[-1] % num_heads:
        raise ValueError(
            f"{function}: {name} must be [..., length, heads * size] with a multiple of"
            f" {num_heads} columns, got {list(array.shape)}"
        )
    split = array.reshape(*array.shape[:-1], num_heads, array.shape[-1] // num_heads)
    return split.swapaxes(-2, -3)


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    """NumPy builds it anew each time, which takes longer than all other checks of an array."""
    return dtype.name


def _wide(arrays: list[Array]) -> np.dtype[Any]:
    """What the core computes in: integers and float64 stay exact."""
    wide = any(x.dtype.kind in "iu" or x.dtype.itemsize > 4 for x in arrays)
    return np.dtype(np.float64 if wide else np.float32)


def _flatten(array: Array, batch: tuple[int, ...]) -> Array:
    """[..., x] -> [B, x] where the batch axes are there; the checks refuse anything else."""
    if array.shape[: len(batch)] != batch:
        return array
    return array.reshape(math.prod(batch), *array.shape[len(batch) :])


def _flatten_places(array: Array, batch: tuple[int, ...]) -> Array:
    """`_flatten`, where one axis alone, or batch axes of 1, stand for all batch rows."""
    if array.ndim == 1:
        return array[None]
    if batch and array.ndim > len(batch) and array.shape[: len(batch)] == (1,) * len(batch):
        return array.reshape(1, *array.shape[len(batch) :])
    return _flatten(array, batch)


def _flatten_query_range(array: Array, batch: tuple[int, ...]) -> Array:
    """`_flatten`, where [T, 2] alone stands for all batch rows."""
    return array if array.ndim == 2 else _flatten(array, batch)


def _flatten_mask(mask: Array, batch: tuple[int, ...]) -> Array:
    """[..., H, T, S] -> [B, H, T, S] where the batch axes fit; the checks refuse anything else."""
    own = mask.shape[:-3]
    if len(own) != len(batch) or any(n not in (1, m) for n, m in zip(own, batch, strict=True)):
        return mask
    rest = mask.shape[-3:]
    return np.broadcast_to(mask, (*batch, *rest)).reshape(math.prod(batch), *rest) if own else mask


_FLATTEN = {
    **dict.fromkeys(("key_range", "query_start"), _flatten),
    **dict.fromkeys(("positions", "query_positions"), _flatten_places),
    "query_range": _flatten_query_range,
    "mask": _flatten_mask,
}
