"""Sequences of lengths of their own in one call, packed end to end, their keys perhaps in pages.

Each is a call by itself: tiles and blocks count from its own first query and key. A program finds
its sequence in the offsets: all rows of n sequences have at most rows // size + n tiles of a size;
tile t of sequence b, whose first row is r, comes at place r // size + b + t. Programs at places
between these find no rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.tile import head_of, load_rows, wide

LOOKED_AT: tl.constexpr = tl.constexpr(128)  # offsets at once


class Sequences(NamedTuple):
    """n sequences, where a `Call` has one batch row: integers on its device."""

    query_offsets: Tensor  # [n + 1], int32
    key_offsets: Tensor  # [n + 1], int32; of keys in pages, as if they were packed
    longest: tuple[int, int]  # queries and keys of a sequence, at most
    num_keys: int  # of all sequences
    table: Tensor | None  # [n, pages], int32, contiguous; None: keys are packed
    page_norms: Tensor | None  # [num_pages, G], float32, contiguous; see `attention_paged`
    page_keys: int


class Offsets(NamedTuple):
    """`Sequences` for a kernel. Without any it is a record without arrays: Triton 3.6 cannot ask
    whether a record that holds None is itself None.
    """

    num_sequences: int
    query_offsets: Tensor | None
    key_offsets: Tensor | None
    table: Any  # an `Array`, or None
    page_norms: Tensor | None
    page_keys: int


NO_SEQUENCES = Offsets(0, None, None, None, None, 0)


class Sequence(NamedTuple):
    """One of them; or a batch row, which begins at row and key 0."""

    b: Any  # whose slopes, range and start these are
    batch: Any  # the batch row of arrays that it lies in
    T: Any
    S: Any
    first_row: Any
    first_key: Any


@triton.jit
def read_sequence(call, b):
    """Sequence b of a call, or its batch row b."""
    if call.sequences.query_offsets is None:
        return Sequence(b, b, call.T, call.S, 0, 0)
    else:
        rows, keys = call.sequences.query_offsets + b, call.sequences.key_offsets + b
        row, key = tl.load(rows), tl.load(keys)
        return Sequence(b, 0, tl.load(rows + 1) - row, tl.load(keys + 1) - key, row, key)


@triton.jit
def tiles_of(call, total, SIZE):
    """How many places there are for tiles of a size, among the rows or keys of a batch row."""
    if call.sequences.query_offsets is None:
        return tl.cdiv(total, SIZE)
    else:
        return total // SIZE + call.sequences.num_sequences


@triton.jit
def tiles_before(call, b, first, SIZE):
    """The place of the first tile of sequence b, whose first row or key is `first`."""
    if call.sequences.query_offsets is None:
        return 0
    else:
        return first // SIZE + b


@triton.jit
def find(call, place, b, OF_KEYS: tl.constexpr, SIZE):
    """The sequence that has a tile of rows (or of keys) at a place of batch row b, and its number
    in it.
    """
    if call.sequences.query_offsets is None:
        return read_sequence(call, b), place
    else:
        offsets = call.sequences.key_offsets if OF_KEYS else call.sequences.query_offsets
        found = 0
        for start in range(0, call.sequences.num_sequences, LOOKED_AT):
            n = start + tl.arange(0, LOOKED_AT)
            inside = n < call.sequences.num_sequences
            before = tl.load(offsets + n, mask=inside, other=0) // SIZE + n
            found += tl.sum((inside & (before <= place)).to(tl.int32), 0)
        sequence = read_sequence(call, found - 1)
        first = sequence.first_key if OF_KEYS else sequence.first_row
        return sequence, place - tiles_before(call, sequence.b, first, SIZE)


@triton.jit
def load_keys(
    call,
    array,
    sequence,
    g,
    start,
    columns,
    inside,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values start + columns of a sequence, as `load_rows`."""
    paged: tl.constexpr = call.sequences.table is not None
    if paged:
        table, size = call.sequences.table, call.sequences.page_keys
        keys = start + columns
        pages = table.at + wide(sequence.b) * table.strides[0] + keys // size
        page = tl.load(pages, mask=inside, other=0).to(tl.int64)
        rows = page * array.strides[0] + wide(keys % size) * array.strides[2]
        entries = tl.arange(0, PADDED)
        at = array.at + wide(g) * array.strides[1] + rows[:, None]
        return tl.load(
            at + entries[None, :] * array.strides[3],
            mask=inside[:, None] & (entries < SIZE)[None, :],
            other=0.0,
        )
    else:
        base = head_of(array, sequence.batch, g, sequence.first_key + start)
        return load_rows(base, columns, inside, array.strides, SIZE, PADDED, MASKED)


@triton.jit
def norms_of_pages(call, sequence, g, keys, inside):
    """[keys]: at least the norm of each key; not finite where its page holds what is not."""
    table = call.sequences.table
    pages = table.at + wide(sequence.b) * table.strides[0] + keys // call.sequences.page_keys
    page = tl.load(pages, mask=inside, other=0).to(tl.int64)
    return tl.load(call.sequences.page_norms + page * call.G + g, mask=inside, other=0.0)


def bounds_of_pages(given: Sequences) -> Tensor | None:
    """[n, G]: at least the norm of every key of a sequence; None where pages have no norms, or
    there are no keys.
    """
    if given.table is None or given.page_norms is None or given.num_keys == 0:
        return None
    pages = torch.arange(given.table.shape[1], device=given.table.device)
    used = pages * given.page_keys < given.key_offsets.diff()[:, None]
    norms = given.page_norms[given.table.where(used, 0)]
    return norms.where(used[..., None], 0).amax(1).contiguous()
