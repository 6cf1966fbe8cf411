"""What a call of attention asks for, its rules, and what it leaves open, without a framework.

A front end makes a `Request` of its arrays and options, and describes the arrays by shape, dtype
name and device; `check` answers with the sizes of the call or raises. Rules that need values
(`check_slopes`, `check_values`) stand apart, for front ends that cannot read them cheaply. `fill`
says what is meant by what a call leaves open.

To add an argument to attention: here a field of `Request` with its rule, what `fill` makes of it,
and, unless all implementations will have it, a field of `Problem` that says whether a call asks
for it with a reason in `SPECIAL`; in the front end the keyword (`functional.py`, `definition.py`)
and a field of `Inputs`; an implementation that has it (begin with `dense`, which has all); cases
in tests/support/cases.py and truth.py.
"""

import difflib
import inspect
import math
import numbers
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

FLOATS = ("float16", "bfloat16", "float32", "float64")

# The axes of q, k and v in a front end's own order; their letters stand for those of q.
LAYOUTS = {"BHTD": "batch, heads, length, size", "BTHD": "batch, length, heads, size"}

# Share of a row's probability that the near-to-far certificate may leave out, by input dtype: one
# rounding step of the wide types, a quarter of one of the narrow types.
TOLERANCE = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-14,
    "bfloat16": 2.0**-12,
}

LARGEST_START = 2**30
LARGEST_WINDOW = 3 * 2**29  # no key lies as far from a query; 32-bit integers have the sums
NO_WINDOW = (-1, -1)

# 16 bits cannot tell far positions apart, nor can float64 beyond 2^53; of integers, which may lie
# farther from 0, differences are formed first.
POSITION_TYPES = (
    "float32",
    "float64",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
)
LARGEST_POSITION = 2**53
# How distances of points are measured, and how far from 0 a coordinate may lie.
METRICS = ("euclidean", "manhattan")
LARGEST_COORDINATE = 2.0**100

# Of published models, several times over: more are a length in the place of the heads.
MOST_HEADS = 1024

_PLACING = "key_range and query_start for padding and caches"
_SLOPES = "say slopes and right_slopes, which make the bias"
# Arguments of other libraries, and what to say here instead.
OTHER_NAMES = {
    "is_causal": "say causal, which is True by default",
    **dict.fromkeys(("dropout_p", "dropout_rate"), "say dropout"),
    "dropout_rng": "say dropout_key",
    "deterministic": "results repeat bit for bit without it",
    **dict.fromkeys(("softmax_scale", "sm_scale"), "say scale"),
    "alibi_slopes": "say slopes, or nothing for those of the paper",
    "left": "say slopes",
    "right": "say right_slopes",
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask", "key_padding_mask"), f"say {_PLACING}"
    ),
    **dict.fromkeys(("attn_bias", "bias", "score_mod"), _SLOPES),
    **dict.fromkeys(("window_size", "local_window_size"), "say window"),
    "sliding_window": "say window, (size - 1, 0)",
    "block_mask": "say window or query_range",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "max_seqlen_q": "cu_seqlens_q says the lengths",
    "max_seqlen_k": "cu_seqlens_k says the lengths",
    "cache_seqlens": "say key_range, [[0, filled], ...]",
    "return_attn_probs": "say return_lse, and call attention_weights for the weights",
    "need_weights": "call attention_weights for the weights",
    "key_value_seq_lengths": (
        "say key_range, [[0, length], ...], and where padding is on the right query_start=zeros"
    ),
    "query_seq_lengths": "queries beyond a length may stay: leave their rows out of the loss",
    "return_residual": "say return_lse",
    **dict.fromkeys(
        ("query_idx", "query_index"), "leave it out and say table(query=...) of the result"
    ),
    "query": "say q",
    "key": "say k",
    "value": "say v",
    **dict.fromkeys(
        ("add_bias_kv", "add_zero_attn"),
        "it adds a key that stands nowhere in the sequence, and is not built",
    ),
}
# Likewise of `attention_points`, where it has other arguments.
_AMONG_POINTS = {
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask", "key_padding_mask", "key_range"),
        "say num_points, how many tokens of each row are no padding; masks are not built",
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "offsets", "lengths", "seqlens"),
        "say num_points, of sets that are padded to one size",
    ),
    **dict.fromkeys(("positions", "coords", "coordinates", "pos"), "say points"),
    "query_positions": "say query_points",
    "need_weights": "MultiheadAttention gives the weights of a call with points",
}

LARGEST_DROPOUT = 1 - 2.0**-32  # the mask compares 32 random bits with dropout * 2^32


