"""What runs calls while this process has a shard of a sequence: `context_parallel.use`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class SharedSequence(Protocol):
    """A sequence of which this process has a shard."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Any,
        *,
        implementation: str,
        return_lse: bool,
        **options: Any,
    ) -> Any:
        """`linbias.torch.attention` of the own queries, with the same arguments."""

    def expect(self, position_ids: Tensor | None) -> None:
        """Take the numbers of the shard's tokens."""


# Recomputing checkpoints, autograd's threads call attention too: they lack context variables, but
# what PyTorch keeps for a thread goes along. The compiler cannot look there; it sees this list.
_IN_USE: list[SharedSequence] = []
_OF_THREAD = "linbias.shard"


def shard_here() -> SharedSequence | None:
    """The shared sequence of this thread's calls, of the innermost block; None for whole ones."""
    if not _IN_USE or not torch._C._is_key_in_tls(_OF_THREAD):
        return None
    return torch._C._get_obj_in_tls(_OF_THREAD)


@contextmanager
def put_in_place(shared: SharedSequence) -> Iterator[None]:
    """Let this thread's calls over whole sequences be those of a shared one."""
    before = shard_here()
    _IN_USE.append(shared)
    torch._C._stash_obj_in_tls(_OF_THREAD, shared)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_OF_THREAD, before)
        _IN_USE.remove(shared)


def refuse_shard(function: str) -> None:
    """Raise within `context_parallel.use`, where a process has a shard of the sequence only."""
    if shard_here() is not None:
        raise ValueError(
            f"{function}: a sequence in shards on several processes (context_parallel.use) is read"
            " by linbias.torch.attention alone"
        )
