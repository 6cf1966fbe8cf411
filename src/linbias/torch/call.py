"""A call of attention from its arguments to its results: check, fill in, choose, run."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linbias import _dispatch, _request
from linbias._request import Described, Problem, Request, checks
from linbias.torch import any_order, standing
from linbias.torch.choice import asked_in_turn
from linbias.torch.constant import default_slopes
from linbias.torch.dropout import draw_seed
from linbias.torch.operators import transforms
from linbias.torch.operators.direct import PLAIN_TYPES
from linbias.torch.operators.operator import Inputs, autocasts, without_autocast
from linbias.torch.operators.values import known_values, readable

Slopes = Tensor | Sequence[float] | np.ndarray[Any, Any]


def prepare(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None,
    *,
    right_slopes: Slopes | None = None,
    lse: bool = False,
    **options: Any,
) -> tuple[Inputs, Problem]:
    """Check the arguments of a call and fill in what they leave open: what the implementations
    take.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{function}: torch.jit.trace, which takes sizes for constants, is not supported;"
            " use torch.export or torch.compile"
        )
    given: tuple[tuple[str, Any], ...] = ("q", q), ("k", k), ("v", v)
    for name, array in given:
        if not isinstance(array, Tensor):
            describe(name, array, function)  # which refuses it
    if "positions" in options or "query_positions" in options:
        standing.as_tensors(function, options, q.device)
    if options:
        widen(options)
    q, k, v = autocast(q, k, v)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    left = None if slopes is None else as_slopes(function, "slopes", slopes, wide, q.device)
    right = None
    if right_slopes is not None:
        right = as_slopes(function, "right_slopes", right_slopes, wide, q.device)
    request = Request(q=q, k=k, v=v, slopes=left, right_slopes=right, **options)
    slope_gradients = gradients = False
    if torch.is_grad_enabled():
        slope_gradients = _has_gradient(left) or _has_gradient(right)
        gradients = (
            slope_gradients
            or (q.requires_grad or k.requires_grad or v.requires_grad)
            or _has_gradient(request.positions)
            or _has_gradient(request.query_positions)
        )
    problem = _check(
        function,
        request,
        lse=lse,
        gradients=gradients,
        slope_gradients=slope_gradients,
        transformed=transforms.active(),
    )
    if not torch.compiler.is_compiling():
        _request.warn_of_layout(function, problem)
        if left is not None:
            check_slopes(function, "slopes", left)
        if right is not None:
            check_slopes(function, "right_slopes", right)
        if problem.placed or problem.positions or problem.query_range:
            if not checks.check_values(function, problem, request, known_values, any_order=True):
                problem = replace(problem, any_order=True)
    if problem.query_positions and not (problem.causal or problem.query_start):
        problem = _with_values(function, problem, request)
    if problem.any_order and problem.query_range:
        checks.refuse_ranges_in_any_order(function)
    if left is None:
        left = default_slopes(problem.H, wide, q.device)
    filled = _request.fill(
        request, problem, left, torch, last_end, functools.partial(torch.arange, device=q.device)
    )
    if problem.positions:
        x, xq = standing.stand(request, problem, filled["query_start"])
        filled.update(positions=x, query_positions=xq)
    if problem.dropout:
        filled["seed"] = draw_seed(q.device)
    filled.update(precise=gradients, slope_gradients=slope_gradients)
    return Inputs._make(map(filled.get, Inputs._fields)), problem


