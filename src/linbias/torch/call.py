"""A call of attention from its arguments to its results: check them, fill in what they leave open, choose, run."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from linbias import _dispatch, _request
from linbias.torch import places
from linbias.torch.choice import asked_in_turn
from linbias.torch.constant import default_slopes
from linbias.torch.dropout import draw_seed
from linbias.torch.operators import transforms
from linbias.torch.operators.operator import Inputs, without_autocast

Slopes = Tensor | Sequence[float] | np.ndarray[Any, Any]


# What `context_parallel.use` puts in the place of calls over whole sequences: of all threads here, and under this key in what
# PyTorch keeps for a thread, and for those that run backward for it.
in_pieces: list[Any] = []
_OF_THREAD = "linbias.in_pieces"


def pieces_here() -> Any:
    """What `context_parallel.use` puts in the place of this thread's calls, of the innermost block; None outside of one."""
    if not in_pieces or not torch._C._is_key_in_tls(_OF_THREAD):
        return None
    return torch._C._get_obj_in_tls(_OF_THREAD)


@contextmanager
def put_in_place(pieces: Any) -> Iterator[None]:
    """Let this thread's calls over whole sequences be those of `pieces`."""
    before = pieces_here()
    in_pieces.append(pieces)
    torch._C._stash_obj_in_tls(_OF_THREAD, pieces)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_OF_THREAD, before)
        in_pieces.remove(pieces)


def refuse_pieces(function: str) -> None:
    """Raise within `context_parallel.use`, where a process has a piece of the sequence only."""
    if pieces_here() is not None:
        raise ValueError(
            f"{function}: a sequence in pieces on several processes (context_parallel.use) is read by linbias.torch.attention alone"
        )


class Options(TypedDict, total=False):
    """The keywords of `attention` that say what is computed."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: Tensor | None
    query_start: Tensor | None
    mask: Tensor | None
    positions: Tensor | None
    query_positions: Tensor | None
    key_bound: Tensor | None
    dropout: float
    tolerance: float | None


def prepare(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: Tensor | None = None,
    query_start: Tensor | None = None,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_bound: Tensor | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    lse: bool = False,
    **unknown: object,
) -> tuple[Inputs, _request.Problem]:
    """Check the arguments of a call and fill in what they leave open: what the implementations take."""
    if unknown:
        _request.refuse_unknown(function, unknown, prepare)
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{function}: torch.jit.trace, which takes sizes for constants, is not supported; use torch.export or torch.compile"
        )
    given: tuple[tuple[str, Any], ...] = ("q", q), ("k", k), ("v", v)
    for name, array in given:
        if not isinstance(array, Tensor):
            describe(name, array, function)  # which refuses it
    q, k, v = autocast(q, k, v)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    left = None if slopes is None else as_slopes(function, "slopes", slopes, wide, q.device)
    right = None
    if right_slopes is not None:
        right = as_slopes(function, "right_slopes", right_slopes, wide, q.device)
    differentiated = torch.is_grad_enabled()
    slope_gradients = differentiated and (
        (left is not None and left.requires_grad) or (right is not None and right.requires_grad)
    )
    problem = _check(
        function,
        (
            q,
            k,
            v,
            left,
            right,
            key_range,
            query_start,
            key_bound,
            mask,
            positions,
            query_positions,
        ),
        causal=causal,
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
        lse=lse,
        gradients=differentiated
        and (
            slope_gradients
            or any(
                getattr(x, "requires_grad", False) for x in (q, k, v, positions, query_positions)
            )
        ),
        slope_gradients=slope_gradients,
        transformed=transforms.active(),
    )
    if not torch.compiler.is_compiling():
        _request.warn_of_layout(function, problem)
        if not (left is None and right is None and key_range is None and query_start is None):
            _check_values(function, left, right, key_range, query_start, problem.S)
        if positions is not None:
            _check_positions(function, problem, positions, query_positions, key_range, query_start)
    if left is None:
        left = default_slopes(problem.H, wide, q.device)
    if not causal and right is None:
        right = left
    given_range = key_range
    if key_range is not None:
        if key_range.dim() == 2:
            key_range = key_range[:, None].expand(-1, problem.G, -1)
        if query_start is None:
            query_start = last_end(key_range) - problem.T
    seed = draw_seed(q.device) if problem.dropout else None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    arrays_of_call = q, k, v, left, right, key_range, query_start, key_bound, seed
    numbers = problem.scale, problem.dropout, problem.tolerance, problem.gradients
    if positions is None:
        return Inputs(*arrays_of_call, *numbers, mask=mask), problem
    standing = places.stand(problem, positions, query_positions, given_range, query_start)
    return Inputs(*arrays_of_call, *numbers, problem.slope_gradients, mask, *standing), problem


def run(
    inputs: Inputs, problem: _request.Problem, implementation: str, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Choose an implementation for a call that is prepared, and give out, or out and lse."""
    chosen = _dispatch.choose("attention", implementation, problem, asked_in_turn(problem))
    bias = None
    with without_autocast(inputs.q.device):
        if problem.query_positions:
            inputs, bias = places.stand_near(inputs)
        out, lse = chosen.attention(inputs, return_lse)
    if not return_lse:
        return out
    return out, lse if bias is None else lse - bias


