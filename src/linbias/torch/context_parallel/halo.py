"""Who fetches which keys of a sequence in shares, and the exchange of exactly those keys, and of their gradients back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None
LEFT, RIGHT = 0, 1


@dataclass(frozen=True)
class Part:
    """Some keys of one head: `count` of them, from `at` on in the owner's share and from `into` on in the reader's halo."""

    side: int
    head: int
    at: int
    count: int
    into: int


@dataclass(frozen=True)
class Plan:
    """Who fetches what, alike on all processes.

    Attributes:
        rank: Of this process.
        lengths: [ranks], of the shares.
        counts: [ranks][2][G], keys that each fetches from beyond its left and its right edge.
        seed: Of dropout, rank 0's.
    """

    rank: int
    lengths: list[int]
    counts: list[list[list[int]]]
    seed: int

    def widths(self) -> tuple[int, int]:
        """The longest halo of the own heads on each side."""
        left, right = (max(counts, default=0) for counts in self.counts[self.rank])
        return left, right

    def parts(self, reader: int, owner: int) -> list[Part]:
        """What `reader` fetches from `owner`."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        begin, end = starts[reader], starts[reader + 1]
        found = []
        for side, counts in enumerate(self.counts[reader]):
            for g, count in enumerate(counts):
                wanted = (begin - count, begin) if side == LEFT else (end, end + count)
                first = max(wanted[0], starts[owner])
                stop = min(wanted[1], starts[owner + 1])
                if first < stop:
                    outer = wanted[0] if side == LEFT else end
                    found.append(Part(side, g, first - starts[owner], stop - first, first - outer))
        return found


class Fetch(torch.autograd.Function):
    """Keys and values beyond the edges: k and v to halos [B, G, width, D] and [B, G, width, E] of both sides.

    A left halo ends at its last row, a right one begins at its first; what a head does not fetch is zeros. Slopes pass
    through: their gradients are added up over the processes, in one step with the exchange, so that all processes do
    both in one order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        plan: Plan,
        group: Group,
    ) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.group, ctx.shapes = plan, group, (k.shape, v.shape)
        halos = _halos(plan, k, v)
        _exchange(plan, group, (k, v), halos, back=False)
        slopes = (s if s is None else s.view_as(s) for s in (left, right))
        return *halos[0], *halos[1], *slopes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        dk, dv = (gradients[0].new_zeros(shape) for shape in ctx.shapes)
        _exchange(ctx.plan, ctx.group, (dk, dv), (gradients[:2], gradients[2:4]), back=True)
        slopes = list(gradients[4:])
        for side, needed in enumerate(ctx.needs_input_grad[2:4]):
            if needed:
                # A copy: the gradient may be one number that is seen many times.
                total = slopes[side].double().clone(memory_format=torch.contiguous_format)
                with named_failures():
                    dist.all_reduce(total, group=process_group(ctx.group))
                slopes[side] = total.to(slopes[side].dtype)
        return dk, dv, *slopes, None, None


def _halos(plan: Plan, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Zeros, of each side, for keys and for values."""
    return tuple(
        (
            k.new_zeros(*k.shape[:2], width, k.shape[3]),
            v.new_zeros(*v.shape[:2], width, v.shape[3]),
        )
        for width in plan.widths()
    )


def _exchange(
    plan: Plan,
    group: Group,
    own: tuple[Tensor, Tensor],
    halos: Sequence[tuple[Tensor, Tensor]],
    back: bool,
) -> None:
    """Fill the halos from the owners' shares; or, back, add what the halos hold to the owners' shares, in a fixed order."""
    left_width = plan.widths()[LEFT]
    others = [rank for rank in range(len(plan.lengths)) if rank != plan.rank]

    def in_halo(part: Part) -> list[Tensor]:
        # The left halo ends at the edge: a head that fetches fewer begins later.
        shift = left_width - plan.counts[plan.rank][LEFT][part.head] if part.side == LEFT else 0
        rows = slice(part.into + shift, part.into + shift + part.count)
        return [x[:, part.head, rows] for x in halos[part.side]]

    def in_share(part: Part) -> list[Tensor]:
        return [x[:, part.head, part.at : part.at + part.count] for x in own]

    fetched = {rank: plan.parts(plan.rank, rank) for rank in others}
    lent = {rank: plan.parts(rank, plan.rank) for rank in others}
    views = {
        "halo": {rank: [x for part in fetched[rank] for x in in_halo(part)] for rank in others},
        "share": {rank: [x for part in lent[rank] for x in in_share(part)] for rank in others},
    }
    sources, targets = ("halo", "share") if back else ("share", "halo")
    ranks = range(len(plan.lengths))
    outgoing = [x.reshape(-1) for rank in others for x in views[sources][rank]]
    sent = torch.cat(outgoing) if outgoing else own[0].new_empty(0)
    sizes = {
        name: [sum(x.numel() for x in views[name].get(rank, [])) for rank in ranks]
        for name in views
    }
    received = own[0].new_empty(sum(sizes[targets]))
    width = received.element_size()
    with named_failures():
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [n * width for n in sizes[targets]],
            [n * width for n in sizes[sources]],
            group=process_group(group),
        )
    at = 0
    for rank in others:
        for target in views[targets][rank]:
            new = received[at : at + target.numel()].view(target.shape)
            at += target.numel()
            if back:
                target += new
            else:
                target.copy_(new)


def process_group(group: Group) -> dist.ProcessGroup | None:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def rank_and_size(group: Group) -> tuple[int, int]:
    """Of this process in a group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "context_parallel: group must be one of processes that have met: call torch.distributed.init_process_group first, "
            "in processes that torchrun starts"
        )
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(
            f"context_parallel: group must be a mesh of one dimension, such as mesh['cp'], got one of {group.ndim}"
        )
    found = process_group(group)
    return dist.get_rank(found), dist.get_world_size(found)


@contextmanager
def named_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "context_parallel: the processes did not meet: one of them has died or raised an error, was given arrays of another size, "
            f"or did not come within the timeout of the group ({error})"
        ) from error
