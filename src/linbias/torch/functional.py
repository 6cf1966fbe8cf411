"""`attention`: check, choose an implementation, call it."""

import types
from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from linbias import _checks, _dispatch
from linbias.slopes import slopes
from linbias.torch import blocked, cpu, dense, triton
from linbias.torch.constant import constant
from linbias.torch.dropout import draw_seed

# In the order in which "auto" asks them. On the CPU, Triton's interpreter can run `triton`, for tests: that comes last.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (triton, cpu, blocked, dense)
_ON_CPU = (cpu, blocked, dense, triton)

Slopes = Tensor | Sequence[float] | np.ndarray[Any, Any]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Slopes | None = ...,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Slopes | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
def attention(  # type: ignore[misc]  # the overloads leave out what they have in common
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Slopes | None = None,
    *,
    causal: bool = True,
    right: Slopes | None = None,
    scale: float | None = None,
    key_range: Tensor | None = None,
    key_bound: Tensor | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose scores fall linearly with distance (ALiBi).

    The last query stands at the last key, so query t has position p = t + S - T:

        score[t, s] = scale * (q[t] . k[s]) - left  * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    With causal=True only keys s <= p take part. T=2, S=4 and T=4, S=2 (x = takes part):

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    A query that may see no key gives a row of zeros and lse = -inf. Query head h reads key/value head
    h // (H // G). Scores, softmax and sums are float32 for 16-bit inputs and in q's dtype otherwise.
    Differentiable in q, k, v, left, right, through both out and lse. Under autocast q, k and v are cast
    as for `scaled_dot_product_attention`.

    Args:
        q: [B, H, T, D], float16, bfloat16, float32 or float64, any strides.
        k: [B, G, S, D], dtype and device of q. H must be a multiple of G.
        v: [B, G, S, E], dtype and device of q.
        left: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys. A tensor, or anything
            that makes one. None means `linbias.slopes(H)`; zeros mean no bias. Values are checked on the CPU and
            in eager mode; elsewhere reading them would stall.
        causal: Hide the keys after the query. With False and right=None the bias is symmetric.
        right: Like left: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        key_range: [B, 2], integers: first and one past last key of each batch row; keys outside are never
            used, whatever they hold, and the last query stands at the last key inside. For left padding,
            [[num_padding, S], ...]; for a partly filled cache, [[0, num_filled], ...].
        key_bound: [B, G], floating point: at least |k| of every key in the range, from a cache that keeps the
            largest norm; all keys and values must be finite. Decoding then reads the near keys only, instead of
            every key once for its norm. It is a promise, not checked; an implementation may do without it.
        dropout: Probability that a weight is dropped, in [0, 1); the others are divided by 1 - dropout. lse is
            that without dropout. The mask is drawn from PyTorch's generator and the same for all implementations.
        tolerance: Largest share of a row's probability that far keys, never read, may hold together. None
            means 2^-53, 2^-24, 2^-14 and 2^-12 for float64, float32, float16 and bfloat16; 0 reads every key.
        implementation: "auto" takes the first that can run the call: `triton` (CUDA GPUs, near to far), `cpu` (the
            compiled core, near to far), `blocked` (near to far in PyTorch operations, any device) or `dense` (the whole score matrix). A name is obeyed or refused, never replaced.
        return_lse: Also return lse.

    Returns:
        [B, H, T, E] in q's dtype; with return_lse also lse [B, H, T], float32 (float64 for float64 inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument.
        ValueError: A shape, device or value breaks a rule above; the message names argument, rule and value.
        NotImplementedError: The implementation cannot run this call; the message says why.

    Example:
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> attention(q, k, v).shape
        torch.Size([1, 2, 3, 4])

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    q, k, v = _autocast(q, k, v)
    described_q, described_k, described_v = (
        describe(name, array) for name, array in (("q", q), ("k", k), ("v", v))
    )
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    left, right = (None if s is None else as_slopes(s, wide, q.device) for s in (left, right))
    call = _checks.check(
        "attention",
        described_q,
        described_k,
        described_v,
        None if left is None else describe("left", left),
        None if right is None else describe("right", right),
        None if key_range is None else describe("key_range", key_range),
        None if key_bound is None else describe("key_bound", key_bound),
        causal=causal,
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
    )
    if not torch.compiler.is_compiling():
        _check_values(left, right, key_range, call.S)
    if left is None:
        left = constant(slopes(call.H) if call.H else (), wide, q.device)
    if not causal and right is None:
        right = left
    implementations = _ON_CPU if call.device == "cpu" else IMPLEMENTATIONS
    chosen = _dispatch.choose("attention", implementation, call, implementations)
    seed = draw_seed(q.device) if call.dropout else None
    # Inside, autocast would take the wide products back to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        out, lse = chosen.attention(q, k, v, left, right, key_range, key_bound, seed, call)
    return (out, lse) if return_lse else out


def describe(name: str, array: Any, function: str = "attention") -> _checks.Described:
    if not isinstance(array, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(array).__name__}")
    dtype = str(array.dtype).removeprefix("torch.")
    return _checks.Described(tuple(array.shape), dtype, str(array.device))


def as_slopes(values: Slopes, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    return torch.as_tensor(values).to(device=device, dtype=dtype)


def _check_values(
    left: Tensor | None, right: Tensor | None, key_range: Tensor | None, S: int
) -> None:
    """Check what only the values tell, where reading them does not wait for a device."""
    for name, slope in (("left", left), ("right", right)):
        if slope is not None and slope.device.type == "cpu":
            _checks.check_slope_values("attention", name, slope.detach().numpy())
    if key_range is not None and key_range.device.type == "cpu":
        _checks.check_key_range_values("attention", key_range.tolist(), S)


def _autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    if not all(isinstance(array, Tensor) for array in arrays):
        return arrays  # the checks that follow say which is none
    device = arrays[0].device.type
    if not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(a.to(dtype) if a.dtype != torch.float64 else a for a in arrays)
