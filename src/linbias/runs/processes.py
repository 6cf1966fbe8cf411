"""Which of several processes this is, where a run has several (torchrun)."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def is_main() -> bool:
    """Whether this process writes the files: the only one, or the first under torchrun."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def wait_for_all() -> None:
    """Returns when every process has called it."""
    if distributed.is_initialized():
        distributed.barrier()


def from_main(compute: Callable[[], T]) -> T:
    """What the first process computes, in every process; or the ValueError that it raises.

    Every process calls this; only the first one calls `compute`, whose result is pickled.
    """
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
