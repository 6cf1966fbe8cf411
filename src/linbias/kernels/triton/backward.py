"""The backward pass, over exactly the keys that forward visited, by its counts: no atomics.

`dq_kernel` goes over the keys of a query tile. `dkv_kernel` goes over the rows between the first
and the last tile that visited its block of keys, and gives keys that a tile did not visit a weight
of 0. Both recompute the scores. Every sum has one owner and one order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import LN2
from linbias.kernels.triton.launch import (
    Call,
    arguments,
    dropout_arguments,
    position_arguments,
    slope_arguments,
)
from linbias.kernels.triton.row_ranges import (
    hide,
    hulls,
    read_row_ranges,
    seen_by_all,
    seen_by_any,
    within,
)
from linbias.kernels.triton.sizes import FUSION, padded
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    LOG2E,
    NEAR,
    RIGHT,
    between,
    beyond,
    cut,
    distance_to,
    drop,
    far_score,
    from_anchor,
    gap_bias,
    head_of,
    key_bias,
    key_hash,
    load_block,
    load_places,
    load_rows,
    my_tile,
    near_keys,
    near_score,
    placed_bias,
    read_range,
    read_slopes,
    read_start,
    row_bias,
    row_hash,
    store_rows,
    wide,
)

SCAN: tl.constexpr = tl.constexpr(1024)
# Key blocks of fewer key/value heads than that are shared out by query heads.
FEWEST_PROGRAMS = 256


@triton.jit
def row_kernel(
    DOUT, OUT, DLSE, ROW_MAX, LOG_SUM, DELTA, PIVOT, LEFT_SLOPES, RIGHT_SLOPES, KEY_RANGE,
    QUERY_START, dout_strides, out_strides, left_strides, right_strides, range_strides,
    start_strides, H, G, T, S, num_tiles, E: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """DELTA = dout . out - dlse and PIVOT [B, H, T]; grid B * H * num_tiles.

    exp2(score - PIVOT) is a weight, inf in a row without keys; in float32 log_sum is apart from
    it.
    """
    PRECISE: tl.constexpr = OUT.dtype.element_ty == tl.float32
    head = tl.program_id(0) // num_tiles
    b, h = head // H, head % H
    start = tl.program_id(0) % num_tiles * ROWS
    offsets = tl.arange(0, ROWS)
    present = start + offsets < T
    rows = wide(head) * T + start
    DOUT = head_of(DOUT, dout_strides, b, h) + wide(start) * dout_strides[2]
    OUT = head_of(OUT, out_strides, b, h) + wide(start) * out_strides[2]
    dout = load_rows(DOUT, offsets, present, dout_strides, E, PADDED_E).to(tl.float32)
    out = load_rows(OUT, offsets, present, out_strides, E, PADDED_E).to(tl.float32)
    # What comes in is the gradient of lse in bits.
    dlse = tl.load(DLSE + rows + offsets, mask=present, other=0.0) * LOG2E
    tl.store(DELTA + rows + offsets, tl.sum(dout * out, 1) - dlse, mask=present)
    log_sum = tl.load(LOG_SUM + rows + offsets, mask=present, other=0.0)
    pivot = tl.load(ROW_MAX + rows + offsets, mask=present, other=0.0)
    if QUERY_START is not None and not PLACED:
        left, _, right, _ = read_slopes(
            LEFT_SLOPES, RIGHT_SLOPES, left_strides, right_strides, b, h
        )
        first, end = read_range(KEY_RANGE, range_strides, b, h // (H // G), S)
        _, gap = read_start(QUERY_START, start_strides, b, first, end, T, S)
        pivot += gap_bias(gap, left, right)
    if not PRECISE:
        pivot += log_sum
    tl.store(PIVOT + rows + offsets, tl.where(log_sum == -INF, INF, pivot), mask=present)


@triton.jit
def load_pivot(PIVOT, LOG_SUM, rows, present, PRECISE: tl.constexpr):
    """PIVOT, inf in absent rows, and what else is to be taken off a score."""
    pivot = tl.load(PIVOT + rows, mask=present, other=float("inf"))
    if PRECISE:
        log_sum = tl.load(LOG_SUM + rows, mask=present, other=0.0)
        return pivot, tl.where(log_sum == -INF, 0.0, log_sum)
    else:
        return pivot, pivot


@triton.jit
def weigh(score, lead, pivot, log_sum, PRECISE: tl.constexpr):
    """The weights of scores that still lack `lead`, unless PRECISE. All broadcast to the shape of
    score.
    """
    if PRECISE:
        return tl.exp2(score - pivot - log_sum)
    else:
        return tl.exp2(score - (lead + pivot))


@triton.jit
def score_gradient(
    weight, dweight, delta, row_hashes, key_hashes, threshold, factor, DROPOUT: tl.constexpr
):
    """The gradients of the scores, and the weights that met the values."""
    dropped = weight
    if DROPOUT:
        dropped = drop(weight, row_hashes, key_hashes, threshold, factor)
        dweight = drop(dweight, row_hashes, key_hashes, threshold, factor)
    return weight * (dweight - delta), dropped


@triton.jit
def visited_keys(
    COUNTS, HULLS, tiles, exists, query_start, first, end, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Where the keys begin and end that forward's tiles visited, by a head's part of VISITED and a
    batch row's of HULLS.
    """
    low, high = near_keys(query_start + tiles * ROWS, ROWS, first, end, KEYS)
    low -= tl.load(COUNTS + 2 * tiles, mask=exists, other=0) * KEYS
    high += tl.load(COUNTS + 2 * tiles + 1, mask=exists, other=0) * KEYS
    if HULLS is not None:
        low = tl.maximum(low, tl.load(HULLS + 4 * tiles, mask=exists, other=0))
        high = tl.minimum(high, tl.load(HULLS + 4 * tiles + 1, mask=exists, other=0))
    return low, high


