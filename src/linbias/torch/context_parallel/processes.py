"""The processes that hold shards of a sequence: who they are, and what they tell each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


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


def gather(x: Tensor, group: Group) -> Tensor:
    """The x of all processes, [ranks, ...]."""
    rows = [torch.empty_like(x) for _ in range(rank_and_size(group)[1])]
    with named_failures():
        dist.all_gather(rows, x, group=process_group(group))
    return torch.stack(rows)


def add_up(x: Tensor, group: Group) -> Tensor:
    """The sum over all processes, in x's dtype; of a copy, as x may be one number seen often."""
    total = x.double().clone(memory_format=torch.contiguous_format)
    with named_failures():
        dist.all_reduce(total, group=process_group(group))
    return total.to(x.dtype)


def gather_told(numbers: Tensor, k: Any, group: Group) -> Tensor:
    """`gather` what processes tell first, float64 [numbers], or that they refuse their arguments.

    Rows are of one size for most shapes, so that processes understand each other where arguments
    are wrong. Raises a RuntimeError on all others if one refuses.
    """
    size = 32
    if isinstance(k, Tensor) and k.dim() == 4:
        size += 2 * k.shape[0] + k.shape[1] * (k.shape[3] + 1)
    size = 1 << max(10, size.bit_length())
    told = torch.cat([numbers.new_tensor([len(numbers)]), numbers])
    rows = gather(torch.nn.functional.pad(told, (0, size - len(told))), group)
    refusing = (rows[:, 0] == 0).nonzero().flatten().tolist()
    if refusing and len(numbers):
        raise RuntimeError(
            "context_parallel: all processes must call alike, but rank"
            f" {', '.join(map(str, refusing))} refuses its arguments, and says why"
        )
    return rows[:, 1 : len(numbers) + 1]


@contextmanager
def heard_by_all(k: Any, group: Group) -> Iterator[None]:
    """Let the other processes, who wait for this one in `gather_told`, hear of an error."""
    rank_and_size(group)
    try:
        yield
    except Exception:
        device = k.device if isinstance(k, Tensor) else None
        gather_told(torch.empty(0, dtype=torch.float64, device=device), k, group)
        raise


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
