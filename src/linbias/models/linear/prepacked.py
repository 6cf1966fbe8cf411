"""Weights of linear layers in the order in which oneDNN multiplies, kept beside the layers' own.

oneDNN brings a weight into that order in every call, which for one token takes as long as the product. Kept so, it is read at the
rate of memory. The layer's own weight stays where it was, for whoever saves, trains or inspects the model; if it is mapped
from a file, as that of a safetensors folder is, its pages go back to the system, which reads them again when somebody asks.
The copy lies in large pages, where the system has them: finding its way through thousands of small ones costs a token several percent.
"""

import ctypes
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from linbias.models.linear.snapshot import Snapshot

_ROWS = 64  # of an input to order for: any number above one gives the same order, which is also the faster one for one row
# Of Linux 5.4 and 6.1; the module mmap names neither.
_MADV_PAGEOUT, _MADV_COLLAPSE = 21, 25
_LARGE_PAGE = 2**21  # bytes; of x86, and of most other processors with pages of 4 KiB


class Prepacked:
    """One weight. Copies and pickles of it hold nothing: a copy of a model reads its own weights."""

    weight: Tensor | None = None

    def __init__(self, own: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(own.detach(), _ROWS)
        give_back_pages(own)
        self._own = Snapshot(own)

    def of(self, own: Tensor | None) -> Tensor | None:
        """The weight in oneDNN's order, or None from when on the layer's own has changed."""
        if self.weight is not None and not self._own.shows(own):
            self.weight = None
        return self.weight

    def __getstate__(self) -> None:
        return None


def give_back_pages(x: Tensor) -> None:
    """Let the system drop the pages of an array that is mapped from a file; memory of the process stays as it is."""
    if not sys.platform.startswith("linux") or not _is_mapped_from_a_file(x.data_ptr()):
        return
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        _advise(start, size, _MADV_PAGEOUT)


def use_large_pages(weights: Sequence[Prepacked]) -> None:
    """Have the system move weights, with what else lies in the first and last large page of each, into large pages.

    Linux does so where it is set to "always" or, as most are, to "madvise"; before 6.1 in its own time. Only once all are made:
    the memory that is added for the next one would else begin another mapping, and no large page lies in two.

    Source:
        madvise(2), MADV_HUGEPAGE and MADV_COLLAPSE.
    """
    if not sys.platform.startswith("linux"):
        return
    for prepacked in weights:
        address: int = torch.ops.mkldnn.data_ptr(prepacked.weight)
        size: int = torch.ops.mkldnn._nbytes(prepacked.weight)
        start = address // _LARGE_PAGE * _LARGE_PAGE
        end = -(-(address + size) // _LARGE_PAGE) * _LARGE_PAGE
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            _advise(start, end - start, advice)


def _advise(start: int, size: int, advice: int) -> None:
    """Advice that the system may refuse, as older ones do, which costs nothing but what it would have gained."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _is_mapped_from_a_file(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in area.split("-"))
        if start <= address < end:
            return inode != "0"
    return False
