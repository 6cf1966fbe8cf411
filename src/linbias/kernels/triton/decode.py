"""Decoding: few queries against a long cache, which is cut into parts that run at once.

A program has one part of a key/value head, for all query rows that read it, as one tile. With a
`key_bound` the scores of near keys give the certificate the head's window; without one all keys
are visited. `merge_kernel` adds the parts up in order (Flash-Decoding, Dao et al. 2023).
"""

from typing import Any

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
from linbias.kernels.triton.launch import (
    Call,
    arguments,
    position_arguments,
    slope_arguments,
)
from linbias.kernels.triton.row_ranges import hide, read_row_ranges, seen_by_any, sees_beyond
from linbias.kernels.triton.sizes import FUSION, padded
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    NEAR,
    RIGHT,
    add_block,
    gap_bias,
    head_of,
    load_block,
    near_keys,
    near_score,
    read_range,
    read_slopes,
    read_start,
    store_rows,
    take_off_bias,
    toward,
    wide,
)

MOST_ROWS = {2: 64, 4: 16}  # by bytes of an element: in float32 more rows do not fit the registers
PROGRAMS_PER_PROCESSOR = 4
MOST_PARTS = 64

# On a side, at most, beside those at the queries' own positions.
NEAR_BLOCKS: tl.constexpr = tl.constexpr(4)
SEARCHED: tl.constexpr = tl.constexpr(32)  # blocks at a time


@triton.jit
def score_block(
    q, K, X, xq, start, position, first, end, row_first, row_end, strides, x_stride, scale, left,
    left_sight, right, right_sight, D: tl.constexpr, PADDED_D: tl.constexpr, KEYS: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, RANGED: tl.constexpr,
):  # fmt: skip
    """The scores of all rows with the keys from `start`, and which of these there are."""
    columns = tl.arange(0, KEYS)
    keys = start + columns
    inside = (keys >= first) & (keys < end)
    k = load_block(K, start, columns, inside, strides, D, PADDED_D, HAS_RANGE, NEAR)
    order = position[:, None] - keys[None, :]
    distance = order.to(tl.float32)
    if X is not None:
        at = X[:, None] + (wide(keys) * x_stride)[None, :]
        x = tl.load(at, mask=inside[None, :], other=0.0)
        distance = toward(order, (xq[:, None] - x).to(tl.float32))
    score = near_score(
        tl.dot(q, tl.trans(k), input_precision="ieee"), order, distance, inside[None, :], scale,
        left[:, None], left_sight[:, None], right[:, None], right_sight[:, None], HAS_RIGHT,
    )  # fmt: skip
    if RANGED:
        score = hide(score, keys[None, :], row_first[:, None], row_end[:, None])
    return score, inside


