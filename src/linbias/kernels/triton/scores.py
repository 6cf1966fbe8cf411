"""What forward and dq share: a tile of query rows, and its scores with a block of keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linbias.kernels.triton.row_ranges import hide, read_row_ranges, seen_by_all, seen_by_any
from linbias.kernels.triton.sequences import find, load_keys, tiles_of
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    NEAR,
    RIGHT,
    Block,
    between,
    beyond,
    distance_to,
    far_score,
    from_anchor,
    head_of,
    key_bias,
    load_places,
    my_tile,
    near_score,
    placed_bias,
    read_range,
    read_slopes,
    read_start,
    row_bias,
    wide,
    zeros,
)


class QueryTile(NamedTuple):
    """Some query rows of a head; all of them stand at positions from `position` on."""

    sequence: Any
    place: Any  # among the tiles of a head
    h: Any
    g: Any
    head: Any  # b * H + h
    offsets: Any  # [rows], from 0
    start: Any  # the first row, of the sequence
    row: Any  # likewise, of the batch row of arrays
    rows: Any  # likewise, in arrays [B, H, T]
    present: Any  # [rows]
    query_start: Any  # see `read_start`
    gap: Any
    position: Any
    slopes: Any
    key_first: Any  # the keys of the head
    key_end: Any
    row_first: Any  # [rows], see `read_row_ranges`
    row_end: Any
    first: Any  # the keys that any row sees
    end: Any
    all_first: Any  # those that all rows see
    all_end: Any
    xq: Any  # [rows], where they stand, if keys have positions
    own_x: Any  # where the first stands


@triton.jit
def query_tile(call, ROWS: tl.constexpr):
    """The tile of a program of the grid tiles * B * H."""
    place, b, h, g = my_tile(tiles_of(call, call.T, ROWS), call.B, call.H, call.G)
    sequence, index = find(call, place, b, False, ROWS)
    b, offsets = sequence.b, tl.arange(0, ROWS)
    start = index * ROWS
    row = sequence.first_row + start
    present = start + offsets < sequence.T
    key_first, key_end = read_range(call, sequence, g)
    query_start, gap = read_start(call, sequence, key_first, key_end)
    row_first, row_end = read_row_ranges(call, sequence, start + offsets, present)
    first, end, all_first, all_end = key_first, key_end, key_first, key_end
    if call.query_range is not None:
        first, end = seen_by_any(key_first, key_end, row_first, row_end)
        all_first, all_end = seen_by_all(row_first, row_end)
    xq, own_x = 0.0, 0.0
    if call.x is not None:
        xq = load_places(call.xq, b, h, start + offsets, present)
        own_x = tl.load(head_of(call.xq, b, h, start))
    return QueryTile(
        sequence=sequence,
        place=place,
        h=h,
        g=g,
        head=wide(b) * call.H + h,
        offsets=offsets,
        start=start,
        row=row,
        rows=(wide(sequence.batch) * call.H + h) * call.T + row,
        present=present,
        query_start=query_start,
        gap=gap,
        position=query_start + start,
        slopes=read_slopes(call, b, h),
        key_first=key_first,
        key_end=key_end,
        row_first=row_first,
        row_end=row_end,
        first=first,
        end=end,
        all_first=all_first,
        all_end=all_end,
        xq=xq,
        own_x=own_x,
    )


@triton.jit
def score_block(call, tile, q, start, stop, SHAPE: tl.constexpr, PART: tl.constexpr):
    """The keys from `start` on, which lie on one side of all rows unless PART is NEAR: then they
    end at `stop`.
    """
    PLACED: tl.constexpr = call.x is not None
    HAS_RIGHT: tl.constexpr = call.right is not None
    # Backward must find the same scores to the last bit; 16-bit inputs do not show the difference.
    PRECISE: tl.constexpr = call.q.at.dtype.element_ty == tl.float32
    columns = tl.arange(0, SHAPE.keys)
    keys = start + columns
    end = tl.minimum(tile.end, stop) if PART == NEAR else tile.end
    inside = (keys >= tile.first) & (keys < end)
    k = load_block(call, call.k, tile, start, inside, SHAPE.D, SHAPE.padded_D, PART)
    product = tl.dot(q, tl.trans(k), input_precision="ieee")
    order = (tile.position + tile.offsets)[:, None] - keys[None, :]
    away = order.to(tl.float32)
    lead = zeros(SHAPE.rows)
    if PLACED:
        x = load_places(call.x, tile.sequence.b, tile.h, keys, inside)
    if PART == NEAR:
        if PLACED:
            row_high, row_low = from_anchor(tile.xq, tile.own_x)
            key_high, key_low = from_anchor(x, tile.own_x)
            away = between(
                row_high[:, None], row_low[:, None], key_high[None, :], key_low[None, :], order
            )
        score = near_score(
            product, order, away, inside[None, :], call.scale, tile.slopes, HAS_RIGHT
        )
    else:
        slope = tile.slopes.left if PART == LEFT else tile.slopes.right
        if PLACED:
            nearest = start + (SHAPE.keys - 1 if PART == LEFT else 0)
            anchor = tl.load(head_of(call.x, tile.sequence.b, tile.h, nearest))
            key_term, lead = placed_bias(x, tile.xq, anchor, slope, PART)
            away = beyond(anchor, tile.xq, PART)[:, None] + beyond(x, anchor, PART)[None, :]
            away = away if PART == LEFT else -away
        else:
            key_term = key_bias(columns, slope, SHAPE.keys, PART)
            rows_to_keys = distance_to(start, tile.position, SHAPE.rows, SHAPE.keys, PART)
            lead = row_bias(tile.offsets, slope, SHAPE.rows, PART) + slope * rows_to_keys
        if call.key_range is not None or PART == RIGHT:  # see load_block
            key_term = tl.where(inside, key_term, INF)
        score = far_score(product, call.scale, key_term[None, :], lead[:, None], PRECISE)
        if PRECISE:
            lead = zeros(SHAPE.rows)
    if call.query_range is not None:
        if (start < tile.all_first) | (start + SHAPE.keys > tile.all_end):
            score = hide(score, keys[None, :], tile.row_first[:, None], tile.row_end[:, None])
    return Block(keys, inside, k, order, away, score, lead)


@triton.jit
def load_block(
    call, array, tile, start, inside, SIZE: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr
):
    """Keys or values from `start` on. Those to the left of a tile are all there, unless a key
    range cuts them.
    """
    columns = tl.arange(0, inside.shape[0])
    MASKED: tl.constexpr = call.key_range is not None or PART != LEFT
    return load_keys(
        call, array, tile.sequence, tile.g, start, columns, inside, SIZE, PADDED, MASKED
    )