class Described(NamedTuple):
    """What a rule may know of an array."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{list(self.shape)}"


A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])


class Request(NamedTuple, Generic[A]):
    """The arrays of a call, as a front end has or describes them, and its options."""

    q: A
    k: A
    v: A
    slopes: A | None = None
    causal: bool = True
    right_slopes: A | None = None
    scale: float | None = None
    key_range: A | None = None
    query_start: A | None = None
    mask: A | None = None
    positions: A | None = None
    query_positions: A | None = None
    key_bound: A | None = None
    dropout: float = 0.0
    dropout_key: Any = None  # of JAX, which has no generator to draw from
    tolerance: float | None = None
    window: tuple[int, int] | None = None
    query_range: A | None = None


NUMBERS = ("causal", "scale", "dropout", "dropout_key", "tolerance", "window")
ARRAYS = tuple(name for name in Request._fields if name not in NUMBERS)
INTEGERS = ("key_range", "query_start", "query_range")


def takes(options: type) -> Callable[[F], F]:
    """Show keywords of a TypedDict, with the defaults of `Request`, in a function's signature."""

    def show(function: F) -> F:
        own = inspect.signature(function)
        *named, _ = own.parameters.values()
        first = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=Request._field_defaults.get(name),
                annotation=hint,
            )
            for name, hint in options.__annotations__.items()
        ]
        shown = own.replace(parameters=[*first, *keywords, *named[len(first) :]])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return show


