"""The halo of a shard: which process fetches which keys, their exchange, and their gradients'."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linbias.torch.context_parallel.processes import Group, add_up, named_failures, process_group

LEFT, RIGHT = 0, 1


@dataclass(frozen=True)
class Halo:
    """What all processes fetch, known to each."""

    rank: int  # of this process
    lengths: list[int]  # [ranks], of the shards
    counts: list[list[list[int]]]  # [ranks][2][G]: keys beyond a shard's left and right edge

    @property
    def starts(self) -> list[int]:
        """[ranks + 1]: where shards start in the sequence."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def here(self) -> slice:
        """What this process has in the end, in the sequence: [halo, own shard, halo]."""
        left, right = (max(counts, default=0) for counts in self.counts[self.rank])
        return slice(self.starts[self.rank] - left, self.starts[self.rank + 1] + right)

    def fetched(self, reader: int, owner: int) -> list[tuple[int, int, int]]:
        """What `reader` gets from `owner`: heads, with the first and one past the last key."""
        starts, parts = self.starts, []
        begin, end = starts[reader], starts[reader + 1]
        for side, counts in enumerate(self.counts[reader]):
            for head, count in enumerate(counts):
                first, stop = (begin - count, begin) if side == LEFT else (end, end + count)
                first, stop = max(first, starts[owner]), min(stop, starts[owner + 1])
                if first < stop:
                    parts.append((head, first, stop))
        return parts


class Fetch(torch.autograd.Function):
    """k and v [B, G, n, size] with their halos, [B, G, halo + n + halo, size].

    A head that fetches fewer keys than others has zeros there. Slopes and the positions of all
    keys pass through: their gradients are added up over the processes, after the exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, halo: Halo, group: Group, k: Tensor, v: Tensor, *alike: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.halo, ctx.group = halo, group
        here, start = halo.here, halo.starts[halo.rank]
        ctx.own = slice(start - here.start, start - here.start + k.shape[2])
        whole = tuple(
            x.new_zeros(*x.shape[:2], here.stop - here.start, x.shape[3]) for x in (k, v)
        )
        for x, own in zip(whole, (k, v), strict=True):
            x[:, :, ctx.own] = own
        _exchange(halo, group, whole, back=False)
        return *whole, *(x if x is None else x.view_as(x) for x in alike)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        whole = tuple(x.clone(memory_format=torch.contiguous_format) for x in gradients[:2])
        _exchange(ctx.halo, ctx.group, whole, back=True)
        of_all = (
            add_up(x, ctx.group) if needed else None
            for x, needed in zip(gradients[2:], ctx.needs_input_grad[4:], strict=True)
        )
        return None, None, *(x[:, :, ctx.own] for x in whole), *of_all


def _exchange(halo: Halo, group: Group, whole: tuple[Tensor, ...], back: bool) -> None:
    """Fill the halos of arrays [B, G, halo + n + halo, size] from the shards of the others; or,
    back, add the halos to those shards, in a fixed order.
    """
    ranks, first_key = range(len(halo.lengths)), halo.here.start

    def views(parts: list[tuple[int, int, int]]) -> list[Tensor]:
        return [
            x[:, head, first - first_key : stop - first_key]
            for head, first, stop in parts
            for x in whole
        ]

    fetched = [views(halo.fetched(halo.rank, rank)) for rank in ranks]
    lent = [views(halo.fetched(rank, halo.rank)) for rank in ranks]
    sources, targets = (fetched, lent) if back else (lent, fetched)
    empty = whole[0].new_empty(0)
    sent = torch.cat([empty, *(x.reshape(-1) for views in sources for x in views)])
    to_each, from_each = (
        [empty.element_size() * sum(x.numel() for x in views) for views in of_ranks]
        for of_ranks in (sources, targets)
    )
    received = sent.new_empty(sum(from_each) // empty.element_size())
    with named_failures():
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            from_each,
            to_each,
            group=process_group(group),
        )
    flat = [x for views in targets for x in views]
    for target, new in zip(flat, received.split([x.numel() for x in flat]), strict=True):
        new = new.view(target.shape)
        target.copy_(target + new if back else new)
