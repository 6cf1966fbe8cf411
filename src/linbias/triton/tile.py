"""What a tile of scores is made of: the functions that the kernels share.

Scores count in bits (base-2 exponents): score = q.k * scale * log2(e) - slope * log2(e) * distance. Distances are integers
held in float32, exact up to 2^24 tokens, and always taken from the tile outwards, never from position 0.
"""

import triton
import triton.language as tl

INF: tl.constexpr = tl.constexpr(float("inf"))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LARGEST_SLOPE: tl.constexpr = tl.constexpr(3e38)
LEFT: tl.constexpr = tl.constexpr(0)
RIGHT: tl.constexpr = tl.constexpr(1)


@triton.jit
def wide(x):
    """x as a 64-bit integer: what leads to a tile; offsets within one have 32 bits."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def read_slope(slope):
    """The slope in bits per key, and 1 if it hides its side, else 0."""
    hidden = tl.where(slope == INF, 1, 0)
    bits = tl.where(slope == INF, 0.0, slope) * LOG2E
    # 0 * inf would be NaN at distance 0
    return tl.where(bits > LARGEST_SLOPE, LARGEST_SLOPE, bits), hidden


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
    base,
    rows,
    present,
    stride_row,
    stride_entry,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """[rows, PADDED]; zeros in absent rows and beyond SIZE."""
    entries = tl.arange(0, PADDED)
    pointers = base + rows[:, None] * stride_row + entries[None, :] * stride_entry
    mask = present[:, None]
    if SIZE != PADDED:
        mask = mask & (entries < SIZE)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


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
    product,
    distance,
    inside,
    scale,
    left,
    left_hidden,
    right,
    right_hidden,
):
    """Scores of keys on both sides of the rows; distance = position - key, in the shape of product."""
    bias = tl.where(distance >= 0, left * distance, -right * distance)
    hidden = tl.where(distance > 0, left_hidden, tl.where(distance < 0, right_hidden, 0))
    return tl.where(inside & (hidden == 0), product * scale - bias, -INF)


@triton.jit
def far_terms(offsets, keys, inside, position, slope, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """What rows and keys add to the bias where all keys lie on one side: both at least 0, so that nothing cancels.

    offsets count the rows from the tile's first, which stands at `position`; keys that do not count get inf.
    """
    if SIDE == LEFT:
        row_term, away = slope * offsets.to(tl.float32), position - keys
    else:
        row_term, away = slope * (ROWS - 1 - offsets).to(tl.float32), keys - (position + ROWS - 1)
    return row_term, tl.where(inside, slope * away.to(tl.float32), INF)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_hash(seed, batch_head, rows):
    """The part of the dropout hash (linbias/torch/dropout.py) that a row's keys share."""
    head = _mix(_mix(seed.to(tl.uint32)) ^ batch_head.to(tl.uint32))
    return _mix(head ^ rows.to(tl.uint32))


@triton.jit
def key_hash(keys):
    return _mix(keys.to(tl.uint32))


@triton.jit
def drop(weight, row_hashes, key_hashes, threshold, factor):
    """Attention dropout; the hashes broadcast to the shape of weight."""
    keep = _mix(row_hashes ^ key_hashes) >= threshold.to(tl.uint32)
    return tl.where(keep, weight * factor, 0.0)
