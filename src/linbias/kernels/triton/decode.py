"""Decoding: few queries against a long cache, which is cut into parts that run at once.

A program has one part of a key/value head, for all query rows that read it, as one tile. With a
`key_bound` the scores of near keys give the certificate the head's window; without one all keys
are visited. `merge_kernel` adds the parts up in order (Flash-Decoding, Dao et al. 2023).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import (
    excess_of,
    log_count,
    log_share,
    most_needed,
    norm,
    preview,
    search,
    slack_of,
    trip_count,
)
from linbias.kernels.triton.launch import Call, arguments, options
from linbias.kernels.triton.row_ranges import hide, read_row_ranges, seen_by_any, sees_beyond
from linbias.kernels.triton.sequences import load_keys, read_sequence
from linbias.kernels.triton.sizes import padded
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    RIGHT,
    Block,
    Slopes,
    add_block,
    gap_bias,
    near_keys,
    near_score,
    read_range,
    read_slopes,
    read_start,
    store_rows,
    take_off_bias,
    toward,
    wide,
    zeros,
)

MOST_ROWS = {2: 64, 4: 16}  # by bytes of an element: in float32 more rows do not fit the registers
PROGRAMS_PER_PROCESSOR = 4
MOST_PARTS = 64

# On a side, at most, beside those at the queries' own positions.
NEAR_BLOCKS: tl.constexpr = tl.constexpr(4)


class Parts(NamedTuple):
    """What parts of the cache give: [B * G, parts, rows, E] and [B * G, parts, rows]."""

    out: Tensor
    row_max: Tensor
    row_sum: Tensor
    rows: int  # room for them: the queries of a sequence at most, in all heads of a group


class Queries(NamedTuple):
    """All query rows that read a key/value head; each has its own head's slopes."""

    sequence: Any
    g: Any
    offsets: Any  # [rows], from 0
    present: Any  # [rows]
    q: Any
    start: Any  # where query 0 stands
    position: Any  # [rows]
    slopes: Any
    row_first: Any  # [rows], see `read_row_ranges`
    row_end: Any
    first: Any  # the keys that any row sees
    end: Any
    X: Any  # [rows], pointers to the positions of keys, if they have any
    xq: Any


@triton.jit
def rows_of(array, batch, h, rows):
    """Where rows of several heads lie; h and rows have one shape."""
    strides = array.strides
    heads = array.at + wide(batch) * strides[0] + h.to(tl.int64) * strides[1]
    return heads + rows.to(tl.int64) * strides[2]


