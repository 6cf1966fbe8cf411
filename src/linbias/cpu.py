"""The compiled CPU core for NumPy arrays: `linbias.attention` at full speed."""

from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from linbias import _request
from linbias._arrays import Array, Unmasked, check, fill, in_batches, per_query_head, stand
from linbias._request import checks, keywords, seen
from linbias.kernels import core

__all__ = ["attention"]

Floats = npt.NDArray[np.floating[Any]]


@overload
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = ...,
    *,
    tolerance: float | None = ...,
    num_threads: int = ...,
    return_lse: Literal[True],
    **options: Unpack[Unmasked],
) -> tuple[Floats, Floats]: ...
@overload
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = ...,
    *,
    tolerance: float | None = ...,
    num_threads: int = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Unmasked],
) -> Floats: ...
@keywords.show_keywords(Unmasked)
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    *,
    tolerance: float | None = None,
    num_threads: int = 1,
    return_lse: bool = False,
    **options: Unpack[Unmasked],
) -> Floats | tuple[Floats, Floats]:
    """Run the compiled core on NumPy arrays: `linbias.attention` at full speed.

    The formula and the corner cases are those of `linbias.attention`. Scores and sums are float64
    where q, k or v is float64 or integers, and float32 otherwise.

    Args:
        q: [..., H, T, D], float16, bfloat16 (of ml_dtypes), float32, float64 or integers, any
            strides.
        k: [..., G, S, D]. H must be a multiple of G.
        v: [..., G, S, E]. Where the dtypes of q, k and v differ, all are read as float32, or
            float64 if one of them is.
        slopes, causal, right_slopes, scale, key_range, query_start, positions, query_positions,
            window, query_range, return_lse: As for `linbias.attention`.
        tolerance: As for `linbias.torch.attention`.
        num_threads: Threads to use, at least 1.

    Returns:
        [..., H, T, E] in the dtype of q (float64 for integers); with return_lse also lse [..., H,
        T], float32 or float64 like the scores.

    Raises:
        TypeError, ValueError: A shape, dtype or value breaks a rule above.
        NotImplementedError: The core is not compiled, or the head size is above 256.
        MemoryError: There is no room for the packed keys and values.

    Example:
        >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
        >>> attention(q, k, v).shape
        (1, 2, 3, 4)
    """
    if not options.keys() <= Unmasked.__annotations__.keys():
        keywords.refuse_unknown("attention", options, attention)
    if num_threads < 1:
        raise ValueError(f"attention: num_threads must be at least 1, got {num_threads}")
    request, batch = in_batches("attention", None, q, k, v, slopes, tolerance=tolerance, **options)
    given = [x.astype(np.float64) if x.dtype.kind in "iu" else x for x in request[:3]]
    dtype = _computed_in([x.dtype for x in given])
    q, k, v = (_readable(x.astype(dtype, copy=False)) for x in given)
    request = request._replace(q=q, k=k, v=v)
    problem = check("attention", request)
    reason = core.why_not(problem)
    if reason is not None:
        raise NotImplementedError(f"attention: cpu cannot run this call: {reason}")
    _request.warn_of_layout("attention", problem, depth=2)
    checks.check_slopes("attention", request, np.asarray)
    checks.check_values("attention", problem, request, np.asarray, depth=2)
    out, lse = _run(problem, request, num_threads)
    out = out.astype(given[0].dtype, copy=False).reshape(*batch, *out.shape[1:])
    return (out, lse.reshape(*batch, *lse.shape[1:])) if return_lse else out


def _run(
    problem: _request.Problem, request: _request.Request[Array], num_threads: int
) -> tuple[Floats, Floats]:
    """Fill in what a checked call leaves open, and run it: out and lse, wide."""
    B, H, G, T, S = problem.B, problem.H, problem.G, problem.T, problem.S
    wide = np.dtype(np.float64 if problem.dtype == "float64" else np.float32)
    filled = fill(request, problem)
    left, right = (
        None if side is None else np.ascontiguousarray(np.broadcast_to(side, (B, H)), wide)
        for side in (filled["left"], filled["right"])
    )
    ranges, starts, of_queries = (
        None if x is None else np.ascontiguousarray(x, np.int64)
        for x in (filled["key_range"], filled["query_start"], filled["query_range"])
    )
    x, xq, bias = None, None, np.zeros((), wide)
    if request.positions is not None:
        standing = stand(request, problem, ranges, starts)
        if request.query_positions is not None and S:
            from_keys = np.full(B, S - T) if starts is None else starts
            own = from_keys[:, None, None] + np.arange(T)
            of_heads = per_query_head(ranges, problem)
            standing["query_positions"], bias = _stand_near(standing, (left, right), of_heads, own)
        x, xq = (np.ascontiguousarray(standing[n]) for n in ("positions", "query_positions"))
    out = np.empty((B, H, T, problem.E), wide)
    row_max, log_sum = np.empty((2, B, H, T), wide)
    visited = np.empty((B, H, core.num_tiles(T), 2), np.int32)
    call = core.Call(
        dtype=core.DTYPES[problem.dtype],
        B=B,
        H=H,
        G=G,
        T=T,
        S=S,
        D=problem.D,
        E=problem.E,
        q=_operand(request.q),
        k=_operand(request.k),
        v=_operand(request.v),
        left=_address(left),
        right=_address(right),
        key_range=_address(ranges),
        query_start=_address(starts),
        query_range=_address(of_queries),
        positions=_places(x),
        query_positions=_places(xq),
        scale=problem.scale,
        tolerance=problem.tolerance,
        num_threads=num_threads,
    )
    results = core.Forward(
        out=_address(out),
        row_max=_address(row_max),
        log_sum=_address(log_sum),
        visited=_address(visited),
        visited_tiles=visited.shape[2],
    )
    core.forward(call, results)
    return out, row_max + log_sum - bias.astype(wide)


def _stand_near(
    standing: dict[str, Array],
    sides: tuple[Array | None, Array | None],
    ranges: Array,
    own: Array,
) -> tuple[Array, Array]:
    """Move queries beside all keys to the nearest; and the bias that rows thereby lack."""
    xq, (first, end) = standing["query_positions"], np.split(ranges, 2, -1)
    left, right = (np.inf if side is None else side[..., None].astype(float) for side in sides)
    own_key = np.minimum(standing["own_key"], standing["positions"].shape[-1] - 1)
    nearest = np.take_along_axis(standing["positions"], own_key, -1)
    alone, bias = seen.beside_all(np, xq - nearest, own, first, end, left, right)
    return np.where(alone, nearest, xq), bias


def _computed_in(dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype in which the core is to read q, k and v."""
    if any(dtype.itemsize > 4 for dtype in dtypes):
        return np.dtype(np.float64)
    return dtypes[0].newbyteorder("=") if len(set(dtypes)) == 1 else np.dtype(np.float32)


def _readable(array: Array) -> Array:
    """The array, copied unless it is aligned with strides of whole elements, the last one 1."""
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    plain = whole and array.strides[-1] == array.itemsize and array.flags.aligned
    return array if plain else np.ascontiguousarray(array)


def _operand(array: Array) -> "core.Array":
    return core.Array(
        array.ctypes.data, *(stride // array.itemsize for stride in array.strides[:3])
    )


def _places(x: Array | None) -> "core.Array":
    """[B, 1 or H, n], contiguous, as of every head."""
    if x is None:
        return core.Array(0, 0, 0, 0)
    heads, n = x.shape[1:]
    return core.Array(x.ctypes.data, heads * n, n if heads > 1 else 0, 0)


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