@triton.jit
def blocks_to_visit(
    bound, slope, row_max, row_sum, seen, X, xq, x_stride, nearest, distance, unseen, near, most,
    log_share, slack, KEYS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """How many blocks of one side the rows must visit, of which they have scored the `near` first.

    To sum what keys at given positions weigh would read all of them, so that these are counted.
    """
    if X is not None:
        more = most > near
        bound += tl.log2(tl.maximum(unseen, 1).to(tl.float32))
        x = tl.load(X + tl.where(more, wide(nearest), 0) * x_stride, mask=seen, other=0.0)
        needed = most_needed(
            excess_of(bound, row_max, row_sum, log_share), slope, xq, x, seen, slack, SIDE
        )
        needed = tl.where(seen & ~(slope > 0), INF, needed)
        asked = search(
            needed, slope, X, x_stride, None, nearest, most - near, slack, KEYS, SEARCHED, SIDE
        )
    else:
        asked = trip_count(
            bound + log_count(slope, unseen), slope, row_max, row_sum, seen, distance, most - near,
            log_share, slack, KEYS
        )  # fmt: skip
    return near + asked


@triton.jit
def decode_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, KEY_RANGE, QUERY_START, QUERY_RANGE, X, XQ, BOUND,
    PART_OUT, PART_MAX, PART_SUM, q_strides, k_strides, v_strides, left_strides, right_strides,
    range_strides, start_strides, query_range_strides, x_strides, xq_strides, H, G, T, S, scale,
    log_share, slack, D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill PART_OUT [B * G, parts, rows, E], unnormalised, PART_MAX and PART_SUM; grid (B * G,
    parts).

    BOUND [B * G] is the largest |k|; without one all keys are visited. Scores lack the gap's bias.
    """
    HAS_RIGHT: tl.constexpr = RIGHT_SLOPES is not None
    HAS_RANGE: tl.constexpr = KEY_RANGE is not None
    RANGED: tl.constexpr = QUERY_RANGE is not None
    CERTIFY: tl.constexpr = BOUND is not None
    PLACED: tl.constexpr = X is not None
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    group = H // G
    first, end = read_range(KEY_RANGE, range_strides, b, g, S)
    query_start, _ = read_start(QUERY_START, start_strides, b, first, end, T, S)
    offsets = tl.arange(0, ROWS)
    present = offsets < group * T
    # Absent rows have the last head's slopes.
    h, t = g * group + tl.minimum(offsets // T, group - 1), offsets % T
    position = query_start + t
    left, left_sight, right, right_sight = read_slopes(
        LEFT_SLOPES, RIGHT_SLOPES, left_strides, right_strides, b, h
    )
    K, V = head_of(K, k_strides, b, g), head_of(V, v_strides, b, g)
    entries = tl.arange(0, PADDED_D)
    rows = wide(b) * q_strides[0] + h.to(tl.int64) * q_strides[1] + t.to(tl.int64) * q_strides[2]
    q = tl.load(
        Q + rows[:, None] + entries[None, :] * q_strides[3],
        mask=present[:, None] & (entries < D)[None, :],
        other=0.0,
    )
    x_stride, xq = 1, position
    if PLACED:
        x_stride = x_strides[2]
        X += wide(b) * x_strides[0] + h.to(tl.int64) * x_strides[1]
        at = (
            wide(b) * xq_strides[0]
            + h.to(tl.int64) * xq_strides[1]
            + t.to(tl.int64) * xq_strides[2]
        )
        xq = tl.load(XQ + at, mask=present, other=0.0)
    columns = tl.arange(0, KEYS)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    no_lead = tl.zeros((ROWS,), tl.float32)

    row_first, row_end = read_row_ranges(QUERY_RANGE, query_range_strides, b, t, present, S)
    if RANGED:
        first, end = seen_by_any(first, end, row_first, row_end)
    low, high = near_keys(query_start, T, first, end, KEYS)
    # How many blocks lie to either side of these, for rows that may look there.
    left_seen, right_seen = present & (left_sight > 0), present & (right_sight > 0)
    most_left = tl.maximum(low // KEYS - first // KEYS, 0)
    most_left = tl.max(tl.where(left_seen, most_left, 0), 0)
    most_right = tl.maximum(tl.cdiv(end, KEYS) - high // KEYS, 0)
    most_right = tl.max(tl.where(right_seen, most_right, 0), 0)
    left_count, right_count = most_left, most_right
    if CERTIFY:
        wanted_left, wanted_right = preview(left, KEYS), preview(right, KEYS)
        if PLACED:
            wanted_left, wanted_right = offsets * 0 + NEAR_BLOCKS, offsets * 0 + NEAR_BLOCKS
        near_left = tl.max(tl.where(left_seen, wanted_left, 0), 0)
        near_left = tl.minimum(near_left, tl.minimum(most_left, NEAR_BLOCKS))
        near_right = tl.max(tl.where(right_seen, wanted_right, 0), 0)
        near_right = tl.minimum(near_right, tl.minimum(most_right, NEAR_BLOCKS))
        for start in tl.range(
            low - near_left * KEYS, high + near_right * KEYS, KEYS, num_stages=STAGES
        ):
            score, inside = score_block(
                q, K, X, xq, start, position, first, end, row_first, row_end, k_strides, x_stride,
                scale, left, left_sight, right, right_sight, D, PADDED_D, KEYS, HAS_RIGHT,
                HAS_RANGE, RANGED,
            )  # fmt: skip
            new_max = tl.maximum(row_max, tl.max(score, 1))
            pivot = tl.where(new_max == -INF, 0.0, new_max)
            row_sum = row_sum * tl.exp2(row_max - pivot) + tl.sum(
                tl.exp2(score - pivot[:, None]), 1
            )
            row_max = new_max
        q_norm = norm(q.to(tl.float32), D) * tl.abs(scale) * (1 + slack)
        largest = q_norm * tl.load(BOUND + tl.program_id(0)) * (1 + 3 * slack)
        nearest = low - near_left * KEYS - 1
        if RANGED:
            left_seen &= sees_beyond(row_first, row_end, nearest, LEFT)
        left_count = blocks_to_visit(
            largest, left, row_max, row_sum, left_seen, X, xq, x_stride, nearest,
            position - nearest, nearest + 1 - first, near_left, most_left, log_share, slack, KEYS,
            LEFT,
        )  # fmt: skip
        if HAS_RIGHT:
            nearest = high + near_right * KEYS
            if RANGED:
                right_seen &= sees_beyond(row_first, row_end, nearest, RIGHT)
            right_count = blocks_to_visit(
                largest, right, row_max, row_sum, right_seen, X, xq, x_stride, nearest,
                nearest - position, end - nearest, near_right, most_right, log_share, slack, KEYS,
                RIGHT,
            )  # fmt: skip
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)

    low, high = low - left_count * KEYS, high + right_count * KEYS
    total = (high - low) // KEYS
    share = tl.cdiv(total, num_parts)
    for n in tl.range(part * share, tl.minimum((part + 1) * share, total), num_stages=STAGES):
        start = high - (n + 1) * KEYS
        score, inside = score_block(
            q, K, X, xq, start, position, first, end, row_first, row_end, k_strides, x_stride,
            scale, left, left_sight, right, right_sight, D, PADDED_D, KEYS, HAS_RIGHT, HAS_RANGE,
            RANGED,
        )  # fmt: skip
        v = load_block(V, start, columns, inside, v_strides, E, PADDED_E, HAS_RANGE, NEAR)
        acc, row_max, row_sum = add_block(
            score, no_lead, v, acc, row_max, row_sum, offsets, columns, 0, 1.0, False
        )
    rows = (wide(tl.program_id(0)) * num_parts + part) * group * T
    store_rows(PART_OUT + rows * E, offsets, present, acc, E, PADDED_E)
    tl.store(PART_MAX + rows + offsets, row_max, mask=present)
    tl.store(PART_SUM + rows + offsets, row_sum, mask=present)


@triton.jit
def merge_kernel(
    PART_OUT, PART_MAX, PART_SUM, OUT, ROW_MAX, LOG_SUM, LEFT_SLOPES, RIGHT_SLOPES, KEY_RANGE,
    QUERY_START, left_strides, right_strides, range_strides, start_strides, H, G, T, S, num_parts,
    E: tl.constexpr, PADDED_E: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one row; grid B * H * T. Rows lie in the order of OUT [B, H, T, E]."""
    row = wide(tl.program_id(0))
    rows = H // G * T
    entries = tl.arange(0, PADDED_E)
    acc = tl.zeros((PADDED_E,), tl.float32)
    row_max, row_sum = float("-inf"), 0.0
    for part in range(num_parts):
        at = (row // rows * num_parts + part) * rows + row % rows
        part_max = tl.load(PART_MAX + at)
        new_max = tl.maximum(row_max, part_max)
        pivot = tl.where(new_max == -INF, 0.0, new_max)
        keep, add = tl.exp2(row_max - pivot), tl.exp2(part_max - pivot)
        acc = acc * keep + add * tl.load(PART_OUT + at * E + entries, mask=entries < E, other=0.0)
        row_sum = row_sum * keep + add * tl.load(PART_SUM + at)
        row_max = new_max
    empty = row_sum == 0
    out = acc / tl.where(empty, 1.0, row_sum)
    tl.store(OUT + row * E + entries, out.to(OUT.dtype.element_ty), mask=entries < E)
    log_sum = tl.where(empty, -INF, tl.log2(tl.where(empty, 1.0, row_sum)))
    if QUERY_START is not None and not PLACED:
        h, b = tl.program_id(0) // T % H, tl.program_id(0) // T // H
        left, _, right, _ = read_slopes(
            LEFT_SLOPES, RIGHT_SLOPES, left_strides, right_strides, b, h
        )
        first, end = read_range(KEY_RANGE, range_strides, b, h // (H // G), S)
        _, gap = read_start(QUERY_START, start_strides, b, first, end, T, S)
        row_max, log_sum = take_off_bias(row_max, log_sum, gap_bias(gap, left, right))
    tl.store(ROW_MAX + row, row_max)
    tl.store(LOG_SUM + row, log_sum)


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
    tile, rows = call.sizes.decode, H // G * T
    num_blocks = triton.cdiv(S, tile.keys)
    wanted = triton.cdiv(num_processors * PROGRAMS_PER_PROCESSOR, B * G)
    num_parts = max(1, min(wanted, MOST_PARTS, num_blocks // 2))
    options: dict[str, Any] = {"dtype": torch.float32, "device": out.device}
    part_out = torch.empty(B * G, num_parts, rows, E, **options)
    part_max, part_sum = torch.empty(2, B * G, num_parts, rows, **options)
    parts = {"PART_OUT": part_out, "PART_MAX": part_max, "PART_SUM": part_sum}
    decode_kernel[B * G, num_parts](
        **arguments(call), **parts,
        BOUND=call.key_bound if call.tolerance > 0 and num_blocks > 2 else None,
        log_share=log_share(call.tolerance, call.right is not None), slack=slack_of(D),
        **tile._replace(rows=max(tile.rows, padded(rows))).options(),
    )  # fmt: skip
    merge_kernel[B * H * T,](
        **slope_arguments(call), **position_arguments(call), **parts, OUT=out, ROW_MAX=row_max,
        LOG_SUM=log_sum, H=H, G=G, T=T, S=S, num_parts=num_parts, E=E, PADDED_E=padded(E),
        PLACED=call.positions is not None, num_warps=1, **FUSION,
    )  # fmt: skip
