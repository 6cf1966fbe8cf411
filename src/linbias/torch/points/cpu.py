"""Attention over points in the compiled core (how it works: csrc/kernel/points-inl.h)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linbias._request import Problem
from linbias.kernels import core
from linbias.torch.addresses import DTYPES, address, array, threads
from linbias.torch.points.geometry import PointInputs, along_a_curve, parts
from linbias.torch.points.operator import Gradients, PointOperators, Results

NAME, WHY_MISSING = core.NAME, core.WHY_MISSING
ABILITIES = replace(core.ABILITIES, has=())


def why_not(problem: Problem) -> str | None:
    if problem.dropout:
        return "dropout among points is not compiled yet"
    return WHY_MISSING or ABILITIES.lacks(problem)


def _fill(inputs: PointInputs, results: Results) -> None:
    for rows, num_points in parts(inputs):
        call, points, alive = _call(_part(inputs, rows, num_points))
        views = _of_part(results, rows, num_points)
        found = Results._make(x.contiguous() for x in views)  # most often the results themselves
        core.forward(call, points, _forward(found, alive))
        for view, x in zip(views, found, strict=True):
            if x is not view:
                view.copy_(x)
        del alive


def _find_gradients(inputs: PointInputs, dout: Tensor, dlse: Tensor, saved: Results) -> Gradients:
    wide, narrow = inputs.slopes.dtype, inputs.q.dtype
    dq, dk, dv, dslopes = (torch.zeros(x.shape, dtype=wide) for x in inputs[:4])
    for rows, num_points in parts(inputs):
        call, points, alive = _call(_part(inputs, rows, num_points))
        here = rows, slice(None), slice(num_points)
        views = dq[here], dk[here], dv[here], dslopes[rows]
        found = [x.contiguous() for x in views]
        backward = core.Backward(
            dout=address(dout[here], alive),
            dlse=address(dlse[here], alive),
            saved=_forward(_of_part(saved, rows, num_points), alive),
            **{n: x.data_ptr() for n, x in zip(("dq", "dk", "dv", "dleft"), found, strict=True)},
        )
        core.backward(call, points, backward)
        for view, x in zip(views, found, strict=True):
            if x is not view:
                view.copy_(x)
        del alive
    return dq.to(narrow), dk.to(narrow), dv.to(narrow), dslopes


def _part(inputs: PointInputs, rows: slice, num_points: int) -> PointInputs:
    """Some batch rows without their padding."""
    here, first = (rows, slice(None), slice(num_points)), min(inputs.global_tokens, num_points)
    places = inputs.points[rows] if len(inputs.points) > 1 else inputs.points
    return inputs._replace(
        q=inputs.q[here],
        k=inputs.k[here],
        v=inputs.v[here],
        slopes=inputs.slopes[rows],
        points=places[:, : num_points - first],
        global_tokens=first,
    )


def _of_part(results: Results, rows: slice, num_points: int) -> Results:
    here = rows, slice(None), slice(num_points)
    return Results(
        out=results.out[here],
        row_max=results.row_max[here],
        log_sum=results.log_sum[here],
        visited=results.visited[rows, :, : core.num_tiles(num_points)],
        away=results.away[here],
    )


def _call(part: PointInputs) -> tuple["core.Call", "core.Points", list[Tensor]]:
    """The call in addresses, and the arrays that have to live as long."""
    q, k, v, points, first = part.q, part.k, part.v, part.points, part.global_tokens
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
        left=address(part.slopes, alive),
        scale=part.scale,
        tolerance=part.tolerance,
        **threads(sizes),
    )
    placed = core.Points(
        at=address(at, alive),
        order=address(order, alive),
        clouds=len(points),
        axes=points.shape[2],
        global_tokens=first,
        manhattan=part.manhattan,
    )
    return call, placed, alive


def _forward(results: Results, alive: list[Tensor]) -> "core.Forward":
    # All but `away`: each query is a key, too, so that none is far from all keys.
    addresses: dict[str, Any] = {
        n: address(getattr(results, n), alive) for n in results._fields[:4]
    }
    return core.Forward(**addresses, visited_tiles=results.visited.shape[2])


operators = PointOperators(
    NAME, _fill, _find_gradients, lambda inputs: core.num_tiles(inputs.q.shape[2])
)
attention = operators.attention
