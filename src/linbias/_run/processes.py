"""Which of several processes this is, where a run has several (torchrun)."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import distributed
from torch.distributed import ProcessGroup

T = TypeVar("T")


def is_main() -> bool:
    """Whether this process writes the files: the only one, or the first under torchrun."""
    return rank() == 0


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def num_processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Joins the processes that torchrun started, if it did, for the length of the block."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or distributed.is_initialized():
        yield
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def choose_device(function: str, name: str) -> torch.device:
    """Where a process computes, by a name of PyTorch; "auto" is its own GPU where there is one."""
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{function}: device must be 'auto', 'cpu', or a GPU that is here such as 'cuda', "
            f"got {name!r}"
        ) from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def sum_over_all(numbers: NDArray[Any], device: torch.device) -> NDArray[Any]:
    if num_processes() == 1:
        return numbers
    total = torch.from_numpy(numbers).to(device)
    distributed.all_reduce(total)
    return total.cpu().numpy()


def max_over_all(number: int, device: torch.device) -> int:
    if num_processes() == 1:
        return number
    largest = torch.tensor(number, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return int(largest)


@dataclass(frozen=True)
class Sharing:
    """Which processes share a sequence with this one."""

    group: ProcessGroup | None  # None for this one alone
    number: int  # of the group
    of: int  # how many groups there are

    @classmethod
    def by(cls, function: str, size: int) -> "Sharing":
        """Every `size` processes in a row share; all processes call this, for a `function`."""
        if num_processes() % size or size < 1:
            raise ValueError(
                f"{function}: context_parallel must divide the number of processes, "
                f"{num_processes()} (torchrun --nproc-per-node starts them), got {size}"
            )
        group = None if size == 1 else distributed.new_subgroups(size)[0]
        return cls(group, rank() // size, num_processes() // size)


ALONE = Sharing(None, 0, 1)


def wait_for_all() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def from_main(compute: Callable[[], T]) -> T:
    """What the first process computes, in every process; or the ValueError that it raises."""
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = compute()
        except ValueError as error:
            outcome[1] = error
    if distributed.is_initialized():
        distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
