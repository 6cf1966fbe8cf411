"""What a tile of scores is made of: the functions that the kernels share.

Scores count in bits: q.k * scale * log2(e) - slope * log2(e) * distance. Distances are float32
from the tile outwards. Beyond the near keys they are sums of parts that are at least 0, of which
only that of a key within its block is taken off every score; the rest goes to the row's maximum. A
`gap` between queries and all keys is taken off at the very end; positions, float64, have none.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INF: tl.constexpr = tl.constexpr(float("inf"))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LARGEST_SLOPE: tl.constexpr = tl.constexpr(3e38)
LEFT: tl.constexpr = tl.constexpr(0)
RIGHT: tl.constexpr = tl.constexpr(1)
NEAR: tl.constexpr = tl.constexpr(2)  # keys on both sides
FARTHEST: tl.constexpr = tl.constexpr(2**30)  # no position is farther from key 0


@triton.jit
def wide(x):
    """x as a 64-bit integer: what leads to a tile; offsets within one have 32 bits."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def zeros(ROWS: tl.constexpr, SIZE: tl.constexpr = None):
    """[ROWS] or [ROWS, SIZE], float32."""
    return tl.zeros((ROWS,) if SIZE is None else (ROWS, SIZE), tl.float32)


@triton.jit
def read_slope(slope):
    """The slope in bits per key, and how far its side is seen: 0 keys if the slope hides it."""
    hidden = slope == INF
    bits = tl.where(hidden, 0.0, slope) * LOG2E
    # 0 * inf would be NaN at distance 0
    return tl.where(bits > LARGEST_SLOPE, LARGEST_SLOPE, bits), tl.where(hidden, 0, FARTHEST)


class Slopes(NamedTuple):
    """Slopes in bits per key, and how many keys far each side is seen."""

    left: Any
    left_sight: Any
    right: Any
    right_sight: Any


@triton.jit
def read_slopes(call, b, h):
    """The slopes of head h, or of several; without right slopes that side is hidden."""
    at = call.left.at + b * call.left.strides[0] + h * call.left.strides[1]
    left, left_sight = read_slope(tl.load(at))
    right, right_sight = tl.zeros_like(left), tl.zeros_like(left_sight)
    if call.right is not None:
        at = call.right.at + b * call.right.strides[0] + h * call.right.strides[1]
        right, right_sight = read_slope(tl.load(at))
    return Slopes(left, left_sight, right, right_sight)