def last_end(key_range: Tensor) -> Tensor:
    """Where the ranges [B, G, 2] of each batch row end at last: [B], 0 where there are no heads."""
    ends = key_range[..., 1]
    return ends.amax(1) if ends.shape[1] else ends.sum(1)


def describe(name: str, array: Any, function: str = "attention") -> _request.Described:
    if not isinstance(array, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(array).__name__}")
    if array.is_nested:
        raise TypeError(
            f"{function}: {name} is a nested tensor, which attention takes, jagged [B, H, lengths, D]"
        )
    return _request.Described(tuple(array.shape), _name(array.dtype), _name(array.device))


def _name(thing: torch.dtype | torch.device) -> str:
    """What PyTorch calls a dtype or a device; looked up, because building the string takes longer."""
    if torch.compiler.is_compiling():
        return str(thing).removeprefix("torch.")
    if thing not in _NAMES:
        _NAMES[thing] = str(thing).removeprefix("torch.")
    return _NAMES[thing]


_NAMES: dict[torch.dtype | torch.device, str] = {}


_CHECKED = (
    "q",
    "k",
    "v",
    "slopes",
    "right_slopes",
    "key_range",
    "query_start",
    "key_bound",
    "mask",
    "positions",
    "query_positions",
)


def _check(function: str, arrays: Sequence[Any], **options: Any) -> _request.Problem:
    """`_request.check`, whose answers are kept: most calls pose the same problem as one before."""
    if not torch.compiler.is_compiling():
        try:
            return _kept_check(function, *map(_signature, arrays), **options)
        except TypeError:
            pass  # a wrong kind of argument, to be refused below, or a size that is a symbol, which cannot be a key
    described: list[Any] = [
        None if array is None else describe(name, array, function)
        for name, array in zip(_CHECKED, arrays, strict=True)
    ]
    return _request.check(function, *described, **options)


def _signature(array: Any) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    """What a rule may know of an array, as it comes: a key is looked up faster than names are."""
    if array is None:
        return None
    if not isinstance(array, Tensor) or array.is_nested:
        raise TypeError
    return array.shape, array.dtype, array.device


@functools.lru_cache(maxsize=256, typed=True)
def _kept_check(function: str, *signatures: Any, **options: Any) -> _request.Problem:
    described: list[Any] = [
        None if x is None else _request.Described(tuple(x[0]), _name(x[1]), _name(x[2]))
        for x in signatures
    ]
    return _request.check(function, *described, **options)


def as_slopes(
    function: str, name: str, values: Slopes, dtype: torch.dtype, device: torch.device | None
) -> Tensor:
    """Slopes in the wide dtype; those that are no tensor pass through float64, whatever PyTorch's default dtype."""
    if isinstance(values, Tensor):
        if values.is_complex():
            kind = str(values.dtype).removeprefix("torch.")
            raise TypeError(f"{function}: {name} must hold real numbers, got {kind}")
        return values.to(device=device, dtype=dtype)
    if not torch.compiler.is_compiling():
        values = _request.real_array(function, name, values).astype(np.float64)
    return torch.as_tensor(values, dtype=torch.float64).to(device=device, dtype=dtype)


def _check_values(
    function: str,
    left: Tensor | None,
    right: Tensor | None,
    key_range: Tensor | None,
    query_start: Tensor | None,
    S: int,
) -> None:
    """Check what only the values tell, where reading them does not wait for a device."""
    for name, slopes in (("slopes", left), ("right_slopes", right)):
        if slopes is not None and slopes.device.type == "cpu":
            check_slopes(function, name, slopes)
    ranges, starts = (
        None if x is None or x.device.type != "cpu" else transforms.known_values(x)
        for x in (key_range, query_start)
    )
    if ranges is not None:
        _request.check_key_range_values(function, ranges, S)
    if starts is not None:
        _request.check_query_start_values(function, starts)


# Values of the slopes that the last call checked, by argument: most calls have those of the one before. PyTorch's count of a
# tensor's changes will not do: it leaves out those of fused optimizers, and those through `.data`.
_last_slopes: dict[str, list[Any]] = {}


def check_slopes(function: str, name: str, slopes: Tensor) -> None:
    given = None if transforms.active() else slopes.tolist()
    if given is not None and given == _last_slopes.get(name):
        return
    values = transforms.known_values(slopes)
    if values is None:
        return
    _request.check_slope_values(function, name, values)
    if given is not None:
        _last_slopes[name] = given


def _check_positions(
    function: str,
    problem: _request.Problem,
    positions: Tensor,
    query_positions: Tensor | None,
    key_range: Tensor | None,
    query_start: Tensor | None,
) -> None:
    """Check the values of positions where all that tells which of them count can be read without waiting."""
    given = (positions, query_positions, key_range, query_start)
    if all(x is None or x.device.type == "cpu" for x in given):
        known = [None if x is None else transforms.known_values(x) for x in given]
        if all(x is None or values is not None for x, values in zip(given, known, strict=True)):
            x, xq, ranges, starts = known
            assert x is not None
            _request.check_position_values(function, problem, x, xq, ranges, starts, depth=4)


def autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    device = arrays[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(a.to(dtype) if a.dtype != torch.float64 else a for a in arrays)
