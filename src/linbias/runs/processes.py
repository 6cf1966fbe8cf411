"""Which of several processes this is, where a run has several (torchrun)."""

from torch import distributed


def is_main() -> bool:
    """Whether this process writes the files: the only one, or the first under torchrun."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def wait_for_all() -> None:
    """Returns when every process has called it."""
    if distributed.is_initialized():
        distributed.barrier()