def _with_values(function: str, problem: Problem, request: Request[Tensor]) -> Problem:
    """Queries look for the keys beside them, and values must be read on any device."""
    given = request.positions, request.query_positions, request.key_range
    known = all(x is None or readable(x) is not None for x in given)
    if not known:
        raise NotImplementedError(
            f"{function}: query_positions with causal=False cannot be looked up under"
            " torch.compile and vmap, nor among fake tensors; say query_start, at which key"
            " query 0 stands"
        )
    if problem.device == "cpu" or 0 in (problem.B, problem.H, problem.T, problem.S):
        return problem
    in_order = checks.check_values(
        function, problem, request, lambda x: known_values(x.cpu()), any_order=True
    )
    return problem if in_order else replace(problem, any_order=True)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def run(
    inputs: Inputs, problem: Problem, implementation: str, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Choose an implementation for a call that is prepared, and give out, or out and lse."""
    chosen = _dispatch.choose("attention", implementation, problem, asked_in_turn(problem))
    bias = places = None
    with without_autocast(inputs.q.device):
        if problem.any_order:
            inputs, places = any_order.sort(inputs, problem)[:2]
        if problem.query_positions or problem.any_order:
            inputs, bias = standing.stand_near(inputs)
        out, lse = chosen.attention(inputs, return_lse)
        if lse is not None and bias is not None:
            lse = lse - bias
        if places is not None:
            out = any_order.as_given(out, places)
            lse = lse if lse is None else any_order.as_given(lse, places)
    return (out, lse) if return_lse else out


def widen(options: dict[str, Any]) -> None:
    """`checks.as_int64` of those arguments that hold integers; what is no tensor is refused
    later.
    """
    for name in _request.INTEGERS:
        if isinstance(x := options.get(name), Tensor):
            options[name] = as_int64(x)


def as_int64(x: Tensor) -> Tensor:
    if x.dtype not in _NARROW:
        return x
    wide = x.to(torch.int64)
    return wide if x.dtype != torch.uint64 else wide.where(wide >= 0, torch.iinfo(wide.dtype).max)


_NARROW = [getattr(torch, f"{kind}{n}") for kind in ("int", "uint") for n in (8, 16, 32)]
_NARROW.append(torch.uint64)


def last_end(key_range: Tensor) -> Tensor:
    """Where the ranges [B, G, 2] of each batch row end at last: [B], 0 without heads."""
    ends = key_range[..., 1]
    return ends.amax(1) if ends.shape[1] else ends.sum(1)


def describe(name: str, array: Any, function: str = "attention") -> Described:
    if not isinstance(array, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(array).__name__}")
    if array.is_nested:
        raise TypeError(
            f"{function}: {name} is a nested tensor, which attention takes, jagged"
            " [B, H, lengths, D]"
        )
    if (kind := type(array).__name__) in _NO_ARRAYS:
        raise TypeError(
            f"{function}: {name} must be a tensor of all its values, which a {kind} is not;"
            f" {_NO_ARRAYS[kind]}"
        )
    return described(array.shape, array.dtype, array.device)


def described(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Described:
    return Described(tuple(shape), _name(dtype), _name(device))


def _name(thing: torch.dtype | torch.device) -> str:
    """What PyTorch calls a dtype or a device; looked up, which is quicker than building it."""
    if torch.compiler.is_compiling():
        return str(thing).removeprefix("torch.")
    if thing not in _NAMES:
        _NAMES[thing] = str(thing).removeprefix("torch.")
    return _NAMES[thing]


# Subclasses that would be computed with as what they are not, and what to give in their place.
_NO_ARRAYS = {
    "CausalBias": "causal=True (of a layer is_causal=True) says causal_lower_right, and with a"
    " query_start of zeros causal_upper_left",
    "DTensor": "give its to_local(), and see linbias.torch.context_parallel for a sequence in"
    " shards",
    "MaskedTensor": "give its get_data(), and say by mask or key_range what is hidden",
}
_NAMES: dict[torch.dtype | torch.device, str] = {}


_arrays_of, _numbers_of = attrgetter(*_request.ARRAYS), attrgetter(*_request.NUMBERS)


def _check(function: str, request: Request[Tensor], **asked: Any) -> Problem:
    """`_request.check`, whose answers are kept: most calls pose the same problem as one before."""
    if not torch.compiler.is_compiling():
        try:
            signatures = [None if x is None else signature(x) for x in _arrays_of(request)]
            # A key, too, since (1, 0) == (1.0, False).
            types = () if request.window is None else tuple(map(type, request.window))
            return _kept_check(function, types, *signatures, *_numbers_of(request), **asked)
        except TypeError:
            pass  # a wrong argument, refused below, or a size that is a symbol: no key
    words: Any = {}
    for name in _request.ARRAYS:
        array = getattr(request, name)
        if array is not None:
            words[name] = describe(name, array, function)
    return _request.check(function, request._replace(**words), **asked)


def signature(array: Any) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What a rule may know of an array, as it comes: a key is looked up faster than names are."""
    if type(array) not in PLAIN_TYPES or array.is_nested:
        raise TypeError
    return array.shape, array.dtype, array.device


@functools.lru_cache(maxsize=256, typed=True)
def _kept_check(function: str, _: tuple[type, ...], *values: Any, **asked: Any) -> Problem:
    given = dict(zip((*_request.ARRAYS, *_request.NUMBERS), values, strict=True))
    for name in _request.ARRAYS:
        if (x := given[name]) is not None:
            given[name] = described(*x)
    return _request.check(function, Request(**given), **asked)


def as_slopes(
    function: str, name: str, values: Slopes, dtype: torch.dtype, device: torch.device | None
) -> Tensor:
    """Slopes in the wide dtype; those that are no tensor pass through float64."""
    if isinstance(values, Tensor):
        if values.is_complex():
            kind = str(values.dtype).removeprefix("torch.")
            raise TypeError(f"{function}: {name} must hold real numbers, got {kind}")
        return values.to(device=device, dtype=dtype)
    if not torch.compiler.is_compiling():
        values = checks.real_array(function, name, values).astype(np.float64)
    return torch.as_tensor(values, dtype=torch.float64).to(device=device, dtype=dtype)


# Values of the slopes that the last call checked, by argument: most calls have those of the one
# before. PyTorch's count of a tensor's changes will not do: it leaves out those of fused
# optimizers, and those through `.data`.
_last_slopes: dict[str, list[Any]] = {}


def check_slopes(function: str, name: str, slopes: Tensor) -> None:
    """Check the values of slopes, where reading them does not wait for a device."""
    known = readable(slopes) if slopes.device.type == "cpu" else None
    if known is not None and (given := known.tolist()) != _last_slopes.get(name):
        checks.check_slope_values(function, name, np.array(given))
        _last_slopes[name] = given


def autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    device = arrays[0].device
    if not autocasts(device):
        return arrays
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(a.to(dtype) if a.dtype != torch.float64 else a for a in arrays)
