"""The compiled CPU core as PyTorch operators. What it computes, and how: csrc/attention-inl.h."""

import torch
from torch import Tensor

import linbias.cpu as core
from linbias.cpu import why_not as why_not
from linbias.torch import operator
from linbias.torch.operator import Arguments, Gradients, Results

NAME = core.NAME


def _fill(call: Arguments, results: Results) -> None:
    arguments, alive = _arguments(call)
    core.forward(arguments, results.visited.shape[2], _addresses(results))
    del alive


def _fill_gradients(
    call: Arguments, dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
) -> None:
    arguments, alive = _arguments(call)
    dout, dlse = dout.contiguous(), dlse.contiguous()
    wide = [x if x.dtype == call.left.dtype else x.to(call.left.dtype) for x in gradients]
    given = dout.data_ptr(), dlse.data_ptr()
    core.backward(arguments, *given, saved.visited.shape[2], _addresses(saved), _addresses(wide))
    for gradient, computed in zip(gradients, wide, strict=True):
        if gradient is not computed:
            gradient.copy_(computed)
    del alive


attention, forward = operator.define(NAME, _fill, _fill_gradients, lambda _: core.TILE_ROWS)


def _arguments(call: Arguments) -> tuple[core.Arguments, list[Tensor]]:
    """The call in addresses, and the tensors that have to live as long."""
    q, k, v = (x if _is_plain(x) else x.contiguous() for x in (call.q, call.k, call.v))
    B, H = q.shape[:2]
    left, right = (
        None if s is None else s.expand(B, H).contiguous() for s in (call.left, call.right)
    )
    key_range = None if call.key_range is None else call.key_range.to(torch.int64).contiguous()
    key_bound = None if call.key_bound is None else call.key_bound.to(call.left.dtype).contiguous()
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
        scale=call.scale,
        dropout=call.dropout,
        tolerance=call.tolerance,
        seed=0 if call.seed is None else int(call.seed),
        num_threads=core.num_threads((B, H, G, T, S, D, E), torch.get_num_threads()),
        precise=call.precise,
    )
    return arguments, [x for x in (q, k, v, left, right, key_range, key_bound) if x is not None]


def _is_plain(x: Tensor) -> bool:
    return x.shape[-1] <= 1 or x.stride(-1) == 1


def _addresses(tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


def work_kept(visited: Tensor, T: int, S: int, group_size: int) -> Tensor:
    """Return the share of the causal query-key pairs that lie in visited blocks, float64 [B, H]."""
    return operator.work_kept(visited, T, S, core.TILE_ROWS, core.BLOCK_KEYS)
