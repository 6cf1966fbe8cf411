"""Tensors and threads as the compiled core takes them: by address (linbias.kernels.core)."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linbias import _machine
from linbias.kernels import core

DTYPES = {} if core.WHY_MISSING else {getattr(torch, n): dtype for n, dtype in core.DTYPES.items()}


def _team() -> int:
    """The address of the function by which PyTorch shares out work, or 0 where it is not OpenMP's.

    PyTorch's threads spin for a while after each operation: the core's own would wait for them.
    """
    if not torch.backends.openmp.is_available():
        return 0
    try:
        function = ctypes.CDLL(None).GOMP_parallel  # in the libraries that PyTorch shares with all
    except (AttributeError, OSError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


TEAM, _NUM_CORES = _team(), _machine.num_cores()


def threads(sizes: tuple[int, int, int, int, int, int, int]) -> dict[str, Any]:
    """The fields `num_threads` and `team` of a `Call` of these sizes (B H G T S D E)."""
    available = torch.get_num_threads()
    # A team comes as a whole, and threads that are more than the cores only take turns.
    team = TEAM if available <= _NUM_CORES else 0
    count = core.num_threads(sizes, min(available, _NUM_CORES), awake=team != 0)
    return {"num_threads": count, "team": team}


_PROCESS = os.getpid()


@contextlib.contextmanager
def without_lost_threads() -> Iterator[None]:
    """In a forked process PyTorch works alone, for its threads from before are not there."""
    if os.getpid() == _PROCESS:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def array(x: Tensor, copies: list[Tensor]) -> "core.Array":
    """Any strides but the last, which must be 1; a copy is added to those that have to live on."""
    batch, head, row, last = x.stride()
    if last != 1 and x.shape[3] > 1:
        x = x.contiguous()
        copies.append(x)
        batch, head, row, _ = x.stride()
    return core.Array(x.data_ptr(), batch, head, row)


def address(x: Tensor | None, copies: list[Tensor]) -> int:
    """Of a contiguous tensor, which is added to the copies; 0 for None."""
    if x is None:
        return 0
    x = x.contiguous()
    copies.append(x)
    return x.data_ptr()
