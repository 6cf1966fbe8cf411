"""`attention`: check, choose an implementation, call it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from linbias import _checks, _dispatch
from linbias.torch import dense, transforms
from linbias.torch.choice import IMPLEMENTATIONS as IMPLEMENTATIONS
from linbias.torch.choice import asked_in_turn
from linbias.torch.constant import default_slopes
from linbias.torch.dropout import draw_seed
from linbias.torch.operator import Inputs, without_autocast

Slopes = Tensor | Sequence[float] | np.ndarray[Any, Any]


class Placement(TypedDict, total=False):
    """The keywords of `attention` that say which keys a query sees, and how their scores fall."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: Tensor | None
    query_start: Tensor | None
    mask: Tensor | None


class Options(Placement, total=False):
    """The keywords of `attention` but for return_lse."""

    key_bound: Tensor | None
    dropout: float
    tolerance: float | None
    implementation: str


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: Tensor | None = None,
    query_start: Tensor | None = None,
    mask: Tensor | None = None,
    key_bound: Tensor | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose scores fall linearly with distance (ALiBi).

    Key s stands at position s, and query t at p = query_start + t; by default the last query stands at the last
    key, p = t + S - T:

        score[t, s] = scale * (q[t] . k[s]) - slope       * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right_slope * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    With causal=True only keys s <= p take part. T=2, S=4 and T=4, S=2 (x = takes part):

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    A query that may see no key gives a row of zeros and lse = -inf. Query head h reads key/value head
    h // (H // G). Scores, softmax and sums are float32 for 16-bit inputs and in q's dtype otherwise.
    Differentiable in q, k, v, slopes, right_slopes, through both out and lse; twice, and in forward mode, only by `dense`.
    Works under `torch.func.grad`, `vjp`, `jacrev` and `vmap`. Under autocast q, k and v are cast as for
    `scaled_dot_product_attention`. Nested tensors [B, H, lengths, D] of the jagged layout run by `attention_varlen`.

    Args:
        q: [B, H, T, D], float16, bfloat16, float32 or float64, any strides.
        k: [B, G, S, D], dtype and device of q. H must be a multiple of G.
        v: [B, G, S, E], dtype and device of q.
        slopes: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys. A tensor, or anything
            that makes one. None means `linbias.slopes(H)`; zeros mean no bias. Values are checked on the CPU and
            in eager mode; elsewhere reading them would stall.
        causal: Hide the keys after the query. With False and right_slopes=None the bias is symmetric.
        right_slopes: Like slopes: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        key_range: [B, 2] or [B, G, 2], integers: first and one past last key of each batch row, or of each of its
            key/value heads; keys outside are never used, whatever they hold. For left padding,
            [[num_padding, S], ...]; for a partly filled cache, [[0, num_filled], ...].
        query_start: [B], integers: the position of query 0 of each batch row, anywhere from -2^30 to 2^30, before
            the keys or beyond them too. None means that the last query stands at the last key of the range (of the
            range that ends last, where heads have their own). For right padding with T = S, zeros.
        mask: Broadcasts to [B, H, T, S], bool: True takes part, as for `scaled_dot_product_attention`. It hides further
            keys, whose entries must still be finite. Taken by `sdpa` and `dense`, which know no far keys.
        key_bound: [B, G], floating point: at least the norm of every key in the range, from a cache that keeps the
            largest norm; all keys and values must be finite. Decoding then reads the near keys only, instead of
            every key once for its norm. It is a promise, not checked; an implementation may do without it.
        dropout: Probability that a weight is dropped, in [0, 1 - 2^-32]; the others are divided by 1 - dropout. lse is
            that without dropout. The mask is drawn from PyTorch's generator and the same for all implementations.
        tolerance: Largest share of a row's probability that far keys, never read, may hold together. None
            means 2^-53, 2^-24, 2^-14 and 2^-12 for float64, float32, float16 and bfloat16; 0 reads every key.
        implementation: "auto" takes the first that can run the call, the one that was fastest at short lengths first:
            `triton` (CUDA GPUs, near to far), `cpu` (the compiled core, near to far), `blocked` (near to far in PyTorch
            operations, any device), `sdpa` (PyTorch's attention with the bias as its mask) or `dense` (the whole score
            matrix). A name is obeyed or refused, never replaced. `linbias doctor --call` says what "auto" takes, and why.
        return_lse: Also return lse.

    Returns:
        [B, H, T, E] in q's dtype; with return_lse also lse [B, H, T], float32 (float64 for float64 inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument.
        ValueError: A shape, device or value breaks a rule above; the message names argument, rule and value.
        NotImplementedError: The implementation cannot run this call, or give this derivative; the message says why.

    Example:
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> attention(q, k, v).shape
        torch.Size([1, 2, 3, 4])

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    if unknown:
        _checks.refuse_unknown("attention", unknown, attention)
    if _is_nested(q) or _is_nested(k) or _is_nested(v):
        from linbias.torch import nested  # which is made of this function

        return nested.attention(
            q, k, v, slopes, causal=causal, right_slopes=right_slopes, scale=scale, key_range=key_range, query_start=query_start,
            mask=mask, key_bound=key_bound, dropout=dropout, tolerance=tolerance,
            implementation=implementation, return_lse=return_lse,
        )  # fmt: skip
    inputs, problem = prepare(
        "attention",
        q,
        k,
        v,
        slopes,
        causal=causal,
        right_slopes=right_slopes,
        scale=scale,
        key_range=key_range,
        query_start=query_start,
        mask=mask,
        key_bound=key_bound,
        dropout=dropout,
        tolerance=tolerance,
        lse=return_lse,
    )
    chosen = _dispatch.choose("attention", implementation, problem, asked_in_turn(problem))
    with without_autocast(inputs.q.device):
        out, lse = chosen.attention(inputs, return_lse)
    return (out, lse) if return_lse else out


