"""Which keys the rows of a tile may see, where every query has a range of keys of its own.

A tile visits the blocks between the first and the last key that any of its rows sees, and masks
those that some row does not see whole. Blocks in a gap between its rows' ranges are visited too: a
branch around loads would keep the compiler from pipelining them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.launch import Call, arguments
from linbias.kernels.triton.sequences import find, tiles_of
from linbias.kernels.triton.sizes import FUSION
from linbias.kernels.triton.tile import INF, LEFT, wide


@triton.jit
def read_row_ranges(call, sequence, rows, present):
    """The first and one past the last key of each row of a sequence; S and 0 in rows that see none
    or are absent.
    """
    if call.query_range is not None:
        strides = call.query_range.strides
        limits = call.query_range.at + wide(sequence.batch) * strides[0]
        limits += (sequence.first_row + rows).to(tl.int64) * strides[1]
        low = tl.load(limits, mask=present, other=0).to(tl.int32)
        high = tl.load(limits + strides[2], mask=present, other=0).to(tl.int32)
        some = low < high
        return tl.where(some, low, call.S), tl.where(some, high, 0)
    else:
        return 0, call.S


@triton.jit
def seen_by_any(first, end, row_first, row_end):
    """The first and one past the last of the keys first .. end - 1 that any row sees; 0 and 0 if
    none.
    """
    first = tl.maximum(first, tl.min(row_first, 0))
    end = tl.minimum(end, tl.max(row_end, 0))
    some = first < end
    return tl.where(some, first, 0), tl.where(some, end, 0)


@triton.jit
def seen_by_all(row_first, row_end):
    """The first and one past the last key that all rows see; none if the latter is not more."""
    return tl.max(row_first, 0), tl.min(row_end, 0)


@triton.jit
def within(low, high, first, end, KEYS: tl.constexpr):
    """Of the blocks low .. high those that hold keys first .. end - 1; or where these begin or
    end.
    """
    least, most = first // KEYS * KEYS, tl.cdiv(end, KEYS) * KEYS
    low = tl.minimum(tl.maximum(low, least), most)
    return low, tl.minimum(tl.maximum(high, least), most)


@triton.jit
def hide(score, keys, row_first, row_end):
    """-inf for keys outside their row's range; all broadcast to the shape of score."""
    return tl.where((keys >= row_first) & (keys < row_end), score, -INF)


@triton.jit
def sees_beyond(row_first, row_end, nearest, SIDE: tl.constexpr):
    """Which rows see any key from `nearest` outwards: the others can lose nothing there."""
    return row_first <= nearest if SIDE == LEFT else row_end > nearest


@triton.jit
def hulls_kernel(call, HULLS, ROWS: tl.constexpr):
    """Fill HULLS [B, tiles, 4]: `seen_by_any` and `seen_by_all` of tiles of ROWS rows; grid
    B * tiles.
    """
    num_tiles = tiles_of(call, call.T, ROWS)
    place = tl.program_id(0) % num_tiles
    sequence, tile = find(call, place, tl.program_id(0) // num_tiles, False, ROWS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    low, high = read_row_ranges(call, sequence, rows, rows < sequence.T)
    first, end = seen_by_any(0, sequence.S, low, high)
    all_first, all_end = seen_by_all(low, high)
    to = HULLS + wide(tl.program_id(0)) * 4
    tl.store(to, first)
    tl.store(to + 1, end)
    tl.store(to + 2, all_first)
    tl.store(to + 3, all_end)


def hulls(call: Call, rows: int) -> Tensor | None:
    """What `hulls_kernel` says of tiles of `rows` rows; None where rows have no ranges."""
    if call.query_range is None:
        return None
    B, _, _, T, *_ = call.lengths
    num_tiles = call.places(T, rows)
    found = torch.empty(B, num_tiles, 4, dtype=torch.int32, device=call.q.device)
    hulls_kernel[B * num_tiles,](arguments(call), found, ROWS=rows, **FUSION)
    return found