@dataclass(frozen=True)
class Problem:
    """A call without its arrays: sizes by their letter (DESIGN section 1), and options."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    E: int
    dtype: str
    device: str
    causal: bool
    scale: float
    tolerance: float
    dropout: float = 0.0
    key_range: bool = False
    query_start: bool = False
    mask: bool = False  # a mask hides further keys
    added: bool = False  # the mask holds numbers, which are added to the scores
    positions: bool = False  # keys stand at real numbers
    query_positions: bool = False  # and queries do, instead of at keys
    query_range: bool = False  # queries have ranges of keys of their own, by a window too
    any_order: bool = False  # keys or queries stand in another order than that of their arrays
    query_points: bool = False  # queries stand at points of their own
    lse: bool = False  # lse is asked for
    gradients: bool = False  # the result will be differentiated
    slope_gradients: bool = False  # by slopes, too
    transformed: bool = False  # a transform of the front end runs

    @property
    def placed(self) -> bool:
        """Whether batch rows have ranges or positions of their own."""
        return self.key_range or self.query_start


# What not every implementation has, by the field that asks for it, and what those say without it.
SPECIAL = {
    "mask": "it takes a key_range but no mask",
    "added": "it takes a mask of bool, but none of numbers that are added to the scores",
    "positions": "positions are not built yet",
    "query_points": "queries at points of their own are not built yet",
    "dropout": "its dropout would draw another mask",
    "transformed": "it does not run under transforms such as vmap",
}


def log_share(share: float) -> float:
    """The log of the share of a row's sum that may stay unread, less what rounding may have added
    to the sum and its log (docs/math.md, section 4).
    """
    return math.log(share) - 2.0**-7 if share else -math.inf


def check(function: str, request: Request[Any], layout: str = "BHTD", **asked: bool) -> Problem:
    """Return the problem that arrays of this layout pose, or raise for the first broken rule."""
    q: Described = request.q
    k: Described = request.k
    v: Described = request.v
    causal, mask = request.causal, request.mask
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"{function}: causal must be True or False, got {causal!r}")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            axes = f"[{', '.join(layout)}]: {LAYOUTS[layout]}"
            raise ValueError(
                f"{function}: {name} must have 4 axes, {axes}, got {array}"
                f"{_missing_axes(name, array, layout)}"
            )
        if array.dtype not in FLOATS:
            raise TypeError(f"{function}: {name} must be one of {FLOATS}, got {array.dtype}")
        if array.dtype != q.dtype:
            raise TypeError(f"{function}: {name} is {array.dtype} but q is {q.dtype}")
        if array.device != q.device:
            raise ValueError(f"{function}: {name} is on {array.device} but q is on {q.device}")
    B, H, T, D = _sizes(q, layout)
    k_heads, num_keys, key_size = _sizes(k, layout)[1:]
    _, G, S, E = _sizes(v, layout)
    for name, array in (("k", k), ("v", v)):
        if array.shape[0] != B:
            raise ValueError(
                f"{function}: {name} has batch {array.shape[0]} but q has {B}"
                f" ({name} {array}, q {q})"
            )
    if k_heads != G:
        raise ValueError(f"{function}: k has {k_heads} heads but v has {G} (k {k}, v {v})")
    if num_keys != S:
        raise ValueError(f"{function}: k has {num_keys} keys but v has {S} (k {k}, v {v})")
    if key_size != D:
        raise ValueError(f"{function}: k has head size {key_size} but q has {D} (k {k}, q {q})")
    if D == 0:
        raise ValueError(f"{function}: the head size must be at least 1, got 0 (q {q}, k {k})")
    if (H % G if G else H) != 0:
        raise ValueError(
            f"{function}: q has {H} heads, which is no multiple of the {G} of k and v"
            f" (q {q}, k {k}, read as {LAYOUTS[layout]})"
        )
    if causal and request.right_slopes is not None:
        raise ValueError(
            f"{function}: right_slopes contradicts causal=True, which hides that side;"
            " pass causal=False"
        )
    for name in ("slopes", "right_slopes"):
        slope = getattr(request, name)
        if slope is not None and not has_shape(slope, (H,), (B, H)):
            raise ValueError(
                f"{function}: {name} must have shape [H] = {[H]} or [B, H] = {[B, H]}, got {slope}"
            )
    check_placement(function, B, G, request.key_range, request.query_start)
    window = check_window(function, request.window, bool(causal))
    if request.query_range is not None:
        check_query_range(function, request.query_range, T, B)
        if request.query_range.device != q.device:
            raise ValueError(
                f"{function}: query_range is on {request.query_range.device}"
                f" but q is on {q.device}"
            )
    key_bound = request.key_bound
    if key_bound is not None and not (has_shape(key_bound, (B, G)) and key_bound.dtype in FLOATS):
        raise ValueError(
            f"{function}: key_bound must be floating point [B, G] = {[B, G]},"
            f" got {key_bound.dtype} {key_bound}"
        )
    if mask is not None:
        _check_mask(function, mask, (B, H, T, S), q.device)
    if request.positions is None and request.query_positions is not None:
        raise ValueError(
            f"{function}: query_positions lie among positions of keys; give positions too"
        )
    for name, n in (("positions", S), ("query_positions", T)):
        x = getattr(request, name)
        if x is not None:
            _check_positions(function, name, x, (B, H, n), q.device)
    return Problem(
        B=B,
        H=H,
        G=G,
        T=T,
        S=S,
        D=D,
        E=E,
        dtype=q.dtype,
        device=q.device.partition(":")[0],
        causal=bool(causal),
        scale=_number(function, "scale", request.scale, -math.inf, math.inf, 1 / math.sqrt(D)),
        tolerance=_number(function, "tolerance", request.tolerance, 0.0, 1.0, TOLERANCE[q.dtype]),
        dropout=check_dropout(function, request.dropout),
        added=mask is not None and mask.dtype in FLOATS,
        query_range=request.query_range is not None or window != NO_WINDOW,
        **{name: getattr(request, name) is not None for name in _GIVEN},
        **asked,
    )


# Arrays of which a problem says whether there is one.
_GIVEN = ("key_range", "query_start", "mask", "positions", "query_positions")


def check_slopes(function: str, request: Request[A], read: Callable[[A], Any]) -> None:
    """Check the values of slopes; `read` answers None where they are not known."""
    for name in ("slopes", "right_slopes"):
        slopes = getattr(request, name)
        values = None if slopes is None else read(slopes)
        if values is not None:
            check_slope_values(function, name, values)


def check_values(
    function: str,
    problem: Problem,
    request: Request[A],
    read: Callable[[A], Any],
    depth: int = 3,
    any_order: bool = False,
) -> bool:
    """Check where keys and queries stand, as far as `read` gives values; depth as in a warning.

    With any_order, of those who can sort, return whether they stand in order, or are not known.
    """
    if request.query_range is not None and (of_rows := read(request.query_range)) is not None:
        check_query_range_values(function, of_rows, problem.S)
    names = ("positions", "query_positions", "key_range", "query_start")
    given = [getattr(request, name) for name in names]
    known = [None if x is None else read(x) for x in given]
    x, xq, *integers = known
    ranges, starts = (None if n is None else as_int64(n) for n in integers)
    if ranges is not None:
        check_key_range_values(function, ranges, problem.S)
    if starts is not None:
        check_query_start_values(function, starts)
    if x is None or [y is None for y in given] != [y is None for y in known]:
        return True
    return check_position_values(function, problem, x, xq, ranges, starts, depth + 1, any_order)


def refuse_ranges_in_any_order(function: str) -> NoReturn:
    raise NotImplementedError(
        f"{function}: window and query_range count keys as they stand, and these positions are in"
        " another order; sort keys and queries by their positions"
    )


def fill(
    request: Request[A],
    problem: Problem,
    slopes: A,
    xp: Any,
    last_end: Callable[[Any], Any],
    count: Callable[[int], Any],
) -> dict[str, Any]:
    """A checked call with what it leaves open filled in, but for arrays that a front end makes.

    Args:
        slopes: Those of the request, or what a call means that names none.
        xp: The front end's functions of arrays, such as `numpy`.
        last_end: Where the ranges [B, G, 2] of each batch row end at last: [B].
        count: The integers from 0 up to a number, signed, where q lies.
    """
    right: Any = request.right_slopes
    ranges: Any = request.key_range
    start: Any = request.query_start
    mask: Any = request.mask
    if right is None and not problem.causal:
        right = slopes
    if ranges is not None:
        per_head = ranges if len(ranges.shape) == 3 else ranges[:, None]
        ranges = xp.broadcast_to(per_head, (problem.B, problem.G, 2))
        if start is None:
            start = last_end(ranges) - problem.T
    if mask is not None:
        mask = mask[(None,) * (4 - len(mask.shape))]
    return {
        "q": request.q,
        "k": request.k,
        "v": request.v,
        "left": slopes,
        "right": right,
        "key_range": ranges,  # [B, G, 2]
        "query_start": start,  # [B]
        # [B, T, 2]: the first and one past the last key of each query, within the keys
        "query_range": ranges_of_queries(
            request.query_range, request.window, problem, start, xp, count
        ),
        "mask": mask,  # of four axes
        "key_bound": request.key_bound,
        "scale": problem.scale,
        "dropout": problem.dropout,
        "tolerance": problem.tolerance,
    }


def ranges_of_queries(
    query_range: Any,
    window: tuple[int, int] | None,
    problem: Problem,
    start: Any,
    xp: Any,
    count: Callable[[int], Any],
) -> Any:
    """The ranges that window and query_range leave of each query, [B, T, 2]; None: all keys."""
    if not problem.query_range:
        return None
    T, S = problem.T, problem.S
    limits = []
    if query_range is not None:
        limits.append((query_range[..., 0], query_range[..., 1]))
    left, right = (min(n, LARGEST_WINDOW) for n in check_window("", window, problem.causal))
    own_key = count(T) + (S - T if start is None else start[:, None])  # [T] or [B, T]
    if left >= 0:
        limits.append((own_key.clip(0, None) - left, 0 * own_key + S))
    if right >= 0:
        limits.append((0 * own_key, own_key.clip(None, S) + right + 1))
    first, end = limits[0]
    for other_first, other_end in limits[1:]:
        first, end = xp.maximum(first, other_first), xp.minimum(end, other_end)
    first, end = first.clip(0, S), end.clip(0, S)
    ranges = xp.stack((first, xp.maximum(first, end)), -1)
    return xp.broadcast_to(ranges, (problem.B, T, 2))


def _missing_axes(name: str, array: Described, layout: str) -> str:
    """What to write where the axes of the batch, or of the heads too, were left out."""
    if len(array.shape) == 3:
        return f"; {name}[None] is a batch of one"
    if len(array.shape) == 2:
        index = "None, None" if layout == "BHTD" else "None, :, None"
        return f"; {name}[{index}] is a batch of one with one head"
    return ""


def _check_mask(function: str, mask: Described, full: tuple[int, ...], device: str) -> None:
    """A mask, of bool or numbers to add, broadcasts to [B, H, T, S] and lies where q does."""
    if mask.dtype != "bool" and mask.dtype not in FLOATS:
        raise TypeError(
            f"{function}: mask must hold bool, True for what takes part, or floating-point"
            " numbers that are added"
            f" to the scores, got {mask.dtype}"
        )
    own = mask.shape
    if len(own) > 4 or any(n not in (1, m) for n, m in zip(own[::-1], full[::-1], strict=False)):
        raise ValueError(
            f"{function}: mask must broadcast to [B, H, T, S] = {list(full)}, got {mask}"
        )
    if mask.device != device:
        raise ValueError(f"{function}: mask is on {mask.device} but q is on {device}")


def _check_positions(
    function: str, name: str, array: Described, full: tuple[int, ...], device: str
) -> None:
    """Positions are [n], [B, n] or [B, H, n], of a type fine enough, and lie where q does."""
    check_position_type(function, name, array.dtype)
    B, H, n = full
    if not has_shape(array, (n,), (1, n), (B, n), (1, H, n), full):
        last = "S" if name == "positions" else "T"
        raise ValueError(
            f"{function}: {name} must have shape [{last}] = {[n]}, [B, {last}] = {[B, n]}"
            f" or [B, H, {last}] = {[B, H, n]},"
            f" got {array}"
        )
    if array.device != device:
        raise ValueError(f"{function}: {name} is on {array.device} but q is on {device}")


def check_position_type(function: str, name: str, dtype: str) -> None:
    if dtype not in POSITION_TYPES:
        raise TypeError(
            f"{function}: {name} must be float32, float64 or integers, which tell far positions"
            f" apart, or NumPy's datetime64 or timedelta64, got {dtype}"
        )


def has_shape(array: Any, *allowed: tuple[int, ...]) -> bool:
    """Whether an array has one of these shapes; compared entry by entry, as symbols must be."""
    return any(
        len(array.shape) == len(shape)
        and all(m == n for m, n in zip(array.shape, shape, strict=True))
        for shape in allowed
    )


def check_placement(
    function: str, B: int, G: int, key_range: Described | None, query_start: Described | None
) -> None:
    """key_range is [B, 2] or [B, G, 2] and query_start [B], integers."""
    for name, integers in (("key_range", key_range), ("query_start", query_start)):
        if integers is not None:
            check_integers(function, name, integers)
    if key_range is not None and not has_shape(key_range, (B, 2), (B, G, 2)):
        raise ValueError(
            f"{function}: key_range must have shape [B, 2] = {[B, 2]} or [B, G, 2] = {[B, G, 2]},"
            f" got {key_range}"
        )
    if query_start is not None and not has_shape(query_start, (B,)):
        raise ValueError(f"{function}: query_start must have shape [B] = {[B]}, got {query_start}")


def check_integers(function: str, name: str, array: Described, advice: str = "") -> None:
    if not array.dtype.startswith(("int", "uint")):
        raise TypeError(f"{function}: {name} must hold integers, got {array.dtype}{advice}")


def check_window(function: str, window: Any, causal: bool) -> tuple[int, int]:
    """A window is (left, right), keys before and after a query that it sees, -1 for no limit."""
    if window is None:
        return NO_WINDOW
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or any(isinstance(n, bool) or not _is_number(n, numbers.Integral) for n in window)
    ):
        raise TypeError(
            f"{function}: window must be (left, right), two integers: how many keys before and"
            f" after its own a query sees, -1 for no limit; got {window!r}"
        )
    left, right = (int(n) if isinstance(n, numbers.Integral) else n for n in window)
    if min(left, right) < -1:
        raise ValueError(f"{function}: window must be at least -1 on each side, got {window}")
    return left, -1 if causal else right


def check_query_range(function: str, ranges: Described, T: int, B: int | None = None) -> None:
    """query_range is [T, 2] or [B, T, 2], integers; without B rows of packed sequences."""
    check_integers(function, "query_range", ranges)
    if B is None and not has_shape(ranges, (T, 2)):
        raise ValueError(
            f"{function}: query_range must have shape [total_q, 2] = {[T, 2]}, got {ranges}"
        )
    if B is not None and not has_shape(ranges, (T, 2), (1, T, 2), (B, T, 2)):
        raise ValueError(
            f"{function}: query_range must have shape [T, 2] = {[T, 2]} or [B, T, 2] ="
            f" {[B, T, 2]}, got {ranges}"
        )


def check_points(
    function: str, B: int, N: int, points: Any, metric: object, global_tokens: object
) -> int:
    """points is [N, A] or [B, N, A], A = 1, 2 or 3; return how many tokens stand nowhere."""
    if len(points.shape) not in (2, 3) or not has_shape(
        points, (N, points.shape[-1]), (1, N, points.shape[-1]), (B, N, points.shape[-1])
    ):
        raise ValueError(
            f"{function}: points must have shape [N, A] = [{N}, A] or [B, N, A] = [{B}, {N}, A],"
            f" got {list(points.shape)}"
        )
    if points.shape[-1] not in (1, 2, 3):
        raise ValueError(
            f"{function}: points must have A = 1, 2 or 3 coordinates,"
            f" got {points.shape[-1]} (points {list(points.shape)})"
        )
    if metric not in METRICS:
        raise ValueError(f"{function}: metric must be one of {METRICS}, got {metric!r}")
    if isinstance(global_tokens, bool) or not isinstance(global_tokens, (int, np.integer)):
        raise TypeError(f"{function}: global_tokens must be an integer, got {global_tokens!r}")
    if not 0 <= global_tokens <= N:
        raise ValueError(
            f"{function}: global_tokens must be from 0 to N = {N}, got {global_tokens}"
        )
    return int(global_tokens)


def check_query_points(function: str, B: int, T: int, points: Any, query_points: Any) -> None:
    """query_points is [T, A] or [B, T, A], of as many coordinates as points."""
    A = points.shape[-1]
    if not has_shape(query_points, (T, A), (1, T, A), (B, T, A)):
        raise ValueError(
            f"{function}: query_points must have shape [T, A] = {[T, A]} or"
            f" [B, T, A] = {[B, T, A]}, got {list(query_points.shape)}"
        )


def check_num_points(function: str, B: int, num_points: Described) -> None:
    """num_points is [B], integers."""
    of_mask = "; of a mask of padding that is (~mask).sum(1)" * (num_points.dtype == "bool")
    check_integers(function, "num_points", num_points, of_mask)
    if not has_shape(num_points, (B,)):
        raise ValueError(f"{function}: num_points must have shape [B] = {[B]}, got {num_points}")


def check_num_points_values(function: str, num_points: np.ndarray, N: int) -> None:
    for b in np.flatnonzero((num_points < 0) | (num_points > N))[:1]:
        raise ValueError(
            f"{function}: num_points must be from 0 to N = {N}, got {num_points[b]}"
            f" in batch row {b}"
        )


def check_point_values(
    function: str,
    points: np.ndarray,
    first_token: int = 0,
    num_points: np.ndarray | None = None,
    name: str = "points",
) -> None:
    """Coordinates [..., N, A], from first_token on, are finite and so small that distances are."""
    if points.dtype.kind in "iu":
        # Compared as they are, unsigned ones above 2^63 too.
        bad, rule = (points > 2**53) | (points < -(2**53)), "integers within 2^53"
    else:
        with np.errstate(invalid="ignore"):
            bad, rule = ~(np.abs(points) <= LARGEST_COORDINATE), "finite, within 2^100"
    if num_points is not None:  # nobody reads what padding holds
        tokens = first_token + np.arange(points.shape[-2])
        own = points.ndim == 3 and len(points) > 1
        counts = num_points if own else num_points.max(initial=0)
        bad = bad & (tokens < np.expand_dims(counts, -1))[..., None]
    if bad.any():
        *row, token, axis = np.argwhere(bad)[0].tolist()
        of_row = f" of batch row {row[0]}" if row else ""
        value = points[(*row, token, axis)]
        raise ValueError(
            f"{function}: {name} must be {rule}, got {value} in token {token + first_token}"
            f"{of_row}, axis {axis}"
        )


def refuse_unknown(
    function: str, given: Mapping[str, object], called: Callable[..., object]
) -> NoReturn:
    """Raise for an argument that `called` does not have, with the name that it has there."""
    parameters = inspect.signature(called).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "function"]
    name = next(name for name in given if name not in known)
    near = difflib.get_close_matches(name, known, n=1)
    other = OTHER_NAMES.get(name)
    if "num_points" in known:
        other = _AMONG_POINTS.get(name, other)
    said = re.match(r"say (\w+)(?: and (\w+))?", other or "")
    if name.endswith("mask") and "mask" in known:
        advice = f"say mask, or {_PLACING}"
    elif other and (said is None or {*said.groups()} <= {*known, None}):
        advice = other
    elif near:
        advice = f"did you mean {near[0]}?"
    else:
        advice = f"there are {', '.join(known)}"
    raise TypeError(f"{function}: there is no argument {name}; {advice}")


def warn_of_layout(function: str, problem: Problem, layout: str = "BHTD", depth: int = 3) -> None:
    """Warn where length and heads were evidently given in each other's place.

    Apart from `check`, as compilers cannot trace a warning; depth: calls from the user's line.
    """
    H, G, T, S = problem.H, problem.G, problem.T, problem.S
    # Below 128, and with as many queries as heads, both ways to read the axes are common.
    one_of_them = H == S >= 128 and T == G > 1
    all_of_them = H == G >= 128 and T == S and 1 < T <= H // 4
    swapped = one_of_them or all_of_them
    if H > MOST_HEADS or swapped:
        given = f"{H} heads and {T} queries in q, {G} and {S} keys in k"
        warnings.warn(
            f"{function}: the axes are read as {LAYOUTS[layout]}, which makes {given}; swap the"
            " axes of length and heads if that is not meant",
            stacklevel=depth + 1,
        )


def _sizes(array: Described, layout: str) -> tuple[int, ...]:
    if layout == "BHTD":
        return array.shape
    return tuple(array.shape[layout.index(axis)] for axis in "BHTD")


def check_dropout(function: str, dropout: object) -> float:
    """Dropout is a number from 0 to LARGEST_DROPOUT."""
    number = _number(function, "dropout", dropout, -math.inf, math.inf, 0.0)
    if not 0 <= number <= LARGEST_DROPOUT:
        raise ValueError(f"{function}: dropout must be in [0, 1 - 2^-32], got {number}")
    return number


def real_array(function: str, name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """The values as an array of real numbers, in their own dtype."""
    array = as_array(function, name, values)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{function}: {name} must hold real numbers, got {array.dtype}")
    return array


def as_array(function: str, name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{function}: {name} must be an array, got {values!r}") from error


def as_int64(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Integers as int64, since sums with lengths wrap around in fewer bits; others as they are."""
    if x.dtype == np.uint64:
        x = x.clip(max=np.iinfo(np.int64).max)  # refused, as what is beyond would be
    return x.astype(np.int64, copy=False) if x.dtype.kind in "iu" else x