def attention_weights(
    q: Tensor,
    k: Tensor,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: Tensor | None = None,
    query_start: Tensor | None = None,
    mask: Tensor | None = None,
    **unknown: Never,
) -> Tensor:
    """Compute the weights that `attention` gives to each key: softmax(score), to look at.

    The whole matrix is in memory, which `attention` avoids. Differentiable in q, k and the slopes.

    Args:
        q, k, slopes, causal, right_slopes, scale, key_range, query_start, mask: As for `attention`.

    Returns:
        [B, H, T, S], float32 (float64 for float64 inputs). A query that sees no key has zeros.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 4)
        >>> attention_weights(q, k, [0.0])
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
    """
    if unknown:
        _checks.refuse_unknown("attention_weights", unknown, attention_weights)
    inputs, _ = prepare(
        "attention_weights",
        q,
        k,
        k,
        slopes,
        causal=causal,
        right_slopes=right_slopes,
        scale=scale,
        key_range=key_range,
        query_start=query_start,
        mask=mask,
    )
    with without_autocast(inputs.q.device):
        return dense.attention_weights(inputs)[0]


def attention_added(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None,
    added: Tensor,
    *,
    need_weights: bool = False,
    implementation: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`attention`, and its weights if wanted, where numbers that broadcast to [B, H, T, S] are added to the scores."""
    inputs, problem = prepare("attention", q, k, v, slopes, **options)
    inputs, problem = inputs._replace(mask=added), dataclasses.replace(problem, mask=True)
    chosen = _dispatch.choose("attention", implementation, problem, asked_in_turn(problem))
    with without_autocast(inputs.q.device):
        out, _ = chosen.attention(inputs, False)
        return out, dense.attention_weights(inputs)[0] if need_weights else None


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
    key_bound: Tensor | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    lse: bool = False,
    **unknown: object,
) -> tuple[Inputs, _checks.Problem]:
    """Check the arguments of a call and fill in what they leave open: what the implementations take."""
    if unknown:
        _checks.refuse_unknown(function, unknown, prepare)
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
        (q, k, v, left, right, key_range, query_start, key_bound, mask),
        causal=causal,
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
        lse=lse,
        gradients=differentiated
        and (q.requires_grad or k.requires_grad or v.requires_grad or slope_gradients),
        slope_gradients=slope_gradients,
        transformed=transforms.active(),
    )
    if not torch.compiler.is_compiling():
        _checks.warn_of_layout(function, problem)
        if not (left is None and right is None and key_range is None and query_start is None):
            _check_values(function, left, right, key_range, query_start, problem.S)
    if left is None:
        left = default_slopes(problem.H, wide, q.device)
    if not causal and right is None:
        right = left
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
    return Inputs(*arrays_of_call, *numbers, mask=mask), problem


def last_end(key_range: Tensor) -> Tensor:
    """Where the ranges [B, G, 2] of each batch row end at last: [B], 0 where there are no heads."""
    ends = key_range[..., 1]
    return ends.amax(1) if ends.shape[1] else ends.sum(1)


def _is_nested(array: object) -> bool:
    return isinstance(array, Tensor) and array.is_nested


def describe(name: str, array: Any, function: str = "attention") -> _checks.Described:
    if not isinstance(array, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(array).__name__}")
    if array.is_nested:
        raise TypeError(
            f"{function}: {name} is a nested tensor, which attention takes, jagged [B, H, lengths, D]"
        )
    return _checks.Described(tuple(array.shape), _name(array.dtype), _name(array.device))


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
)


def _check(function: str, arrays: Sequence[Any], **options: Any) -> _checks.Problem:
    """`_checks.check`, whose answers are kept: most calls pose the same problem as one before."""
    if not torch.compiler.is_compiling():
        try:
            return _kept_check(function, *map(_signature, arrays), **options)
        except TypeError:
            pass  # a wrong kind of argument, to be refused below, or a size that is a symbol, which cannot be a key
    described: list[Any] = [
        None if array is None else describe(name, array, function)
        for name, array in zip(_CHECKED, arrays, strict=True)
    ]
    return _checks.check(function, *described, **options)


def _signature(array: Any) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    """What a rule may know of an array, as it comes: a key is looked up faster than names are."""
    if array is None:
        return None
    if not isinstance(array, Tensor) or array.is_nested:
        raise TypeError
    return array.shape, array.dtype, array.device


@functools.lru_cache(maxsize=256, typed=True)
def _kept_check(function: str, *signatures: Any, **options: Any) -> _checks.Problem:
    described: list[Any] = [
        None if x is None else _checks.Described(tuple(x[0]), _name(x[1]), _name(x[2]))
        for x in signatures
    ]
    return _checks.check(function, *described, **options)


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
        values = _checks.real_array(function, name, values).astype(np.float64)
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
    slopes_left, slopes_right, ranges, starts = (
        None if x is None or x.device.type != "cpu" else transforms.known_values(x)
        for x in (left, right, key_range, query_start)
    )
    for name, slope in (("slopes", slopes_left), ("right_slopes", slopes_right)):
        if slope is not None:
            _checks.check_slope_values(function, name, slope)
    if ranges is not None:
        _checks.check_key_range_values(function, ranges, S)
    if starts is not None:
        _checks.check_query_start_values(function, starts)


def autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    device = arrays[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(a.to(dtype) if a.dtype != torch.float64 else a for a in arrays)
