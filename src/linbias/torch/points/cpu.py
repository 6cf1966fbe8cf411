"""Attention over points in the compiled core (how it works: csrc/kernel/points-inl.h).

For compilers an operator is one opaque step, as in linbias.torch.operators.operator.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias._request import Problem
from linbias.kernels import core
from linbias.torch.addresses import DTYPES, address, array, threads, without_lost_threads
from linbias.torch.operators.operator import parameters, returns
from linbias.torch.points.geometry import NUM_ARRAYS, PointInputs, along_a_curve, parts

NAME, WHY_MISSING = core.NAME, core.WHY_MISSING
ABILITIES = replace(core.ABILITIES, has=())


def why_not(problem: Problem) -> str | None:
    if problem.dropout:
        return "dropout among points is not compiled yet"
    return WHY_MISSING or ABILITIES.lacks(problem)


class Results(NamedTuple):
    """What forward gives. lse comes in two parts, whose rounded sum would cost backward digits."""

    out: Tensor  # [B, H, N, E], wide
    row_max: Tensor  # [B, H, N], wide; -inf where a query sees no key
    log_sum: Tensor  # [B, H, N], wide
    visited: Tensor  # [B, H, tiles], int32: blocks that each tile visited, in its order of them


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dslopes: Tensor  # wide


def attention(inputs: PointInputs) -> tuple[Tensor, Tensor]:
    """Return out [B, H, N, E] in q's dtype and lse [B, H, N], wide."""
    results = Results(*forward(*inputs))
    return results.out.to(inputs.q.dtype), results.row_max + results.log_sum


def empty_results(inputs: PointInputs) -> Results:
    """Those of queries that see no key."""
    (B, H, N, _), E, slopes = inputs.q.shape, inputs.v.shape[3], inputs.slopes
    row_max = slopes.new_full((B, H, N), -torch.inf)
    visited = torch.zeros(B, H, core.num_tiles(N), dtype=torch.int32)
    return Results(slopes.new_zeros(B, H, N, E), row_max, torch.zeros_like(row_max), visited)


def run(inputs: PointInputs) -> Results:
    results = empty_results(inputs)
    for rows, num_points in parts(inputs):
        call, points, alive = _call(_part(inputs, rows, num_points))
        views = _of_part(results, rows, num_points)
        found = Results._make(x.contiguous() for x in views)  # most often the results themselves
        core.forward(call, points, _addresses(found, alive))
        _write(views, found)
        del alive
    return results


@without_lost_threads()
def _run_backward(dout: Tensor, dlse: Tensor, *arguments: Any) -> Gradients:
    saved, inputs = Results._make(arguments[:4]), PointInputs._make(arguments[4:])
    wide, narrow = inputs.slopes.dtype, inputs.q.dtype
    dq, dk, dv, dslopes = (torch.zeros(x.shape, dtype=wide) for x in inputs[:4])
    for rows, num_points in parts(inputs):
        call, points, alive = _call(_part(inputs, rows, num_points))
        here = rows, slice(None), slice(num_points)
        views = dq[here], dk[here], dv[here], dslopes[rows]
        found = tuple(x.contiguous() for x in views)
        names = "dq", "dk", "dv", "dleft"
        backward = core.Backward(
            dout=address(dout[here], alive),
            dlse=address(dlse[here], alive),
            saved=_addresses(_of_part(saved, rows, num_points), alive),
            **{name: x.data_ptr() for name, x in zip(names, found, strict=True)},
        )
        core.backward(call, points, backward)
        _write(views, found)
        del alive
    return Gradients(dq.to(narrow), dk.to(narrow), dv.to(narrow), dslopes)


def _write(views: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    for view, x in zip(views, found, strict=True):
        if x is not view:
            view.copy_(x)


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


def _addresses(results: Results, alive: list[Tensor]) -> "core.Forward":
    addresses: dict[str, Any] = {n: address(x, alive) for n, x in results._asdict().items()}
    return core.Forward(**addresses, visited_tiles=results.visited.shape[2])


forward = torch.library.custom_op(
    "linbias::points_cpu_forward",
    lambda *arguments: run(PointInputs._make(arguments)),
    mutates_args=(),
    schema=f"({parameters(PointInputs)}) -> {returns(Results)}",
)
backward = torch.library.custom_op(
    "linbias::points_cpu_backward",
    _run_backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor dlse, {parameters(Results)}, {parameters(PointInputs)})"
    f" -> {returns(Gradients)}",
)


def _empty_gradients(*arguments: Any) -> Gradients:
    inputs = PointInputs._make(arguments[-len(PointInputs._fields) :])
    return Gradients._make(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:4]
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:NUM_ARRAYS], *output)
    ctx.numbers = inputs[NUM_ARRAYS:]
    # row_max counts as a constant, so that the gradient of log_sum is that of lse.
    ctx.mark_non_differentiable(output[1], output[3])


def _differentiate(
    ctx: Any, dout: Tensor, _drow_max: Tensor, dlog_sum: Tensor, _dvisited: Tensor
) -> tuple[Tensor | None, ...]:
    arrays, saved = ctx.saved_tensors[:NUM_ARRAYS], ctx.saved_tensors[NUM_ARRAYS:]
    gradients = backward(dout, dlog_sum, *saved, *arrays, *ctx.numbers)
    return *gradients, *[None] * (len(PointInputs._fields) - len(gradients))


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "attention_points: cpu gives first derivatives only; implementation='dense' gives all"
    )


forward.register_fake(lambda *arguments: empty_results(PointInputs._make(arguments)))
backward.register_fake(_empty_gradients)
forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(_refuse)