def check_slope_values(function: str, name: str, values: np.ndarray, finite: bool = False) -> None:
    """Slopes are at least 0, or inf to hide their side; finite: points have no sides."""
    good = (values >= 0) & ~(finite & np.isinf(values))
    if not good.all():
        rule = "finite and at least 0" if finite else "at least 0 (or inf)"
        raise ValueError(f"{function}: {name} must be {rule}, got {values[~good][0]}")


def check_mask_values(function: str, mask: np.ndarray) -> None:
    """Numbers that are added to scores are below inf; -inf hides."""
    bad = np.isnan(mask) | np.isposinf(mask)
    if bad.any():
        raise ValueError(f"{function}: a mask of numbers must be below inf, got {mask[bad][0]}")


def check_key_range_values(function: str, ranges: np.ndarray, S: int) -> None:
    """Every range is 0 <= first <= one past last <= S; ranges is [B, 2] or [B, G, 2]."""
    first, end = ranges[..., 0], ranges[..., 1]
    bad = np.argwhere(~((first >= 0) & (first <= end) & (end <= S)))
    if len(bad):
        where = tuple(bad[0])
        of_head = f", key/value head {where[1]}" if len(where) > 1 else ""
        raise ValueError(
            f"{function}: key_range must be 0 <= first <= end <= S = {S},"
            f" got {ranges[where].tolist()} in batch row {where[0]}{of_head}"
        )