@triton.jit
def read_queries(call, b, g, SHAPE: tl.constexpr):
    group, sequence = call.H // call.G, read_sequence(call, b)
    offsets, T = tl.arange(0, SHAPE.rows), tl.maximum(sequence.T, 1)
    present = offsets < group * sequence.T
    # Absent rows have the last head's slopes.
    h, t = g * group + tl.minimum(offsets // T, group - 1), offsets % T
    entries = tl.arange(0, SHAPE.padded_D)
    q = tl.load(
        rows_of(call.q, sequence.batch, h, sequence.first_row + t)[:, None]
        + entries[None, :] * call.q.strides[3],
        mask=present[:, None] & (entries < SHAPE.D)[None, :],
        other=0.0,
    )
    first, end = read_range(call, sequence, g)
    start, _ = read_start(call, sequence, first, end)
    row_first, row_end = read_row_ranges(call, sequence, t, present)
    if call.query_range is not None:
        first, end = seen_by_any(first, end, row_first, row_end)
    X, xq = 0, 0.0
    if call.x is not None:
        X = rows_of(call.x, b, h, t * 0)
        xq = tl.load(rows_of(call.xq, b, h, t), mask=present, other=0.0)
    return Queries(
        sequence=sequence,
        g=g,
        offsets=offsets,
        present=present,
        q=q,
        start=start,
        position=start + t,
        slopes=read_slopes(call, b, h),
        row_first=row_first,
        row_end=row_end,
        first=first,
        end=end,
        X=X,
        xq=xq,
    )


@triton.jit
def score_keys(call, queries, start, SHAPE: tl.constexpr):
    """The block of keys from `start`, scored by all rows."""
    HAS_RIGHT: tl.constexpr = call.right is not None
    columns = tl.arange(0, SHAPE.keys)
    keys = start + columns
    inside = (keys >= queries.first) & (keys < queries.end)
    sequence, g = queries.sequence, queries.g
    k = load_keys(call, call.k, sequence, g, start, columns, inside, SHAPE.D, SHAPE.padded_D, True)
    product = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    order = queries.position[:, None] - keys[None, :]
    distance = order.to(tl.float32)
    if call.x is not None:
        at = queries.X[:, None] + (wide(keys) * call.x.strides[2])[None, :]
        x = tl.load(at, mask=inside[None, :], other=0.0)
        distance = toward(order, (queries.xq[:, None] - x).to(tl.float32))
    slopes = Slopes(
        left=queries.slopes.left[:, None],
        left_sight=queries.slopes.left_sight[:, None],
        right=queries.slopes.right[:, None],
        right_sight=queries.slopes.right_sight[:, None],
    )
    score = near_score(product, order, distance, inside[None, :], call.scale, slopes, HAS_RIGHT)
    if call.query_range is not None:
        score = hide(score, keys[None, :], queries.row_first[:, None], queries.row_end[:, None])
    return Block(keys, inside, k, order, distance, score, zeros(SHAPE.rows))


class Side(NamedTuple):
    """The blocks on one side of those at the queries' own positions."""

    slope: Any  # [rows]
    seen: Any  # [rows], which may look there
    most: Any  # how many blocks there are for them
    near: Any  # how many of these show what the others may hold


@triton.jit
def side_of(call, queries, slope, sight, most, CERTIFY: tl.constexpr, KEYS: tl.constexpr):
    seen = queries.present & (sight > 0)
    most = tl.max(tl.where(seen, tl.maximum(most, 0), 0), 0)
    near = 0
    if CERTIFY:
        wanted = preview(slope, KEYS)
        if call.x is not None:
            wanted = queries.offsets * 0 + NEAR_BLOCKS
        near = tl.max(tl.where(seen, wanted, 0), 0)
        near = tl.minimum(near, tl.minimum(most, NEAR_BLOCKS))
    return Side(slope, seen, most, near)


@triton.jit
def blocks_to_visit(
    call,
    queries,
    side,
    edge,
    bound,
    row_max,
    row_sum,
    log_share,
    slack,
    KEYS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """How many blocks of a side the rows must visit; its nearest ones begin at key `edge`.

    To sum what keys at given positions weigh would read all of them, so that these are counted.
    """
    slope, more = side.slope, side.most - side.near
    if SIDE == LEFT:
        nearest = edge - side.near * KEYS - 1
        distance, unseen = queries.position - nearest, nearest + 1 - queries.first
    else:
        nearest = edge + side.near * KEYS
        distance, unseen = nearest - queries.position, queries.end - nearest
    seen = side.seen
    if call.query_range is not None:
        seen &= sees_beyond(queries.row_first, queries.row_end, nearest, SIDE)
    if call.x is not None:
        stride = call.x.strides[2]
        bound += tl.log2(tl.maximum(unseen, 1).to(tl.float32))
        excess = excess_of(bound, row_max, row_sum, log_share)
        x = tl.load(
            queries.X + tl.where(more > 0, wide(nearest), 0) * stride, mask=seen, other=0.0
        )
        needed = most_needed(excess, slope, queries.xq, x, seen, slack, SIDE)
        needed = tl.where(seen & ~(slope > 0), INF, needed)
        steep = slope * (1 - slack)
        asked = search(needed, steep, queries.X, stride, None, nearest, more, KEYS, SIDE)
    else:
        bound += log_count(slope, unseen)
        excess = excess_of(bound, row_max, row_sum, log_share)
        asked = trip_count(excess, slope, seen, distance, more, slack, KEYS)
    return side.near + asked


@triton.jit
def decode_kernel(call, parts, BOUND, log_share, slack, SHAPE: tl.constexpr):
    """Fill `parts`, out unnormalised; grid (B * G, parts).

    BOUND [B * G] is the largest |k|; without one all keys are visited. Scores lack the gap's bias.
    """
    HAS_RIGHT: tl.constexpr = call.right is not None
    CERTIFY: tl.constexpr = BOUND is not None
    KEYS: tl.constexpr = SHAPE.keys
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    # The flattest heads, the last, come first, so that long programs start early.
    index, count = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(0) // call.G
    head = index % count * call.G + index // count
    queries = read_queries(call, head // call.G, head % call.G, SHAPE)
    slopes, offsets = queries.slopes, queries.offsets
    columns = tl.arange(0, KEYS)
    acc, row_sum = zeros(SHAPE.rows, SHAPE.padded_E), zeros(SHAPE.rows)
    row_max = row_sum - INF

    low, high = near_keys(queries.start, queries.sequence.T, queries.first, queries.end, KEYS)
    most = low // KEYS - queries.first // KEYS
    left = side_of(call, queries, slopes.left, slopes.left_sight, most, CERTIFY, KEYS)
    most = tl.cdiv(queries.end, KEYS) - high // KEYS
    right = side_of(call, queries, slopes.right, slopes.right_sight, most, CERTIFY, KEYS)
    left_count, right_count = left.most, right.most
    if CERTIFY:
        begin, stop = low - left.near * KEYS, high + right.near * KEYS
        for start in tl.range(begin, stop, KEYS, num_stages=SHAPE.stages):
            score = score_keys(call, queries, start, SHAPE).score
            new_max = tl.maximum(row_max, tl.max(score, 1))
            pivot = tl.where(new_max == -INF, 0.0, new_max)
            weights = tl.sum(tl.exp2(score - pivot[:, None]), 1)
            row_sum = row_sum * tl.exp2(row_max - pivot) + weights
            row_max = new_max
        q_norm = norm(queries.q.to(tl.float32), SHAPE.D) * tl.abs(call.scale) * (1 + slack)
        bound = q_norm * tl.load(BOUND + head) * (1 + 3 * slack)
        left_count = blocks_to_visit(
            call, queries, left, low, bound, row_max, row_sum, log_share, slack, KEYS, LEFT
        )
        if HAS_RIGHT:
            right_count = blocks_to_visit(
                call, queries, right, high, bound, row_max, row_sum, log_share, slack, KEYS, RIGHT
            )
        row_max, row_sum = zeros(SHAPE.rows) - INF, zeros(SHAPE.rows)

    low, high = low - left_count * KEYS, high + right_count * KEYS
    total = (high - low) // KEYS
    share = tl.cdiv(total, num_parts)
    last = tl.minimum((part + 1) * share, total)
    for n in tl.range(part * share, last, num_stages=SHAPE.stages):
        start = high - (n + 1) * KEYS
        block = score_keys(call, queries, start, SHAPE)
        v = load_keys(
            call,
            call.v,
            queries.sequence,
            queries.g,
            start,
            columns,
            block.inside,
            SHAPE.E,
            SHAPE.padded_E,
            True,
        )
        acc, row_max, row_sum = add_block(call, block, v, offsets, acc, row_max, row_sum)
    rows = (wide(head) * num_parts + part) * parts.rows
    PART_OUT = parts.out + rows * SHAPE.E
    store_rows(PART_OUT, offsets, queries.present, acc, SHAPE.E, SHAPE.padded_E)
    tl.store(parts.row_max + rows + offsets, row_max, mask=queries.present)
    tl.store(parts.row_sum + rows + offsets, row_sum, mask=queries.present)


@triton.jit
def merge_kernel(call, parts, OUT, ROW_MAX, LOG_SUM, num_parts, SHAPE: tl.constexpr):
    """Add up the parts of one row; grid (B * H, most queries), to OUT [B, H, T, E]."""
    b, h, t = tl.program_id(0) // call.H, tl.program_id(0) % call.H, tl.program_id(1)
    sequence, group = read_sequence(call, b), call.H // call.G
    present = t < sequence.T
    row = (wide(sequence.batch) * call.H + h) * call.T + sequence.first_row + t
    g, own_row = h // group, h % group * sequence.T + t
    E: tl.constexpr = SHAPE.E
    entries = tl.arange(0, SHAPE.padded_E)
    acc = zeros(SHAPE.padded_E)
    row_max, row_sum = float("-inf"), 0.0
    for part in range(num_parts):
        at = ((wide(b) * call.G + g) * num_parts + part) * parts.rows + own_row
        part_max = tl.load(parts.row_max + at, mask=present, other=float("-inf"))
        new_max = tl.maximum(row_max, part_max)
        pivot = tl.where(new_max == -INF, 0.0, new_max)
        keep, add = tl.exp2(row_max - pivot), tl.exp2(part_max - pivot)
        out = tl.load(parts.out + at * E + entries, mask=(entries < E) & present, other=0.0)
        acc = acc * keep + add * out
        row_sum = row_sum * keep + add * tl.load(parts.row_sum + at, mask=present, other=0.0)
        row_max = new_max
    empty = row_sum == 0
    out = acc / tl.where(empty, 1.0, row_sum)
    tl.store(OUT + row * E + entries, out.to(OUT.dtype.element_ty), mask=(entries < E) & present)
    log_sum = tl.where(empty, -INF, tl.log2(tl.where(empty, 1.0, row_sum)))
    if call.query_start is not None and call.x is None:
        first, end = read_range(call, sequence, g)
        _, gap = read_start(call, sequence, first, end)
        row_max, log_sum = take_off_bias(row_max, log_sum, gap_bias(gap, read_slopes(call, b, h)))
    tl.store(ROW_MAX + row, row_max, mask=present)
    tl.store(LOG_SUM + row, log_sum, mask=present)


def serves(T: int, group_size: int, itemsize: int) -> bool:
    """Are there so few query rows that all of a group fit one tile?"""
    return T * group_size <= MOST_ROWS[itemsize]


def decode(call: Call, num_processors: int, out: Tensor, row_max: Tensor, log_sum: Tensor) -> None:
    """Fill out, row_max and log_sum in bits, without dropout, in parts until all processors are
    busy.
    """
    B, H, G, T, S, D, E = call.lengths
    if B * H * T == 0:
        return
    if call.sequences is not None:
        T, S = call.sequences.longest
    B, tile, rows = call.num_sequences, call.sizes.decode, H // G * T
    num_blocks = triton.cdiv(S, tile.keys)
    wanted = triton.cdiv(num_processors * PROGRAMS_PER_PROCESSOR, B * G)
    num_parts = max(1, min(wanted, MOST_PARTS, num_blocks // 2))
    like: dict[str, Any] = {"dtype": torch.float32, "device": out.device}
    part_max, part_sum = torch.empty(2, B * G, num_parts, rows, **like)
    parts = Parts(torch.empty(B * G, num_parts, rows, E, **like), part_max, part_sum, rows)
    bound = call.key_bound if call.tolerance > 0 and num_blocks > 2 else None
    tile = tile._replace(rows=max(tile.rows, padded(rows)))
    given, share = arguments(call), log_share(call.tolerance, call.right is not None)
    decode_kernel[B * G, num_parts](given, parts, bound, share, slack_of(D), **options(call, tile))
    merge_kernel[B * H, T](
        given, parts, out, row_max, log_sum, num_parts, **options(call, tile._replace(num_warps=1))
    )
