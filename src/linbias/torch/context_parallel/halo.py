"""Who fetches which keys of a sequence in shares, their exchange, and that of their gradients."""

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
    """`count` keys of a head, from `at` on in the owner's share, `into` in the halo."""

    side: int
    head: int
    at: int
    count: int
    into: int


@dataclass(frozen=True)
class Plan:
    """Who fetches what, alike on all processes."""

    rank: int  # of this process
    lengths: list[int]  # of the shares
    counts: list[list[list[int]]]  # [ranks][2][G]: keys beyond its left and its right edge
    seed: int  # of dropout, rank 0's

    def widths(self) -> tuple[int, int]:
        """The longest halo of the own heads on each side."""
        left, right = (max(counts, default=0) for counts in self.counts[self.rank])
        return left, right

    def parts(self, reader: int, owner: int) -> list[Part]:
        """What `reader` fetches from `owner`."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        begin, end = starts[reader], starts[reader + 1]
        parts = []
        for side, counts in enumerate(self.counts[reader]):
            for g, count in enumerate(counts):
                wanted = (begin - count, begin) if side == LEFT else (end, end + count)
                first = max(wanted[0], starts[owner])
                stop = min(wanted[1], starts[owner + 1])
                if first < stop:
                    outer = wanted[0] if side == LEFT else end
                    parts.append(Part(side, g, first - starts[owner], stop - first, first - outer))
        return parts


class Fetch(torch.autograd.Function):
    """k and v to halos [B, G, width, D or E] of both sides, zeros where not fetched.

    Slopes pass through: their gradients are added up over the processes, after the exchange.
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
        halos = [
            tuple(x.new_zeros(*x.shape[:2], width, x.shape[3]) for x in (k, v))
            for width in plan.widths()
        ]
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


def _exchange(
    plan: Plan,
    group: Group,
    own: tuple[Tensor, Tensor],
    halos: Sequence[tuple[Tensor, ...]],
    back: bool,
) -> None:
    """Fill the halos from the shares; or, back, add them to these, in a fixed order."""
    left_width = plan.widths()[LEFT]
    ranks = range(len(plan.lengths))

    def in_halo(part: Part) -> list[Tensor]:
        # The left halo ends at the edge: a head that fetches fewer begins later.
        shift = left_width - plan.counts[plan.rank][LEFT][part.head] if part.side == LEFT else 0
        rows = slice(part.into + shift, part.into + shift + part.count)
        return [x[:, part.head, rows] for x in halos[part.side]]

    def in_share(part: Part) -> list[Tensor]:
        return [x[:, part.head, part.at : part.at + part.count] for x in own]

    # Nothing lies beyond the own edges in the own share.
    fetched = [plan.parts(plan.rank, rank) for rank in ranks]
    lent = [plan.parts(rank, plan.rank) for rank in ranks]
    halo = [[x for part in parts for x in in_halo(part)] for parts in fetched]
    share = [[x for part in parts for x in in_share(part)] for parts in lent]
    sources, targets = (halo, share) if back else (share, halo)
    outgoing = [x.reshape(-1) for views in sources for x in views]
    sent = torch.cat(outgoing) if outgoing else own[0].new_empty(0)
    width = sent.element_size()
    to_each, from_each = (
        [width * sum(x.numel() for x in y) for y in z] for z in (sources, targets)
    )
    received = own[0].new_empty(sum(from_each) // width)
    with named_failures():
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            from_each,
            to_each,
            group=process_group(group),
        )
    flat = [target for views in targets for target in views]
    for target, new in zip(flat, received.split([x.numel() for x in flat]), strict=True):
        if back:
            target += new.view(target.shape)
        else:
            target.copy_(new.view(target.shape))


def process_group(group: Group) -> dist.ProcessGroup | None:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def rank_and_size(group: Group) -> tuple[int, int]:
    """Of this process in a group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "context_parallel: group must be one of processes that have met: call"
            " torch.distributed.init_process_group first, in processes that torchrun starts"
        )
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(
            "context_parallel: group must be a mesh of one dimension, such as mesh['cp'],"
            f" got one of {group.ndim}"
        )
    processes = process_group(group)
    return dist.get_rank(processes), dist.get_world_size(processes)


@contextmanager
def named_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "context_parallel: the processes did not meet: one of them has died or raised an"
            " error, was given arrays of another size, or did not come within the timeout of the"
            f" group ({error})"
        ) from error