def check_query_range_values(function: str, ranges: np.ndarray, S: int) -> None:
    """As of `key_range`, of each query: ranges is [T, 2] or [B, T, 2]."""
    first, end = ranges[..., 0], ranges[..., 1]
    bad = np.argwhere(~((first >= 0) & (first <= end) & (end <= S)))
    if len(bad):
        *row, query = bad[0].tolist()
        of_row = f" of batch row {row[0]}" if row else ""
        raise ValueError(
            f"{function}: query_range must be 0 <= first <= end <= S = {S},"
            f" got {ranges[(*row, query)].tolist()} for query {query}{of_row}"
        )


def check_query_start_values(function: str, starts: np.ndarray) -> None:
    """Every start is so small that 32-bit integers can count from it."""
    bad = np.flatnonzero(np.abs(starts.astype(np.float64)) > LARGEST_START)
    if len(bad):
        raise ValueError(
            f"{function}: query_start must be within 2^30 of key 0,"
            f" got {starts[bad[0]]} in batch row {bad[0]}"
        )


def check_position_values(
    function: str,
    problem: Problem,
    positions: np.ndarray,
    query_positions: np.ndarray | None,
    ranges: np.ndarray | None,
    starts: np.ndarray | None,
    depth: int = 3,
    any_order: bool = False,
) -> bool:
    """Positions do not fall within a range, and a query stands between the keys beside it.

    The shapes are those that `check` allows; None stands for what a call leaves open. With
    any_order, and neither causal nor starts, they may stand otherwise: return whether they do not.
    """
    H, G, T, S = problem.H, problem.G, problem.T, problem.S
    positions = np.atleast_2d(positions)
    query_positions = None if query_positions is None else np.atleast_2d(query_positions)
    sorts = any_order and not problem.causal and starts is None
    # What has no range or position of its own is looked at once: [B or 1, H or 1, ...].
    ranges = np.array([[0, S]]) if ranges is None else ranges
    ranges = ranges[:, None] if ranges.ndim == 2 else ranges.repeat(H // max(1, G), axis=1)
    first, end = ranges[..., :1], ranges[..., 1:]
    x = positions[:, None] if positions.ndim == 2 else positions
    base = a_key(x, end)
    if not _in_order(x) or x.dtype == np.float32:
        inside = (np.arange(S) >= first) & (np.arange(S) < end)
        _refuse_far(function, "positions", positions, base, inside)
        known = np.where(inside, x, base)
        pairs = inside[..., 1:] & inside[..., :-1]
        for b, h, s in _first(pairs & (known[..., 1:] < known[..., :-1])):
            if sorts:
                return False
            way = ", or say causal=False, where any order will do" if any_order else ""
            raise ValueError(
                f"{function}: positions must not fall, got {known[b, h, s + 1]}"
                f" after {known[b, h, s]} at {_index(positions, b, h, s + 1)}; sort keys, values"
                f" and queries by their positions{way}"
            )
        if x.dtype == np.float32:
            _warn_of_alike(function, "positions", known, pairs, depth)
    starts = end[..., 0].max(1, initial=0) - T if starts is None else starts
    own_key = (starts[:, None] + np.arange(T))[:, None]
    if query_positions is None:
        nowhere = ((own_key < 0) | (own_key >= S)) & (first < end)
        for b, h, t in _first(nowhere):
            key = np.broadcast_to(own_key, nowhere.shape)[b, h, t]
            raise ValueError(
                f"{function}: query {t} of batch row {b} would stand at key {key} of {S};"
                " say where with query_start (0: each at its own key) or query_positions"
            )
        return True
    _refuse_far(function, "query_positions", query_positions, base, np.ones((1, 1, T), bool))
    xq = query_positions[:, None] if query_positions.ndim == 2 else query_positions
    if xq.dtype == np.float32:
        _warn_of_alike(function, "query_positions", xq, np.bool_(True), depth)
    if not S:
        return True
    before, after = np.minimum(own_key, end - 1), np.maximum(own_key + 1, first)
    for words, key, there, is_beyond in (
        ("at least that of every key before the query", before, before >= first, np.less),
        ("at most that of every key after the query", after, after < end, np.greater),
    ):
        key = np.clip(key, 0, S - 1)
        stands = np.take_along_axis(x, key, -1)
        beyond = there & is_beyond(xq, stands)
        for b, h, t in _first(beyond):
            if sorts:
                return False
            x_of, k_of, s_of = (
                np.broadcast_to(a, beyond.shape)[b, h, t] for a in (xq, key, stands)
            )
            way = "; causal=False without query_start finds them by itself" if any_order else ""
            raise ValueError(
                f"{function}: query_positions must be {words}, got {x_of}"
                f" at {_index(query_positions, b, h, t)} where key {k_of} stands at {s_of}{way}"
            )
    return True


def less(x: np.ndarray, base: np.ndarray) -> npt.NDArray[np.float64]:
    """Positions less that of `a_key`, float64: exact where both are integers."""
    if x.dtype.kind in "iu" and base.dtype.kind in "iu":
        return (x.astype(np.int64) - base.astype(np.int64)).astype(np.float64)
    return x.astype(np.float64) - base.astype(np.float64)


def a_key(x: np.ndarray, end: np.ndarray) -> np.ndarray:
    """[B, H, 1]: where the last key of each range stands if x [B, H, S] are integers, else 0.

    Differences of integers are exact, and become floats when they are small.
    """
    if x.dtype.kind not in "iu" or not x.shape[-1]:
        return np.zeros((1, 1, 1), x.dtype)
    return np.take_along_axis(x, np.clip(end - 1, 0, x.shape[-1] - 1), -1)


def _warn_of_alike(
    function: str,
    name: str,
    x: npt.NDArray[np.float32],
    used: npt.NDArray[np.bool_] | np.bool_,
    depth: int,
) -> None:
    """Warn where float32 has evidently made one of different stamps: alike beyond 2^24."""
    for b, h, i in _first(used & (x[..., 1:] == x[..., :-1]) & (np.abs(x[..., 1:]) > 2**24)):
        warnings.warn(
            f"{function}: {name} are float32, which rounds to 2 and more beyond 2^24, and"
            f" neighbours are alike, {x[b, h, i]} both; if they were not, give float64 or int64"
            " (to JAX as NumPy arrays), or subtract the first stamp from all before",
            stacklevel=depth + 2,
        )


def _in_order(x: np.ndarray) -> bool:
    """Whether all of [..., n] lie within 2^53 of 0, or integers of each other, and none falls;
    quick, for decode steps.
    """
    lowest, highest = x[..., :1], x[..., -1:]
    if not (x[..., 1:] >= x[..., :-1]).all():
        return False
    if x.dtype.kind in "iu":
        return bool((_apart(highest, lowest) <= LARGEST_POSITION).all())
    return bool((lowest >= -LARGEST_POSITION).all() and (highest <= LARGEST_POSITION).all())


def _apart(x: np.ndarray, y: np.ndarray) -> npt.NDArray[np.uint64]:
    """|x - y| of integers, exact: modulo 2^64 no difference is lost."""
    ours, theirs = x.astype(np.uint64), y.astype(np.uint64)
    return np.where(x >= y, ours - theirs, theirs - ours)


def _first(wrong: np.ndarray) -> npt.NDArray[np.int64]:
    """[1, axes], the index of the first that is wrong; [0, axes] if none is."""
    return np.argwhere(wrong)[:1] if wrong.any() else np.empty((0, wrong.ndim), np.int64)


def _refuse_far(
    function: str, name: str, positions: np.ndarray, base: np.ndarray, used: np.ndarray
) -> None:
    """Raise for numbers [B, n] or [B, H, n], where used, whose differences lose digits."""
    x = positions[:, None] if positions.ndim == 2 else positions
    if x.dtype.kind in "iu" and base.dtype.kind in "iu":
        known, rule = _apart(x, base) <= LARGEST_POSITION, "integers within 2^53 of each other"
    else:
        known = (x <= LARGEST_POSITION) & (x >= -LARGEST_POSITION)
        rule = "numbers within 2^53 of 0 (or integers within 2^53 of each other)"
    for b, h, i in _first(used & ~known):
        where = _index(positions, b, h, i)
        value = positions[tuple(where)]
        if x.dtype.kind == "i" and value == np.iinfo(np.int64).min:
            value = f"NaT, or {value},"  # as NumPy writes it
        raise ValueError(f"{function}: {name} must be {rule}, got {value} at {where}")


def _index(array: np.ndarray, b: int, h: int, i: int) -> list[int]:
    """An index of [B, H, n], as an array has it that may be [B, n], and B be 1."""
    b = min(b, len(array) - 1)
    return [int(n) for n in ((b, i) if array.ndim == 2 else (b, h, i))]


def check_parts(outs: Sequence[tuple[int, ...]], lses: Sequence[tuple[int, ...]]) -> None:
    """Parts to merge: as many outs [..., T, E] as lses [..., T], the same shapes for all."""
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge: outs and lses must be as many, at least 1, got {len(outs)} and {len(lses)}"
        )
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out != outs[0] or lse != outs[0][:-1]:
            raise ValueError(
                f"merge: every part must have out {list(outs[0])} and lse {list(outs[0][:-1])},"
                f" got {list(out)} and {list(lse)} in part {index}"
            )


def _is_number(value: object, kind: type) -> bool:
    """Whether a value is of an abstract kind, or a symbol of PyTorch's for one, made of a size."""
    return isinstance(value, kind) or type(value).__name__ in ("SymInt", "SymFloat")


def _number(
    function: str, name: str, value: Any, low: float, high: float, default: float
) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not _is_number(value, numbers.Real):
        raise TypeError(f"{function}: {name} must be a number, got {value!r}")
    number = float(value)
    if math.isinf(low):
        # Compared, because math.isfinite does not take a compiler's symbol.
        if not low < number < high:
            raise ValueError(f"{function}: {name} must be finite, got {number}")
    elif not low <= number < high:
        raise ValueError(f"{function}: {name} must be in [{low:g}, {high:g}), got {number}")
    return number