@triton.jit
def my_tile(num_tiles, B, H, G):
    """Place of a tile, batch row, head and key/value head; of programs of the grid
    num_tiles * B * H.

    The flattest heads, the last, and their last rows come first, so that long programs start
    early.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    h = index // num_tiles // B
    return index % num_tiles, index // num_tiles % B, h, h // (H // G)


@triton.jit
def clamp(x, least, most):
    """x within least .. most, as a 32-bit integer."""
    return tl.minimum(tl.maximum(x, least), most).to(tl.int32)


@triton.jit
def read_range(call, sequence, g):
    """The first and one past the last key that a key/value head shows, always of the sequence."""
    first, end = 0, sequence.S
    if call.key_range is not None:
        strides = call.key_range.strides
        limits = call.key_range.at + wide(sequence.b) * strides[0] + wide(g) * strides[1]
        end = clamp(tl.load(limits + strides[2]).to(tl.int64), 0, sequence.S)
        first = clamp(tl.load(limits).to(tl.int64), 0, end)
    return first, end


@triton.jit
def read_start(call, sequence, first, end):
    """Where query 0 stands once all queries are moved next to the keys, and how much higher it
    stood.
    """
    start, gap = sequence.S - sequence.T, 0
    if call.query_start is not None:
        given = call.query_start.at + wide(sequence.b) * call.query_start.strides[0]
        given = clamp(tl.load(given).to(tl.int64), -FARTHEST, FARTHEST)
        start = clamp(given, first - sequence.T, end)
        gap = given - start
    return start, gap


@triton.jit
def gap_bias(gap, slopes):
    """The bias that all keys share because the queries stood a gap away from them."""
    slope = tl.where(gap > 0, slopes.left, slopes.right)
    # The minimum also keeps the compiler from fusing product and sum: forward and backward must
    # find the same number.
    return tl.minimum(slope * tl.abs(gap).to(tl.float32), LARGEST_SLOPE)


@triton.jit
def take_off_bias(row_max, log_sum, bias):
    """row_max and log_sum of scores that are all lower by `bias`.

    What row_max loses in rounding goes to log_sum: backward, which adds `bias` again, finds it.
    """
    lower = row_max - bias
    lost = tl.where(row_max == -INF, 0.0, row_max - (lower + bias))
    return lower, log_sum + lost


@triton.jit
def near_keys(position, num_rows, first, end, KEYS: tl.constexpr):
    """Where the blocks begin and end that hold the keys at `position` and the rows after it."""
    low = clamp(position, first, end) // KEYS
    high = tl.cdiv(clamp(position + num_rows, first, end), KEYS)
    return low * KEYS, tl.maximum(low, high) * KEYS


@triton.jit
def head_of(array, b, h, row):
    """Where a row of a head [rows, size] of an array [B, heads, rows, size] lies."""
    strides = array.strides
    return array.at + wide(b) * strides[0] + wide(h) * strides[1] + wide(row) * strides[2]


@triton.jit
def load_rows(
    base, rows, present, strides, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr
):
    """[rows, PADDED]; zeros beyond SIZE and in absent rows, of which there are none where not
    MASKED.
    """
    entries = tl.arange(0, PADDED)
    pointers = base + rows[:, None] * strides[2] + entries[None, :] * strides[3]
    if MASKED and SIZE != PADDED:
        return tl.load(pointers, mask=present[:, None] & (entries < SIZE)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=present[:, None], other=0.0)
    elif SIZE != PADDED:
        return tl.load(pointers, mask=(entries < SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, rows, present, values, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write [rows, PADDED] to a contiguous [rows, SIZE], in its dtype."""
    entries = tl.arange(0, PADDED)
    mask = present[:, None]
    if SIZE != PADDED:
        mask = mask & (entries < SIZE)[None, :]
    pointers = base + rows[:, None] * SIZE + entries[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def near_score(product, order, distance, inside, scale, slopes, HAS_RIGHT: tl.constexpr):
    """Scores of keys on both sides of the rows; order = row - key counts them, distance is
    float32.
    """
    bias = slopes.left * distance
    visible = inside & (order <= slopes.left_sight)
    if HAS_RIGHT:
        bias = tl.where(order < 0, -slopes.right * distance, bias)
        visible &= order >= -slopes.right_sight
    else:
        visible &= order >= 0
    return tl.where(visible, product * scale - bias, -INF)


@triton.jit
def load_places(array, b, h, indices, present):
    """Where some keys or queries of a head stand, float64; 0 where absent."""
    at = head_of(array, b, h, 0) + wide(indices) * array.strides[2]
    return tl.load(at, mask=present, other=0.0)


@triton.jit
def from_anchor(place, anchor):
    """place - anchor as a sum of two float32, which keeps its digits."""
    away = place - anchor
    high = away.to(tl.float32)
    return high, (away - high.to(tl.float64)).to(tl.float32)


@triton.jit
def toward(order, distance):
    """A distance, which is not below 0 to the left nor above it to the right, whatever absent rows
    hold.
    """
    return tl.where(order < 0, tl.minimum(distance, 0.0), tl.maximum(distance, 0.0))


@triton.jit
def between(row_high, row_low, key_high, key_low, order):
    """How far keys lie back of rows, in the shape of order; both as `from_anchor` gives them,
    broadcast to it.
    """
    return toward(order, (row_high - key_high) + (row_low - key_low))


@triton.jit
def beyond(place, anchor, SIDE: tl.constexpr):
    """How far a place lies to one side of another, at least 0: RIGHT is what keys far on the right
    are of rows.
    """
    away = anchor - place if SIDE == LEFT else place - anchor
    return tl.maximum(away.to(tl.float32), 0.0)


@triton.jit
def placed_bias(x, xq, anchor, slope, SIDE: tl.constexpr):
    """`key_bias` and `lead`, of keys on one side of the rows: beyond an anchor, and before it."""
    rows = beyond(anchor, xq, SIDE)
    return slope * beyond(x, anchor, SIDE), slope * rows


@triton.jit
def key_bias(columns, slope, KEYS: tl.constexpr, SIDE: tl.constexpr):
    """The bias of a block's keys beside that of its key nearest to the rows."""
    return slope * (KEYS - 1 - columns if SIDE == LEFT else columns).to(tl.float32)


@triton.jit
def row_bias(offsets, slope, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """The bias of a tile's rows beside that of its row nearest to the keys."""
    return slope * (offsets if SIDE == LEFT else ROWS - 1 - offsets).to(tl.float32)


@triton.jit
def far_score(product, scale, key_term, lead, PRECISE: tl.constexpr):
    """Scores of keys on one side of the rows; they still lack `lead`, unless PRECISE."""
    if PRECISE:
        return product * scale - (key_term + lead)
    else:
        return product * scale - key_term


@triton.jit
def distance_to(block, position, ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr):
    """The distance between keys from `block` and rows from `position`, nearest to nearest."""
    if SIDE == LEFT:
        return (position - block - (KEYS - 1)).to(tl.float32)
    else:
        return (block - position - (ROWS - 1)).to(tl.float32)


class Block(NamedTuple):
    """A block of keys, and its scores with a tile of rows."""

    keys: Any  # [keys]
    inside: Any  # [keys], whether there are such keys
    k: Any
    order: Any  # [rows, keys], row - key
    away: Any  # how far keys lie back of rows
    score: Any
    lead: Any  # [rows], what is still to be taken off the score


@triton.jit
def add_block(call, block, v, row_hashes, acc, row_max, row_sum):
    """One step of the online softmax, in bits."""
    new_max = tl.maximum(row_max, tl.max(block.score, 1) - block.lead)
    # While a row has seen no key its maximum is -inf, and any finite pivot keeps its sums at 0.
    pivot = tl.where(new_max == -INF, 0.0, new_max)
    weight = tl.exp2(block.score - (pivot + block.lead)[:, None])
    shrink = tl.exp2(row_max - pivot)
    row_sum = row_sum * shrink + tl.sum(weight, 1)
    acc = add_values(call, block, weight, v, row_hashes, acc * shrink[:, None])
    return acc, new_max, row_sum


@triton.jit
def add_values(call, block, weight, v, row_hashes, acc):
    """acc and the values of a block by their weights, of which dropout drops some."""
    key_hashes = key_hash(call.dropout, block.keys)
    weight = drop(weight, row_hashes[:, None], key_hashes[None, :], call.dropout)
    return tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_hash(dropout, head, rows):
    """The part of the dropout hash (linbias/torch/dropout.py) that a row's keys share."""
    if dropout is not None:
        mixed = _mix(_mix(tl.load(dropout.seed).to(tl.uint32)) ^ head.to(tl.uint32))
        return _mix(mixed ^ (rows.to(tl.uint32) + tl.load(dropout.seed + 1).to(tl.uint32)))
    else:
        return rows


@triton.jit
def key_hash(dropout, keys):
    if dropout is not None:
        return _mix(keys.to(tl.uint32) + tl.load(dropout.seed + 2).to(tl.uint32))
    else:
        return keys


@triton.jit
def drop(weight, row_hashes, key_hashes, dropout):
    """Attention dropout, if any; the hashes broadcast to the shape of weight."""
    if dropout is not None:
        keep = _mix(row_hashes ^ key_hashes) >= tl.full((), dropout.threshold, tl.uint32)
        return tl.where(keep, weight * dropout.factor, 0.0)
    else:
        return weight
