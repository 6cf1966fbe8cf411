"""The compiled CPU core as PyTorch operators (how it works: csrc/kernel/attention-inl.h)."""

import torch
from torch import Tensor

from linbias.kernels import core
from linbias.kernels.core import why_not as why_not
from linbias.torch.addresses import DTYPES, address, array, threads
from linbias.torch.operators import operator
from linbias.torch.operators.operator import Gradients, Inputs, Results

NAME, ABILITIES, WHY_MISSING = core.NAME, core.ABILITIES, core.WHY_MISSING


def _fill(inputs: Inputs, results: Results) -> None:
    call, alive = describe_call(inputs)
    core.forward(call, _forward(results))
    del alive


def _fill_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None, saved: Results, gradients: Gradients
) -> None:
    call, alive = describe_call(inputs)
    as_wide = inputs.left.dtype
    wide = gradients
    if inputs.q.dtype != as_wide:
        # out, and so its gradient, is narrow where forward did not expect to be differentiated.
        saved, dout = saved._replace(out=saved.out.to(as_wide)), dout.to(as_wide)
        dq, dk, dv = (torch.empty_like(x, dtype=as_wide) for x in gradients[:3])
        wide = gradients._replace(dq=dq, dk=dk, dv=dv)
    core.backward(
        call,
        core.Backward(
            dout=address(dout, alive),
            dlse=address(dlse, alive),
            saved=_forward(saved),
            dq=wide.dq.data_ptr(),
            dk=wide.dk.data_ptr(),
            dv=wide.dv.data_ptr(),
            dleft=address(wide.dleft, alive),
            dright=address(wide.dright, alive),
            dpositions=address(wide.dpositions, alive),
            dquery_positions=address(wide.dquery_positions, alive),
        ),
    )
    if wide is not gradients:
        for gradient, computed in zip(gradients[:3], wide[:3], strict=True):
            gradient.copy_(computed)
    del alive


operators = operator.Operators(
    NAME,
    _fill,
    _fill_gradients,
    lambda _: core.TILE_ROWS,
    counts_precise=True,
    narrows=(torch.bfloat16,),
)
attention = operators.attention


def visited_keys(inputs: Inputs, visited: Tensor) -> tuple[Tensor, Tensor, int]:
    """The first and one past the last key that each tile visited, [B, H, tiles] each, and the rows
    of a tile.

    By the formulas that csrc/include/linbias/attention.h gives for `visited`.
    """
    assert inputs.own_key is None, "who asks has keys in order"
    (B, H, T, _), (G, S) = inputs.q.shape, inputs.k.shape[1:3]
    rows, keys = core.TILE_ROWS, core.BLOCK_KEYS
    ranges = torch.tensor([0, S]) if inputs.key_range is None else inputs.key_range
    ranges = ranges.expand(B, G, 2).repeat_interleave(H // max(1, G), dim=1)
    first, end = ranges[..., :1], ranges[..., 1:]
    num_blocks = -(-(end - first) // keys)
    start = torch.tensor(S - T) if inputs.query_start is None else inputs.query_start
    row = torch.arange(0, T, rows)
    low = start.expand(B)[:, None, None] + row - first
    high = low + (T - row).clamp(max=rows)
    counts = visited[:, :, : len(row)].long()
    near_first = (low // keys).clamp(min=0).minimum(num_blocks) - counts[..., 0]
    near_end = (-(-high // keys)).clamp(min=0).minimum(num_blocks) + counts[..., 1]
    return first + near_first * keys, torch.minimum(first + near_end * keys, end), rows


def describe_call(inputs: Inputs) -> tuple["core.Call", list[Tensor]]:
    """The call in addresses, and the copies of its arrays that have to live as long."""
    q, k, v, left, right, key_range, query_start, key_bound, seed = inputs[:9]
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    copies: list[Tensor] = []
    if right is not None:
        right = _of_batch(right, B)
    if key_bound is not None:
        key_bound = key_bound.to(left.dtype)
    # The core reads 64 bits of each, whatever a caller of the operator itself gives.
    key_range, query_start, query_range, own_key = (
        x if x is None else x.long()
        for x in (key_range, query_start, inputs.query_range, inputs.own_key)
    )
    if own_key is not None:
        own_key = own_key.expand(B, H, T)
    drawn = [0, 0, 0]
    if seed is not None:
        drawn = [x % 2**32 for x in seed.tolist()] if seed.dim() else [int(seed), 0, 0]
    call = core.Call(
        dtype=DTYPES[q.dtype],
        B=B,
        H=H,
        G=G,
        T=T,
        S=S,
        D=D,
        E=E,
        q=array(q, copies),
        k=array(k, copies),
        v=array(v, copies),
        left=address(_of_batch(left, B), copies),
        right=address(right, copies),
        key_range=address(key_range, copies),
        query_start=address(query_start, copies),
        query_range=address(query_range, copies),
        own_key=address(own_key, copies),
        key_bound=address(key_bound, copies),
        positions=_places(inputs.positions, copies),
        query_positions=_places(inputs.query_positions, copies),
        scale=inputs.scale,
        dropout=inputs.dropout,
        tolerance=inputs.tolerance,
        seed=drawn[0],
        first_query=drawn[1],
        first_key=drawn[2],
        **threads((B, H, G, T, S, D, E)),
        precise=inputs.precise,
    )
    return call, copies


def _forward(results: Results) -> "core.Forward":
    return core.Forward(
        out=results.out.data_ptr(),
        row_max=results.row_max.data_ptr(),
        log_sum=results.log_sum.data_ptr(),
        visited=results.visited.data_ptr(),
        visited_tiles=results.visited.shape[2],
        narrow=results.out.dtype == torch.bfloat16,
    )


def _places(x: Tensor | None, copies: list[Tensor]) -> "core.Array":
    """[B, 1 or H, n] -> of every head, in float64."""
    if x is None:
        return core.Array(0, 0, 0, 0)
    x = x.detach().to(torch.float64).contiguous()
    copies.append(x)
    return core.Array(x.data_ptr(), x.stride(0), x.stride(1) if x.shape[1] > 1 else 0, 0)


def _of_batch(slopes: Tensor, B: int) -> Tensor:
    """Slopes [H] or [B, H] of every head of a batch."""
    return slopes if slopes.dim() == 2 or B == 1 else slopes.expand(B, -1)