@triton.jit(do_not_specialize=["threshold"])
def dq_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, KEY_RANGE, QUERY_START, QUERY_RANGE, X, XQ, SEED, DOUT,
    DLSE, DELTA, PIVOT, LOG_SUM, VISITED, DQ, DSLOPES, DXQ, q_strides, k_strides, v_strides,
    dout_strides, left_strides, right_strides, range_strides, start_strides, query_range_strides,
    x_strides, xq_strides,
    B, H, G, T, S, num_tiles, visited_tiles, scale, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FORWARD_ROWS: tl.constexpr, FORWARD_KEYS: tl.constexpr,
):  # fmt: skip
    """Fill DQ [B, H, T, D], unless None DSLOPES [B, H, num_tiles, 2], parts of tiles, and DXQ [B,
    H, T].
    """
    HAS_RIGHT: tl.constexpr = RIGHT_SLOPES is not None
    HAS_RANGE: tl.constexpr = KEY_RANGE is not None
    RANGED: tl.constexpr = QUERY_RANGE is not None
    DROPOUT: tl.constexpr = SEED is not None
    SLOPES: tl.constexpr = DSLOPES is not None
    PLACED: tl.constexpr = X is not None
    PLACES: tl.constexpr = DXQ is not None
    PRECISE: tl.constexpr = Q.dtype.element_ty == tl.float32
    tile, b, h, g = my_tile(num_tiles, B, H, G)
    head = wide(b) * H + h
    first, end = read_range(KEY_RANGE, range_strides, b, g, S)
    query_start, gap = read_start(QUERY_START, start_strides, b, first, end, T, S)
    offsets = tl.arange(0, ROWS)
    start = tile * ROWS
    position = query_start + start
    present = start + offsets < T
    left, left_sight, right, right_sight = read_slopes(
        LEFT_SLOPES, RIGHT_SLOPES, left_strides, right_strides, b, h
    )
    Q = head_of(Q, q_strides, b, h) + wide(start) * q_strides[2]
    DOUT = head_of(DOUT, dout_strides, b, h) + wide(start) * dout_strides[2]
    K, V = head_of(K, k_strides, b, g), head_of(V, v_strides, b, g)
    rows = head * T + start
    q = load_rows(Q, offsets, present, q_strides, D, PADDED_D)
    dout = load_rows(DOUT, offsets, present, dout_strides, E, PADDED_E)
    delta = tl.load(DELTA + rows + offsets, mask=present, other=0.0)
    pivot, log_sum = load_pivot(PIVOT, LOG_SUM, rows + offsets, present, PRECISE)
    row_hashes = row_hash(SEED, head, start + offsets)
    dq = tl.zeros((ROWS, PADDED_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    total_right, share_right = total, total
    columns = tl.arange(0, KEYS)
    if PLACED:
        gap = 0
        X, XQ = head_of(X, x_strides, b, h), head_of(XQ, xq_strides, b, h)
        xq = load_places(XQ, start + offsets, present, xq_strides)
        own = tl.load(XQ + wide(start) * xq_strides[2])
        row_high, row_low = from_anchor(xq, own)

    forward_tile = start // FORWARD_ROWS
    low, high = near_keys(
        query_start + forward_tile * FORWARD_ROWS, FORWARD_ROWS, first, end, FORWARD_KEYS
    )
    counts = VISITED + (head * visited_tiles + forward_tile) * 2
    row_first, row_end = read_row_ranges(
        QUERY_RANGE, query_range_strides, b, start + offsets, present, S
    )
    if RANGED:
        first, end = seen_by_any(first, end, row_first, row_end)
        all_first, all_end = seen_by_all(row_first, row_end)
    moment_left, reach_left = total, total
    moment_right, reach_right = total, total
    for PART in tl.static_range(3):
        if PART != RIGHT or HAS_RIGHT:
            if PART == LEFT:
                slope, begin, stop = left, low - tl.load(counts) * FORWARD_KEYS, low
            elif PART == RIGHT:
                slope, begin, stop = right, high, high + tl.load(counts + 1) * FORWARD_KEYS
            else:
                slope, begin, stop = left, low, high
            if RANGED:
                begin, stop = within(begin, stop, first, end, KEYS)
            row_term = row_bias(offsets, slope, ROWS, PART)
            for block in tl.range(begin, stop, KEYS, num_stages=STAGES):
                keys = block + columns
                inside = (keys >= first) & (keys < end)
                k = load_block(K, block, columns, inside, k_strides, D, PADDED_D, HAS_RANGE, PART)
                v = load_block(V, block, columns, inside, v_strides, E, PADDED_E, HAS_RANGE, PART)
                product = tl.dot(q, tl.trans(k), input_precision="ieee")
                order = (position + offsets)[:, None] - keys[None, :]
                away = order.to(tl.float32)
                if PLACED:
                    x = load_places(X, keys, inside, x_strides)
                if PART == NEAR:
                    if PLACED:
                        key_high, key_low = from_anchor(x, own)
                        away = between(
                            row_high[:, None], row_low[:, None], key_high[None, :],
                            key_low[None, :], order
                        )  # fmt: skip
                    score = near_score(
                        product, order, away, inside[None, :], scale, left, left_sight, right,
                        right_sight, HAS_RIGHT
                    )  # fmt: skip
                    lead = tl.zeros((ROWS,), tl.float32)
                else:
                    if PLACED:
                        anchor = tl.load(
                            X + wide(block + (KEYS - 1 if PART == LEFT else 0)) * x_strides[2]
                        )
                        key_term, lead = placed_bias(x, xq, anchor, slope, PART)
                        away = beyond(anchor, xq, PART)[:, None] + beyond(x, anchor, PART)[None, :]
                        away = away if PART == LEFT else -away
                    else:
                        key_term = key_bias(columns, slope, KEYS, PART)
                        lead = row_term + slope * distance_to(block, position, ROWS, KEYS, PART)
                    key_term = cut(key_term, inside, HAS_RANGE, PART)
                    score = far_score(product, scale, key_term[None, :], lead[:, None], PRECISE)
                if RANGED:
                    if (block < all_first) | (block + KEYS > all_end):
                        score = hide(score, keys[None, :], row_first[:, None], row_end[:, None])
                weight = weigh(score, lead[:, None], pivot[:, None], log_sum[:, None], PRECISE)
                dweight = tl.dot(dout, tl.trans(v), input_precision="ieee")
                dscore, _ = score_gradient(
                    weight, dweight, delta[:, None], row_hashes[:, None],
                    key_hash(SEED, keys)[None, :], threshold, factor, DROPOUT,
                )  # fmt: skip
                dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision="ieee")
                if SLOPES or PLACES:
                    total += tl.sum(dscore, 1)
                if PLACES:
                    if PART != LEFT and HAS_RIGHT:
                        total_right += tl.sum(tl.where(order < 0, dscore, 0.0), 1)
                        share_right += tl.sum(tl.where(order < 0, weight, 0.0), 1)
                if SLOPES:
                    if PART != RIGHT:
                        moment_left += tl.sum(dscore * tl.maximum(away, 0.0), 1)
                        reach_left += tl.sum(weight * tl.maximum(away, 0.0), 1)
                    if PART != LEFT and HAS_RIGHT:
                        moment_right += tl.sum(dscore * tl.maximum(-away, 0.0), 1)
                        reach_right += tl.sum(weight * tl.maximum(-away, 0.0), 1)

    store_rows(DQ + rows * D, offsets, present, dq * (scale * LN2), D, PADDED_D)
    if SLOPES or PLACES:
        # Sums of large terms that cancel: sum dscore differs from dlse by rounding, mostly
        # delta's, of which every dscore has its weight's share. Distances lack the gap.
        dlse = tl.load(DLSE + rows + offsets, mask=present, other=0.0) * LOG2E
        dlse = tl.where(pivot == INF, 0.0, dlse)
        error = tl.where(pivot == INF, 0.0, total - dlse)
    if PLACES:
        # The weights of a row that saw a key are 1 together, and so its dscore is dlse.
        to_right = total_right - error * share_right
        tl.store(
            DXQ + rows + offsets, (right * to_right - left * (dlse - to_right)) * LN2, mask=present
        )
    if SLOPES:
        gap_left, gap_right = tl.maximum(gap, 0).to(tl.float32), tl.maximum(-gap, 0).to(tl.float32)
        to = DSLOPES + (head * num_tiles + tile) * 2
        tl.store(to, -tl.sum(moment_left - error * reach_left + gap_left * dlse, 0))
        tl.store(to + 1, -tl.sum(moment_right - error * reach_right + gap_right * dlse, 0))


@triton.jit
def tiles_that_visited(
    COUNTS, HULLS, s, query_start, first, end, num_tiles, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """The first and one past the last forward tile that visited any of the keys s .. s + BLOCK -
    1.
    """
    lowest, highest = num_tiles, 0
    for start in range(0, num_tiles, SCAN):
        tiles = start + tl.arange(0, SCAN)
        exists = tiles < num_tiles
        low, high = visited_keys(COUNTS, HULLS, tiles, exists, query_start, first, end, ROWS, KEYS)
        visited = exists & (low < s + BLOCK) & (high > s)
        lowest = tl.minimum(lowest, tl.min(tl.where(visited, tiles, num_tiles), 0))
        highest = tl.maximum(highest, tl.max(tl.where(visited, tiles + 1, 0), 0))
    return lowest, highest


@triton.jit(do_not_specialize=["threshold"])
def dkv_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, KEY_RANGE, QUERY_START, QUERY_RANGE, X, XQ, SEED, DOUT,
    DELTA, PIVOT, LOG_SUM, VISITED, HULLS, DK, DV, DX, q_strides, k_strides, v_strides,
    dout_strides, left_strides, right_strides, range_strides, start_strides, query_range_strides,
    x_strides, xq_strides,
    B, H, G, T, S, num_blocks, num_tiles, visited_tiles, scale, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FORWARD_ROWS: tl.constexpr, FORWARD_KEYS: tl.constexpr,
):  # fmt: skip
    """Fill DK and DV [parts, B, G, S, size], unless None DX [B, H, S]; grid (num_blocks * B * G,
    parts).

    A part has a share of the query heads that read the block. Scores lie across: [keys, rows].
    """
    HAS_RIGHT: tl.constexpr = RIGHT_SLOPES is not None
    DROPOUT: tl.constexpr = SEED is not None
    PRECISE: tl.constexpr = Q.dtype.element_ty == tl.float32
    PLACED: tl.constexpr = X is not None
    PLACES: tl.constexpr = DX is not None
    RANGED: tl.constexpr = QUERY_RANGE is not None
    block, b, g, _ = my_tile(num_blocks, B, G, G)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    first, end = read_range(KEY_RANGE, range_strides, b, g, S)
    query_start, _ = read_start(QUERY_START, start_strides, b, first, end, T, S)
    s = block * KEYS
    columns, offsets = tl.arange(0, KEYS), tl.arange(0, ROWS)
    keys = s + columns
    inside = (keys >= first) & (keys < end)
    K = head_of(K, k_strides, b, g) + wide(s) * k_strides[2]
    V = head_of(V, v_strides, b, g) + wide(s) * v_strides[2]
    k = load_rows(K, columns, inside, k_strides, D, PADDED_D)
    v = load_rows(V, columns, inside, v_strides, E, PADDED_E)
    key_hashes = key_hash(SEED, keys)[:, None]
    dk = tl.zeros((KEYS, PADDED_D), tl.float32)
    dv = tl.zeros((KEYS, PADDED_E), tl.float32)
    if RANGED:
        HULLS += wide(b) * num_tiles * 4
    share = H // G // num_parts
    for h in range(g * (H // G) + part * share, g * (H // G) + (part + 1) * share):
        head = wide(b) * H + h
        left, left_sight, right, right_sight = read_slopes(
            LEFT_SLOPES, RIGHT_SLOPES, left_strides, right_strides, b, h
        )
        if PLACED:
            x_head, xq_head = head_of(X, x_strides, b, h), head_of(XQ, xq_strides, b, h)
            x = load_places(x_head, keys, inside, x_strides)
            low_key, high_key = tl.maximum(s, first), tl.minimum(s + KEYS, end) - 1
            low_x = load_places(x_head, low_key, low_key <= high_key, x_strides)
            high_x = load_places(x_head, high_key, low_key <= high_key, x_strides)
            dx = tl.zeros((KEYS,), tl.float32)
        counts = VISITED + head * visited_tiles * 2
        lowest, highest = tiles_that_visited(
            counts, HULLS, s, query_start, first, end, num_tiles, FORWARD_ROWS, FORWARD_KEYS, KEYS
        )
        lowest, highest = lowest * FORWARD_ROWS, highest * FORWARD_ROWS
        # Rows at the block's own positions: keys may lie on either side of them.
        mixed_low = tl.maximum(s - query_start, 0) // ROWS * ROWS
        mixed_low = tl.minimum(tl.maximum(mixed_low, lowest), highest)
        mixed_high = tl.cdiv(tl.maximum(s + KEYS - query_start, 0), ROWS) * ROWS
        mixed_high = tl.minimum(tl.maximum(mixed_high, mixed_low), highest)
        for PART in tl.static_range(3):
            if PART != RIGHT or HAS_RIGHT:
                if PART == LEFT:
                    slope, sight, begin, stop = left, left_sight, mixed_high, highest
                elif PART == RIGHT:
                    slope, sight, begin, stop = right, right_sight, lowest, mixed_low
                else:
                    slope, sight, stop = left, left_sight, mixed_high
                    begin = mixed_low if HAS_RIGHT else lowest
                row_term = row_bias(offsets, slope, ROWS, PART)
                for start in tl.range(begin, stop, ROWS, num_stages=STAGES):
                    position = query_start + start
                    low, high = visited_keys(
                        counts, HULLS, start // FORWARD_ROWS, True, query_start, first, end,
                        FORWARD_ROWS, FORWARD_KEYS
                    )  # fmt: skip
                    visible = inside & (keys >= low) & (keys < high)
                    present = start + offsets < T
                    rows = head * T + start + offsets
                    q_rows = head_of(Q, q_strides, b, h) + wide(start) * q_strides[2]
                    dout_rows = head_of(DOUT, dout_strides, b, h) + wide(start) * dout_strides[2]
                    q = load_rows(q_rows, offsets, present, q_strides, D, PADDED_D)
                    dout = load_rows(dout_rows, offsets, present, dout_strides, E, PADDED_E)
                    delta = tl.load(DELTA + rows, mask=present, other=0.0)
                    pivot, log_sum = load_pivot(PIVOT, LOG_SUM, rows, present, PRECISE)
                    product = tl.dot(k, tl.trans(q), input_precision="ieee")
                    order = (position + offsets)[None, :] - keys[:, None]
                    if PLACED:
                        xq = load_places(xq_head, start + offsets, present, xq_strides)
                    if PART == NEAR:
                        distance = order.to(tl.float32)
                        if PLACED:
                            row_high, row_low = from_anchor(xq, low_x)
                            key_high, key_low = from_anchor(x, low_x)
                            distance = between(
                                row_high[None, :], row_low[None, :], key_high[:, None],
                                key_low[:, None], order
                            )  # fmt: skip
                        score = near_score(
                            product, order, distance, visible[:, None], scale, left, left_sight,
                            right, right_sight, HAS_RIGHT
                        )  # fmt: skip
                        lead = tl.zeros((ROWS,), tl.float32)
                    else:
                        if PLACED:
                            anchor = high_x if PART == LEFT else low_x
                            key_term, lead = placed_bias(x, xq, anchor, slope, PART)
                        else:
                            key_term = key_bias(columns, slope, KEYS, PART)
                            lead = row_term + slope * distance_to(s, position, ROWS, KEYS, PART)
                        # Rows of a near tile may lie next to keys on a side that is hidden.
                        key_term = tl.where(visible & (sight > 0), key_term, INF)
                        score = far_score(
                            product, scale, key_term[:, None], lead[None, :], PRECISE
                        )
                    if RANGED:
                        row_first, row_end = read_row_ranges(
                            QUERY_RANGE, query_range_strides, b, start + offsets, present, S
                        )
                        hull = HULLS + start // FORWARD_ROWS * 4
                        if (s < tl.load(hull + 2)) | (s + KEYS > tl.load(hull + 3)):
                            score = hide(
                                score, keys[:, None], row_first[None, :], row_end[None, :]
                            )
                    weight = weigh(score, lead[None, :], pivot[None, :], log_sum[None, :], PRECISE)
                    dweight = tl.dot(v, tl.trans(dout), input_precision="ieee")
                    row_hashes = row_hash(SEED, head, start + offsets)[None, :]
                    dscore, dropped = score_gradient(
                        weight, dweight, delta[None, :], row_hashes, key_hashes, threshold, factor,
                        DROPOUT
                    )  # fmt: skip
                    dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee")
                    dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee")
                    if PLACES:
                        dx += tl.sum(tl.where(order < 0, -right, left) * dscore, 1)
        if PLACES:
            tl.store(DX + head * S + keys, dx * LN2, mask=keys < S)
    to = ((wide(part) * B + b) * G + g) * S + s
    exists = keys < S
    store_rows(DK + to * D, columns, exists, dk * (scale * LN2), D, PADDED_D)
    store_rows(DV + to * E, columns, exists, dv, E, PADDED_E)


def num_parts(programs: int, group_size: int) -> int:
    """Parts of dk and dv: the least divisor of the group's size that gives work to a whole GPU."""
    divisors = (n for n in range(1, group_size + 1) if group_size % n == 0)
    return next((n for n in divisors if n * programs >= FEWEST_PROGRAMS), group_size)


def backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    visited: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dleft: Tensor | None,
    dright: Tensor | None,
    dpositions: Tensor | None = None,
    dquery_positions: Tensor | None = None,
) -> None:
    """Fill the gradients that are not None, contiguous and, but for dq, zeroed.

    dlse: of lse in bits, contiguous. out, row_max, log_sum, visited: what `forward` filled.
    """
    B, H, G, T, S, _, E = call.lengths
    if B * H * T == 0:
        return
    sizes, rows = call.sizes, 64
    delta, pivot = torch.empty_like(row_max), torch.empty_like(row_max)
    row_tiles = triton.cdiv(T, rows)
    row_kernel[B * H * row_tiles,](
        **slope_arguments(call), **position_arguments(call), DOUT=dout, OUT=out, DLSE=dlse,
        ROW_MAX=row_max, LOG_SUM=log_sum, DELTA=delta, PIVOT=pivot, dout_strides=dout.stride(),
        out_strides=out.stride(), H=H, G=G, T=T, S=S, num_tiles=row_tiles, E=E, PADDED_E=padded(E),
        ROWS=rows, PLACED=call.positions is not None, **FUSION,
    )  # fmt: skip
    shared: dict[str, Any] = {
        **arguments(call), **dropout_arguments(call), "B": B, "DOUT": dout,
        "dout_strides": dout.stride(), "DELTA": delta, "PIVOT": pivot, "LOG_SUM": log_sum,
        "VISITED": visited, "visited_tiles": visited.shape[2], "FORWARD_ROWS": sizes.forward.rows,
        "FORWARD_KEYS": sizes.forward.keys,
    }  # fmt: skip
    num_tiles = triton.cdiv(T, sizes.dq.rows)
    parts = None if dleft is None else delta.new_empty(B, H, num_tiles, 2)
    dq_kernel[num_tiles * B * H,](
        **shared,
        DLSE=dlse,
        DQ=dq,
        DSLOPES=parts,
        DXQ=dquery_positions,
        num_tiles=num_tiles,
        **sizes.dq.options(),
    )
    num_blocks = triton.cdiv(S, sizes.dkv.keys)
    if num_blocks:
        cuts = num_parts(num_blocks * B * G, H // G)
        part_dk, part_dv = (x if cuts == 1 else delta.new_empty(cuts, *x.shape) for x in (dk, dv))
        dkv_kernel[num_blocks * B * G, cuts](
            **shared, HULLS=hulls(call, sizes.forward.rows), DK=part_dk, DV=part_dv, DX=dpositions,
            num_blocks=num_blocks, num_tiles=triton.cdiv(T, sizes.forward.rows),
            **sizes.dkv.options(),
        )  # fmt: skip
        if cuts > 1:
            dk.copy_(part_dk.sum(0))
            dv.copy_(part_dv.sum(0))
    for side, gradient in enumerate((dleft, dright)):
        if parts is not None and gradient is not None:
            gradient.copy_(parts[..., side].sum(-1, dtype=torch.float64))
