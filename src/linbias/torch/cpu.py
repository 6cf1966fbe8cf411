"""The compiled CPU core as PyTorch operators. What it computes, and how: csrc/attention-inl.h."""

import torch
from torch import Tensor

import linbias.cpu as core
from linbias.cpu import why_not as why_not
from linbias.torch import operator
from linbias.torch.operator import Gradients, Inputs, Results

NAME = core.NAME


def _fill(inputs: Inputs, results: Results) -> None:
    arguments, alive = _arguments(inputs)
    core.forward(arguments, results.visited.shape[2], _addresses(results))
    del alive


def _fill_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
) -> None:
    arguments, alive = _arguments(inputs)
    dout, dlse = dout.contiguous(), dlse.contiguous()
    wide = [x if x.dtype == inputs.left.dtype else x.to(inputs.left.dtype) for x in gradients]
    given = dout.data_ptr(), dlse.data_ptr()
    core.backward(arguments, *given, saved.visited.shape[2], _addresses(saved), _addresses(wide))
    for gradient, computed in zip(gradients, wide, strict=True):
        if gradient is not computed:
            gradient.copy_(computed)
    del alive


operators = operator.define(NAME, _fill, _fill_gradients, lambda _: core.TILE_ROWS)
attention = operators.attention


def _arguments(inputs: Inputs) -> tuple[core.Arguments, list[Tensor]]:
    """The call in addresses, and the tensors that have to live as long."""
    q, k, v = (x if _is_plain(x) else x.contiguous() for x in (inputs.q, inputs.k, inputs.v))
    B, H = q.shape[:2]
    left, right = (
        None if s is None else s.expand(B, H).contiguous() for s in (inputs.left, inputs.right)
    )
    key_range = (
        None if inputs.key_range is None else inputs.key_range[:, 0].to(torch.int64).contiguous()
    )
    key_bound = (
        None if inputs.key_bound is None else inputs.key_bound.to(inputs.left.dtype).contiguous()
    )
    (G, S, D), E, T = k.shape[1:], v.shape[3], q.shape[2]
    arguments = core.Arguments(
        dtype=str(q.dtype).removeprefix("torch."),
        sizes=(B, H, G, T, S, D, E),
        q=core.Operand(q.data_ptr(), *q.stride()[:3]),
        k=core.Operand(k.data_ptr(), *k.stride()[:3]),
        v=core.Operand(v.data_ptr(), *v.stride()[:3]),
        left=0 if left is None else left.data_ptr(),
        right=0 if right is None else right.data_ptr(),
        key_range=0 if key_range is None else key_range.data_ptr(),
        key_bound=0 if key_bound is None else key_bound.data_ptr(),
        scale=inputs.scale,
        dropout=inputs.dropout,
        tolerance=inputs.tolerance,
        seed=0 if inputs.seed is None else int(inputs.seed),
        num_threads=core.num_threads((B, H, G, T, S, D, E), torch.get_num_threads()),
        precise=inputs.precise,
    )
    return arguments, [x for x in (q, k, v, left, right, key_range, key_bound) if x is not None]


def _is_plain(x: Tensor) -> bool:
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def _addresses(tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)
