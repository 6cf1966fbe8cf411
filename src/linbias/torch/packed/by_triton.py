"""Sequences in one call of the Triton kernels."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linbias.kernels.triton import sizes
from linbias.torch.impl import triton
from linbias.torch.operators.operator import Gradients, Results
from linbias.torch.packed import placing

if TYPE_CHECKING:
    from linbias.kernels.triton.launch import Call
    from linbias.torch.packed.offsets import Sequences


def forward(asked: "Sequences") -> Results:
    """The results of all sequences, heads before rows as the kernels give them: out
    [1, H, total_q, E], row_max and log_sum [1, H, total_q] in bits, visited [1, H, places, 2].
    """
    call = describe(asked)
    (_, H, total, _), E = call.q.shape, call.v.shape[3]
    rows = call.q.new_empty(2, 1, H, total, dtype=torch.float32)
    places = call.places(total, sizes.FEWEST_ROWS)
    results = Results(
        out=call.q.new_empty(1, H, total, E),
        row_max=rows[0],
        log_sum=rows[1],
        visited=torch.zeros(1, H, places, 2, dtype=torch.int32, device=call.q.device),
    )
    few = not asked.precise and asked.seed is None
    triton.run_forward(call, results, few)
    return results


def shown(results: Results) -> tuple[Tensor, Tensor]:
    """out [total_q, H, E] and lse [total_q, H], contiguous as the core's."""
    lse = (results.row_max + results.log_sum) * triton.operators.unit
    return results.out[0].transpose(0, 1).contiguous(), lse[0].T.contiguous()


def gradients(
    asked: "Sequences", saved: Results, dout: Tensor, dlse: Tensor, of_slopes: bool
) -> tuple[Tensor, ...]:
    """Those of q, k, v as the call has them, and of slopes [B, H], zeros unless asked for.

    Args:
        dout: [total_q, H, E].
        dlse: [total_q, H].
    """
    call = describe(asked)
    sides = call.q.new_zeros(2, call.num_sequences, call.q.shape[1], dtype=torch.float32)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:3])
    found = Gradients(
        dq=dq,
        dk=dk,
        dv=dv,
        dleft=sides[0] if of_slopes else None,
        dright=sides[1] if of_slopes and call.right is not None else None,
        dpositions=None,
        dquery_positions=None,
    )
    in_bits = (dlse.T * triton.operators.unit).contiguous()[None]
    triton.run_backward(call, _heads_first(dout), in_bits, saved, found)
    return *(x[0].transpose(0, 1) for x in (dq, dk, dv)), sides[0], sides[1]


def describe(asked: "Sequences") -> "Call":
    """The call as the kernels take it."""
    from linbias.kernels.triton import launch, sequences

    q, device = _heads_first(asked.q), asked.q.device

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    table, lengths = asked.block_table, asked.seq_lens
    if table is None:
        assert asked.key_offsets is not None
        k, v, ends = _heads_first(asked.k), _heads_first(asked.v), asked.key_offsets
    else:
        assert lengths is not None
        k, v = (x.transpose(1, 2) for x in (asked.k, asked.v))
        ends = placing.ends(lengths.cpu().long())
        table = table.to(device, torch.int32).contiguous()
    norms, ranges = asked.page_norms, there(asked.query_range)
    given = sequences.Sequences(
        query_offsets=asked.query_offsets.to(device, torch.int32),
        key_offsets=ends.to(device, torch.int32),
        longest=(int(asked.query_offsets.diff().max()), int(ends.diff().max())),
        num_keys=asked.num_keys,
        table=table,
        page_norms=None if norms is None else norms.contiguous(),
        page_keys=1 if table is None else asked.k.shape[1],
    )
    return launch.Call(
        q=triton.small_strides(q),
        k=triton.small_strides(k),
        v=triton.small_strides(v),
        left=asked.left,
        right=asked.right,
        key_range=there(asked.key_range),
        query_start=there(asked.query_start),
        query_range=None if ranges is None else ranges[None],
        key_bound=sequences.bounds_of_pages(given),
        seed=asked.seed,
        positions=None,
        query_positions=None,
        sequences=given,
        scale=asked.scale,
        dropout=asked.dropout,
        tolerance=asked.tolerance,
        sizes=triton.sizes_for(q, v),
    )


def _heads_first(x: Tensor) -> Tensor:
    """[total, heads, size] as one batch row."""
    return x.transpose(0, 1)[None]
