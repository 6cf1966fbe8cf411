"""What a call of attention asks for, its rules, and what it leaves open, without a framework.

A front end makes a `Request` of its arrays and options, and describes the arrays by shape, dtype
name and device; `check` answers with the sizes of the call or raises. Rules on values stand apart
(checks.py), for front ends that can read them cheaply. `fill` says what is meant by what a call
leaves open.

To add an argument to attention: here a field of `Request`, a row of `RULES` if it is an array,
what `fill` makes of it, and, unless all implementations will have it, a field of `Problem` that
says whether a call asks for it with a reason in `SPECIAL`; in a front end the keyword
(`functional.py`, `definition.py`) and a field of `Inputs`, where other front ends go on without;
an implementation that has it (begin with `dense`, which has all); cases in tests/support/cases.py
and truth.py.
"""

import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from linbias._request.seen import NO_WINDOW, check_window, is_number, ranges_of_queries

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
LARGEST_POSITION = 2**53

# Of published models, several times over: more are a length in the place of the heads.
MOST_HEADS = 1024

LARGEST_DROPOUT = 1 - 2.0**-32  # the mask compares 32 random bits with dropout * 2^32


class Described(NamedTuple):
    """What a rule may know of an array."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{list(self.shape)}"


A = TypeVar("A")


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


class Rule(NamedTuple):
    """What an array may be: the letters of its axes, in one of these ways, and what it holds."""

    axes: tuple[tuple[str | int, ...], ...]
    holds: str  # of HOLDS
    one_row: bool = False  # B may be 1, for all batch rows
    anywhere: bool = False  # not only where q is


def axes(*ways: str) -> tuple[tuple[str | int, ...], ...]:
    """Of "B 2": ("B", 2)."""
    return tuple(tuple(int(a) if a.isdigit() else a for a in way.split()) for way in ways)


_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
# The dtypes of each kind of array, and the rule in words.
HOLDS = {
    "floats": (FLOATS, f"be one of {FLOATS}"),
    "integers": (_INTEGERS, "hold integers"),
    "reals": ((*FLOATS, *_INTEGERS), "hold real numbers"),
    "mask": (
        ("bool", *FLOATS),
        "hold bool, True for what takes part, or floating-point numbers that are added to the"
        " scores",
    ),
    # 16 bits cannot tell far positions apart, nor can float64 beyond 2^53; of integers, which may
    # lie farther from 0, differences are formed first.
    "positions": (
        ("float32", "float64", *_INTEGERS),
        "be float32, float64 or integers, which tell far positions apart, or NumPy's datetime64 or"
        " timedelta64",
    ),
}
RULES = {
    "q": Rule(axes("B H T D"), "floats"),
    "k": Rule(axes("B G S D"), "floats"),
    "v": Rule(axes("B G S E"), "floats"),
    "slopes": Rule(axes("H", "B H"), "floats", anywhere=True),
    "right_slopes": Rule(axes("H", "B H"), "floats", anywhere=True),
    "key_range": Rule(axes("B 2", "B G 2"), "integers", anywhere=True),
    "query_start": Rule(axes("B"), "integers", anywhere=True),
    "mask": Rule(axes("B H T S"), "mask"),  # or what broadcasts to that
    "positions": Rule(axes("S", "B S", "B H S"), "positions", one_row=True),
    "query_positions": Rule(axes("T", "B T", "B H T"), "positions", one_row=True),
    "key_bound": Rule(axes("B G"), "floats", anywhere=True),
    "query_range": Rule(axes("T 2", "B T 2"), "integers", one_row=True),
}
ARRAYS = tuple(RULES)
NUMBERS = tuple(name for name in Request._fields if name not in RULES)
INTEGERS = tuple(name for name, rule in RULES.items() if rule.holds == "integers")


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
    "any_order": "it wants keys, and queries among them, in the order of their positions",
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
    causal, mask = request.causal, request.mask
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"{function}: causal must be True or False, got {causal!r}")
    sizes = _sizes(function, request, layout)
    B, H, T, D = (sizes[axis] for axis in "BHTD")
    G, S, E = (sizes[axis] for axis in "GSE")
    if D == 0:
        raise ValueError(
            f"{function}: the head size must be at least 1, got 0 (q {q}, k {request.k})"
        )
    if (H % G if G else H) != 0:
        raise ValueError(
            f"{function}: q has {H} heads, which is no multiple of the {G} of k and v"
            f" (q {q}, k {request.k}, read as {LAYOUTS[layout]})"
        )
    if causal and request.right_slopes is not None:
        raise ValueError(
            f"{function}: right_slopes contradicts causal=True, which hides that side;"
            " pass causal=False"
        )
    window = check_window(function, request.window, bool(causal))
    for name in ARRAYS[3:]:
        array = getattr(request, name)
        if array is not None:
            check_array(function, name, array, RULES[name], sizes, q.device)
    if request.positions is None and request.query_positions is not None:
        raise ValueError(
            f"{function}: query_positions lie among positions of keys; give positions too"
        )
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


def _sizes(function: str, request: Request[Any], layout: str) -> dict[str, int]:
    """The sizes of q, k and v by their letters; those that share one agree."""
    found: dict[str, tuple[int, str]] = {}
    for name in "qvk":
        array: Described = getattr(request, name)
        if len(array.shape) != 4:
            words = f"[{', '.join(layout)}]: {LAYOUTS[layout]}"
            raise ValueError(
                f"{function}: {name} must have 4 axes, {words}, got {array}"
                f"{_missing_axes(name, array, layout)}"
            )
        check_holds(function, name, array.dtype, "floats")
        if array.dtype != request.q.dtype:
            raise TypeError(f"{function}: {name} is {array.dtype} but q is {request.q.dtype}")
        _check_device(function, name, array, request.q.device)
        for axis, letter in zip("BHTD", RULES[name].axes[0], strict=True):
            size = array.shape[layout.index(axis)]
            known, other = found.setdefault(str(letter), (size, name))
            if size != known:
                what = _SAID[str(letter)].format(size)
                raise ValueError(
                    f"{function}: {name} has {what} but {other} has {known}"
                    f" ({name} {array}, {other} {getattr(request, other)})"
                )
    return {letter: size for letter, (size, _) in found.items()}


# Sizes that two arrays share, in words.
_SAID = {"B": "batch {}", "G": "{} heads", "S": "{} keys", "D": "head size {}"}


def check_array(
    function: str,
    name: str,
    array: Described,
    rule: Rule,
    sizes: Mapping[str, int | str],
    device: str | None = None,
) -> None:
    """Raise unless an array holds what its rule says, in one of its shapes, where q is."""
    check_holds(function, name, array.dtype, rule.holds)
    ways = [tuple(sizes[a] if isinstance(a, str) else a for a in way) for way in rule.axes]
    one_row = [(1, *way[1:]) for way in ways[1:] if rule.one_row]
    if rule.holds == "mask":
        (full,) = ways
        fits = len(array.shape) <= len(full) and all(
            n in (1, m) for n, m in zip(array.shape[::-1], full[::-1], strict=False)
        )
        words = "broadcast to "
    else:
        fits, words = has_shape(array, *ways, *one_row), "have shape "
    if not fits:
        named = zip(rule.axes, ways, strict=True)
        *first, last = (" = ".join(f"[{', '.join(map(str, x))}]" for x in pair) for pair in named)
        words += " or ".join([", ".join(first), last] if first else [last])
        raise ValueError(f"{function}: {name} must {words}, got {array}")
    if device is not None and not rule.anywhere:
        _check_device(function, name, array, device)


def check_holds(function: str, name: str, dtype: str, holds: str, advice: str = "") -> None:
    """Raise unless a dtype is of this kind."""
    dtypes, words = HOLDS[holds]
    if dtype not in dtypes:
        raise TypeError(f"{function}: {name} must {words}, got {dtype}{advice}")


def _check_device(function: str, name: str, array: Described, device: str) -> None:
    if array.device != device:
        raise ValueError(f"{function}: {name} is on {array.device} but q is on {device}")


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


def _missing_axes(name: str, array: Described, layout: str) -> str:
    """What to write where the axes of the batch, or of the heads too, were left out."""
    if len(array.shape) == 3:
        return f"; {name}[None] is a batch of one"
    if len(array.shape) == 2:
        index = "None, None" if layout == "BHTD" else "None, :, None"
        return f"; {name}[{index}] is a batch of one with one head"
    return ""


def has_shape(array: Any, *allowed: tuple[int | str, ...]) -> bool:
    """Whether an array has one of these shapes; compared entry by entry, as symbols must be."""
    return any(
        len(array.shape) == len(shape)
        and all(m == n for m, n in zip(array.shape, shape, strict=True))
        for shape in allowed
    )


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


def check_scale(function: str, scale: object, name: str = "scale") -> None:
    """A scale is a finite number, or None."""
    _number(function, name, scale, -math.inf, math.inf, 1.0)


def check_dropout(function: str, dropout: object, name: str = "dropout") -> float:
    """Dropout is a number from 0 to LARGEST_DROPOUT."""
    number = _number(function, name, dropout, -math.inf, math.inf, 0.0)
    if not 0 <= number <= LARGEST_DROPOUT:
        raise ValueError(f"{function}: {name} must be in [0, 1 - 2^-32], got {number}")
    return number


def _number(
    function: str, name: str, value: Any, low: float, high: float, default: float
) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not is_number(value, numbers.Real):
        raise TypeError(f"{function}: {name} must be a number, got {value!r}")
    number = float(value)
    if math.isinf(low):
        # Compared, because math.isfinite does not take a compiler's symbol.
        if not low < number < high:
            raise ValueError(f"{function}: {name} must be finite, got {number}")
    elif not low <= number < high:
        raise ValueError(f"{function}: {name} must be in [{low:g}, {high:g}), got {number}")
    return number
