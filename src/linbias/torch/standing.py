"""Where keys and queries with positions stand, and how far queries lose no digits."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from linbias._request import Problem, Request, stamps
from linbias._request.seen import beside_all
from linbias.torch.operators.operator import Inputs

# As a caller has them: numbers, or NumPy's datetime64 and timedelta64 in their own unit.
Positions = Tensor | npt.ArrayLike


def as_tensors(function: str, options: dict[str, Any], device: torch.device) -> None:
    """Make tensors of positions in other forms: lists, NumPy's arrays and its time stamps."""
    given = {name: options.get(name) for name in ("positions", "query_positions")}
    if all(x is None or isinstance(x, Tensor) for x in given.values()):
        return
    if given["positions"] is None:
        raise ValueError(
            f"{function}: query_positions lie among positions of keys; give positions too"
        )
    numbers = given
    if not torch.compiler.is_compiling():
        # Of tensors, which stay as they are, the kind of their numbers alone is asked.
        arrays: Any = (
            np.empty(0, str(x.dtype).removeprefix("torch.")) if isinstance(x, Tensor) else x
            for x in given.values()
        )
        numbers = dict(zip(given, stamps.as_numbers(function, *arrays), strict=True))
    for name, x in numbers.items():
        if x is not None and not isinstance(given[name], Tensor):
            if isinstance(x, np.ndarray):  # of any strides and order of bytes
                x = np.array(x, x.dtype.newbyteorder("="), order="C")
            options[name] = torch.as_tensor(x, device=device)


def stand(
    request: Request[Tensor], problem: Problem, query_start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where keys [B, 1 or H, S] and queries [B, 1 or H, T] stand; 0 outside the range."""
    positions, query_positions = request.positions, request.query_positions
    assert positions is not None
    T, S = problem.T, problem.S
    x = of_rows(positions, problem.B)
    xq = None if query_positions is None else of_rows(query_positions, problem.B)
    start = S - T if query_start is None else query_start[:, None, None]
    place = torch.arange(T, device=x.device) + start
    key_range, end = request.key_range, None
    first: Any = None
    if key_range is not None:
        per_head = key_range.dim() == 3
        group = problem.H // max(1, problem.G)
        limits = key_range.repeat_interleave(group, 1) if per_head else key_range[:, None]
        first, end = limits.split(1, dim=2)
    if not x.is_floating_point() and S:
        x, xq = _from_a_key(x, xq, end)
    if end is not None:
        keys = torch.arange(S, device=x.device)
        x = torch.where((keys >= first) & (keys < end), x, 0)
        place = torch.minimum(torch.maximum(place, first), end - 1)
    if xq is None:
        place = place.clamp(0, S - 1).expand(*x.shape[:2], -1)
        xq = x.gather(2, place) if S else x.new_zeros(place.shape)
    return x, xq


def _from_a_key(x: Tensor, xq: Tensor | None, end: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Integers less the last key of each range: exact, as floats so far from 0 would not be."""
    S, x = x.shape[2], x.long()
    last = torch.full_like(x[..., :1], S - 1) if end is None else (end.long() - 1).clamp(0, S - 1)
    heads = max(x.shape[1], last.shape[1])
    base = x.expand(-1, heads, -1).gather(2, last.expand(len(x), heads, 1))
    if xq is not None:
        xq = (xq.double() if xq.is_floating_point() else xq.long()) - base
    return x - base, xq


def of_rows(x: Tensor, B: int) -> Tensor:
    """[n], [1 or B, n] or [1 or B, H, n] -> [B, 1 or H, n]."""
    if x.dim() < 3:
        x = x[None, None] if x.dim() == 1 else x[:, None]
    return x if x.shape[0] == B else x.expand(B, -1, -1)


def stand_near(inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Move queries beside all keys to the nearest; and the bias [B, H, T] that they then lack."""
    x, xq = inputs.positions, inputs.query_positions
    assert x is not None and xq is not None, "whoever has positions has both"
    (B, H, T, _), (G, S) = inputs.q.shape, inputs.k.shape[1:3]
    x, xq = x.double().expand(B, H, S), xq.double().expand(B, H, T)
    if not S:
        return inputs, xq.new_zeros((), dtype=inputs.left.dtype)
    place = inputs.own_key
    if place is None:
        start = S - T if inputs.query_start is None else inputs.query_start[:, None, None]
        place = torch.arange(T, device=x.device) + start
    place = place.expand(B, H, T)
    first, end = torch.zeros_like(place[..., :1]), torch.full_like(place[..., :1], S)
    if inputs.key_range is not None:
        first, end = inputs.key_range.repeat_interleave(H // max(1, G), 1).split(1, 2)
    left, right = (_per_row(s, x.device) for s in (inputs.left, inputs.right))
    nearest = x.gather(2, place.clamp(first, end - 1).clamp(0, S - 1))
    alone, bias = beside_all(torch, xq - nearest, place, first, end, left, right)
    xq = torch.where(alone, nearest, xq)
    return inputs._replace(query_positions=xq), bias.to(inputs.left.dtype)


def _per_row(slope: Tensor | None, device: torch.device) -> Tensor:
    """[H] or [B, H] -> [1 or B, H, 1], float64; inf for None."""
    if slope is None:
        return torch.full((1, 1, 1), torch.inf, dtype=torch.float64, device=device)
    return (slope if slope.dim() == 2 else slope[None])[..., None].double()
