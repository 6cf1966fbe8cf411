"""Where the keys of all shares stand: numbers so few that every process has those of all."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linbias.torch.context_parallel.halo import LEFT, Group, named_failures, process_group


class Gather(torch.autograd.Function):
    """Positions [B, 1 or H, n] of shares of given lengths, end to end."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, lengths: Sequence[int], rank: int, group: Group) -> Tensor:
        ctx.lengths, ctx.rank, ctx.group = lengths, rank, group
        padded = torch.nn.functional.pad(own, (0, max(lengths) - own.shape[2])).contiguous()
        rows = [torch.empty_like(padded) for _ in lengths]
        with named_failures():
            dist.all_gather(rows, padded, group=process_group(group))
        return torch.cat([x[..., :n] for x, n in zip(rows, lengths, strict=True)], 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradient.double().clone(memory_format=torch.contiguous_format)
        with named_failures():
            dist.all_reduce(total, group=process_group(ctx.group))
        own = total.split(ctx.lengths, 2)[ctx.rank]
        return own.to(gradient.dtype), None, None, None


def keys_within(x: Tensor, share: slice, side: int, rows: slice, distance: Tensor) -> Tensor:
    """[B, H, rows], float64: how many keys beyond an edge of a share lie within a distance of its
    queries, [B, H, rows]; x [B, 1 or H, total].
    """
    B, H, _ = distance.shape
    own = x[..., share][..., rows]
    beyond = x[..., : share.start] if side == LEFT else x[..., share.stop :]
    # From 0 on, as integers may lie so far from it that floats are coarse.
    base = x[..., :1]
    own, beyond = ((y - base).double() for y in (own, beyond))
    beyond = beyond.expand(B, H, -1).contiguous()
    if side == LEFT:
        first = torch.searchsorted(beyond, (own - distance).contiguous(), right=True)
        return (beyond.shape[2] - first).double()
    return torch.searchsorted(beyond, (own + distance).contiguous()).double()
