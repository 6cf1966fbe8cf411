"""The compiled CPU core as PyTorch operators. What it computes, and how: csrc/attention-inl.h."""

import torch
from torch import Tensor

from linbias.kernels import core
from linbias.kernels.core import why_not as why_not
from linbias.torch import operator
from linbias.torch.operator import Gradients, Inputs, Results

NAME, ABILITIES, WHY_MISSING = core.NAME, core.ABILITIES, core.WHY_MISSING
_DTYPES = (
    {} if core.WHY_MISSING else {getattr(torch, n): dtype for n, dtype in core.DTYPES.items()}
)


def _fill(inputs: Inputs, results: Results) -> None:
    call, alive = _call(inputs)
    core.forward(call, _forward(results))
    del alive


def _fill_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
) -> None:
    call, alive = _call(inputs)
    as_wide = inputs.left.dtype
    wide = gradients
    if inputs.q.dtype != as_wide:
        # out, and so its gradient, is narrow where forward did not expect to be differentiated.
        saved = saved._replace(out=saved.out.to(as_wide))
        wide = Gradients(*[torch.empty_like(x, dtype=as_wide) for x in gradients])
    dout, dlse = dout.to(as_wide).contiguous(), dlse.contiguous()
    core.backward(
        call,
        core.Backward(
            dout=dout.data_ptr(),
            dlse=dlse.data_ptr(),
            saved=_forward(saved),
            dq=wide.dq.data_ptr(),
            dk=wide.dk.data_ptr(),
            dv=wide.dv.data_ptr(),
            dleft=wide.dleft.data_ptr(),
            dright=wide.dright.data_ptr(),
        ),
    )
    if wide is not gradients:
        for gradient, computed in zip(gradients, wide, strict=True):
            gradient.copy_(computed)
    del alive


operators = operator.define(
    NAME, _fill, _fill_gradients, lambda _: core.TILE_ROWS, narrows=(torch.bfloat16,)
)
attention = operators.attention


def visited_keys(inputs: Inputs, visited: Tensor) -> tuple[Tensor, Tensor, int]:
    """The first and one past the last key that each tile visited, [B, H, tiles] each, and the rows of a tile.

    By the formulas that csrc/include/linbias/attention.h gives for `visited`.
    """
    (B, H, T, _), (G, S) = inputs.q.shape, inputs.k.shape[1:3]
    rows, keys = core.TILE_ROWS, core.BLOCK_KEYS
    ranges = torch.tensor([0, S]) if inputs.key_range is None else inputs.key_range
    ranges = ranges.long().expand(B, G, 2).repeat_interleave(H // max(1, G), dim=1)
    first, end = ranges[..., :1], ranges[..., 1:]
    num_blocks = -(-(end - first) // keys)
    start = torch.tensor(S - T) if inputs.query_start is None else inputs.query_start.long()
    row = torch.arange(0, T, rows)
    low = start.expand(B)[:, None, None] + row - first
    high = low + (T - row).clamp(max=rows)
    counts = visited[:, :, : len(row)].long()
    near_first = (low // keys).clamp(min=0).minimum(num_blocks) - counts[..., 0]
    near_end = (-(-high // keys)).clamp(min=0).minimum(num_blocks) + counts[..., 1]
    return first + near_first * keys, torch.minimum(first + near_end * keys, end), rows


def _call(inputs: Inputs) -> tuple["core.Call", list[Tensor | None]]:
    """The call in addresses, and the tensors that have to live as long."""
    q, k, v, left, right, key_range, query_start, key_bound = inputs[:8]
    q, k, v = _readable(q), _readable(k), _readable(v)
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    left = left.expand(B, H).contiguous()
    if right is not None:
        right = right.expand(B, H).contiguous()
    if key_range is not None:
        key_range = key_range.to(torch.int64).contiguous()
    if query_start is not None:
        query_start = query_start.to(torch.int64).contiguous()
    if key_bound is not None:
        key_bound = key_bound.to(left.dtype).contiguous()
    call = core.Call(
        dtype=_DTYPES[q.dtype],
        B=B,
        H=H,
        G=G,
        T=T,
        S=S,
        D=D,
        E=E,
        q=core.Array(q.data_ptr(), *q.stride()[:3]),
        k=core.Array(k.data_ptr(), *k.stride()[:3]),
        v=core.Array(v.data_ptr(), *v.stride()[:3]),
        left=left.data_ptr(),
        right=_address(right),
        key_range=_address(key_range),
        query_start=_address(query_start),
        key_bound=_address(key_bound),
        scale=inputs.scale,
        dropout=inputs.dropout,
        tolerance=inputs.tolerance,
        seed=0 if inputs.seed is None else int(inputs.seed),
        num_threads=core.num_threads((B, H, G, T, S, D, E), torch.get_num_threads()),
        precise=inputs.precise,
    )
    return call, [q, k, v, left, right, key_range, query_start, key_bound]


def _forward(results: Results) -> "core.Forward":
    return core.Forward(
        out=results.out.data_ptr(),
        row_max=results.row_max.data_ptr(),
        log_sum=results.log_sum.data_ptr(),
        visited=results.visited.data_ptr(),
        visited_tiles=results.visited.shape[2],
        narrow=results.out.dtype == torch.bfloat16,
    )


def _readable(x: Tensor) -> Tensor:
    """The array itself where its last stride is 1, whatever the others are."""
    return x if x.stride(3) == 1 or x.shape[3] <= 1 else x.contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
