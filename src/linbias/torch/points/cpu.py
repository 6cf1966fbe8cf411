"""Attention over points in the compiled core (how it works: csrc/kernel/points-inl.h)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linbias._request import Problem
from linbias.kernels import core
from linbias.torch.addresses import DTYPES, address, array, threads
from linbias.torch.points.geometry import PointInputs, along_a_curve
from linbias.torch.points.operator import Gradients, PointOperators, Results

NAME, WHY_MISSING = core.NAME, core.WHY_MISSING
ABILITIES = replace(core.ABILITIES, has=("dropout",))


def why_not(problem: Problem) -> str | None:
    return WHY_MISSING or ABILITIES.lacks(problem)


def _fill(inputs: PointInputs, results: Results) -> None:
    if not results.out.numel():
        return
    call, points, alive = _call(inputs)
    core.forward(call, points, _forward(results, alive))
    del alive


def _find_gradients(inputs: PointInputs, dout: Tensor, dlse: Tensor, saved: Results) -> Gradients:
    wide, narrow = inputs.slopes.dtype, inputs.q.dtype
    dq, dk, dv, dslopes = (torch.zeros(x.shape, dtype=wide) for x in inputs[:4])
    if dout.numel():
        call, points, alive = _call(inputs)
        backward = core.Backward(
            dout=address(dout, alive),
            dlse=address(dlse, alive),
            saved=_forward(saved, alive),
            dq=dq.data_ptr(),
            dk=dk.data_ptr(),
            dv=dv.data_ptr(),
            dleft=dslopes.data_ptr(),
        )
        core.backward(call, points, backward)
        del alive
    return dq.to(narrow), dk.to(narrow), dv.to(narrow), dslopes


def _call(inputs: PointInputs) -> tuple["core.Call", "core.Points", list[Tensor]]:
    """The call in addresses, and the arrays that have to live as long."""
    q, k, v, slopes, points, manhattan, first, scale, tolerance = inputs
    (B, H, N, D), (_, G, _, E) = q.shape, v.shape
    sizes = B, H, G, N, N, D, E
    lengths: dict[str, Any] = dict(zip("BHGTSDE", sizes, strict=True))
    curves = [along_a_curve(cloud) for cloud in points]
    nowhere = torch.arange(first)
    order = torch.stack([torch.cat((nowhere, first + curve)) for curve in curves])
    at = torch.stack([cloud[curve] for cloud, curve in zip(points, curves, strict=True)])
    alive: list[Tensor] = []
    call = core.Call(
        dtype=DTYPES[q.dtype],
        **lengths,
        q=array(q, alive),
        k=array(k, alive),
        v=array(v, alive),
        left=address(slopes, alive),
        scale=scale,
        tolerance=tolerance,
        **threads(sizes),
    )
    placed = core.Points(
        at=address(at, alive),
        order=address(order, alive),
        clouds=len(points),
        axes=points.shape[2],
        global_tokens=first,
        manhattan=manhattan,
    )
    return call, placed, alive


def _forward(results: Results, alive: list[Tensor]) -> "core.Forward":
    addresses: dict[str, Any] = {n: address(x, alive) for n, x in results._asdict().items()}
    return core.Forward(**addresses, visited_tiles=results.visited.shape[2])


operators = PointOperators(
    NAME, _fill, _find_gradients, lambda inputs: core.num_tiles(inputs.q.shape[2])
)
attention = operators.attention
