"""What a tile of scores is made of: the functions that the kernels share.

Scores count in bits (base-2 exponents): score = q.k * scale * log2(e) - slope * log2(e) * distance. Distances are integers
held in float32, exact up to 2^24 tokens, and always taken from the tile outwards, never from position 0. Where all keys of
a block lie on one side of all rows, the distance is a sum of three that are at least 0: of the key within its block, of the
gap between block and tile, and of the row within its tile. Only the first is taken off every score, within its
multiplication; the others go to the row's maximum, which a score is held against anyway.
"""

import triton
import triton.language as tl

INF: tl.constexpr = tl.constexpr(float("inf"))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LARGEST_SLOPE: tl.constexpr = tl.constexpr(3e38)
LEFT: tl.constexpr = tl.constexpr(0)
RIGHT: tl.constexpr = tl.constexpr(1)
NEAR: tl.constexpr = tl.constexpr(2)  # keys on both sides
FARTHEST: tl.constexpr = tl.constexpr(2**30)  # no distance is as long


@triton.jit
def wide(x):
    """x as a 64-bit integer: what leads to a tile; offsets within one have 32 bits."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def read_slope(slope):
    """The slope in bits per key, and how far its side can be seen: 0 keys if the slope hides it."""
    hidden = slope == INF
    bits = tl.where(hidden, 0.0, slope) * LOG2E
    # 0 * inf would be NaN at distance 0
    return tl.where(bits > LARGEST_SLOPE, LARGEST_SLOPE, bits), tl.where(hidden, 0, FARTHEST)


@triton.jit
def read_slopes(LEFT_SLOPES, RIGHT_SLOPES, left_at, right_at, HAS_RIGHT: tl.constexpr):
    """Slope and sight to the left and to the right of one head; without right slopes that side is hidden."""
    left, left_sight = read_slope(tl.load(LEFT_SLOPES + left_at))
    right, right_sight = tl.zeros_like(left), tl.zeros_like(left_sight)
    if HAS_RIGHT:
        right, right_sight = read_slope(tl.load(RIGHT_SLOPES + right_at))
    return left, left_sight, right, right_sight


@triton.jit
def my_tile(num_tiles, B, H, G):
    """Which tile of which head a program of the grid num_tiles * B * H has: tile, batch row, head, key/value head.

    The heads with the highest index come first (with ALiBi's schedules the flattest, whose windows are longest), and of each
    the last rows, so that long programs start early; programs of one head follow each other and share its keys in the L2 cache.
    """
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    h = index // num_tiles // B
    return index % num_tiles, index // num_tiles % B, h, h // (H // G)


@triton.jit
def key_limits(ranges, b, S, HAS_RANGE: tl.constexpr):
    """The first and one past the last valid key of batch row b, inside the array whatever the range says."""
    first, end = 0, S
    if HAS_RANGE:
        end = tl.minimum(tl.maximum(tl.load(ranges + 2 * b + 1), 0), S)
        first = tl.minimum(tl.maximum(tl.load(ranges + 2 * b), 0), end)
    return first, end


@triton.jit
def near_keys(position, first, end, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Where the blocks of KEYS begin and end that hold the keys at positions position .. position + ROWS - 1."""
    low = tl.minimum(tl.maximum(position, first), end) // KEYS
    high = tl.cdiv(tl.minimum(tl.maximum(position + ROWS, first), end), KEYS)
    return low * KEYS, tl.maximum(low, high) * KEYS


@triton.jit
def load_rows(
    base, rows, present, stride_row, stride_entry,
    SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr = True,
):  # fmt: skip
    """[rows, PADDED]; zeros beyond SIZE and in absent rows, of which there are none where not MASKED."""
    entries = tl.arange(0, PADDED)
    pointers = base + rows[:, None] * stride_row + entries[None, :] * stride_entry
    if MASKED and SIZE != PADDED:
        return tl.load(pointers, mask=present[:, None] & (entries < SIZE)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=present[:, None], other=0.0)
    elif SIZE != PADDED:
        return tl.load(pointers, mask=(entries < SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_block(
    base, block, columns, inside, stride_row, stride_entry,
    SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_RANGE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Keys or values from `block` on. Those to the left of a tile are all there, unless a key range cuts them."""
    base += wide(block) * stride_row
    MASKED: tl.constexpr = HAS_RANGE or PART != LEFT
    return load_rows(base, columns, inside, stride_row, stride_entry, SIZE, PADDED, MASKED)


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
def near_score(
    product, distance, inside, scale, left, left_sight, right, right_sight, HAS_RIGHT: tl.constexpr
):  # fmt: skip
    """Scores of keys on both sides of the rows; distance = position - key, in the shape of product."""
    bias = left * distance.to(tl.float32)
    visible = inside & (distance <= left_sight)
    if HAS_RIGHT:
        bias = tl.where(distance < 0, -right * distance.to(tl.float32), bias)
        visible &= distance >= -right_sight
    else:
        visible &= distance >= 0
    return tl.where(visible, product * scale - bias, -INF)


@triton.jit
def key_bias(columns, slope, KEYS: tl.constexpr, SIDE: tl.constexpr):
    """The bias of a block's keys beside that of its key nearest to the rows."""
    return slope * (KEYS - 1 - columns if SIDE == LEFT else columns).to(tl.float32)


@triton.jit
def cut(key_term, inside, HAS_RANGE: tl.constexpr, SIDE: tl.constexpr):
    """key_bias with inf for keys that are not there; see load_block."""
    if HAS_RANGE or SIDE != LEFT:
        return tl.where(inside, key_term, INF)
    else:
        return key_term


@triton.jit
def row_bias(offsets, slope, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """The bias of a tile's rows beside that of its row nearest to the keys."""
    return slope * (offsets if SIDE == LEFT else ROWS - 1 - offsets).to(tl.float32)


@triton.jit
def far_score(product, scale, key_term, lead, PRECISE: tl.constexpr):
    """Scores of keys on one side, in the shape of product; they still lack `lead`, unless PRECISE."""
    if PRECISE:
        return product * scale - (key_term + lead)
    else:
        return product * scale - key_term


@triton.jit
def gap(position, block, ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr):
    """The distance between the rows from `position` and the keys from `block`, nearest to nearest."""
    if SIDE == LEFT:
        return (position - block - (KEYS - 1)).to(tl.float32)
    else:
        return (block - position - (ROWS - 1)).to(tl.float32)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_hash(SEED, batch_head, rows, DROPOUT: tl.constexpr):
    """The part of the dropout hash (linbias/torch/dropout.py) that a row's keys share."""
    if DROPOUT:
        head = _mix(_mix(tl.load(SEED).to(tl.uint32)) ^ batch_head.to(tl.uint32))
        return _mix(head ^ rows.to(tl.uint32))
    else:
        return rows


@triton.jit
def key_hash(keys):
    return _mix(keys.to(tl.uint32))


@triton.jit
def drop(weight, row_hashes, key_hashes, threshold, factor):
    """Attention dropout; the hashes broadcast to the shape of weight."""
    keep = _mix(row_hashes ^ key_hashes) >= threshold.to(tl.uint32)
    return tl.where(keep, weight * factor, 0.0)
