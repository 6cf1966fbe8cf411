"""The backward pass, over exactly the keys that forward visited: dq by query tile, dk and dv by key block, no atomics.

Forward's trip counts say for each of its tiles which keys it visited, one range. `dq_kernel` walks the same range; it also sums
what the slopes need. `dkv_kernel` turns the question round: it looks up the first and the last tile that visited its
block (a scan of the counts, eight bytes a tile), walks the query rows from one to the other, and gives keys that a tile
did not visit a weight of 0. Both recompute the scores: 7 products for forward's 2.
Deterministic: every sum has one owner and one order. Shapes and dtypes as forward's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import LN2, padded
from linbias.kernels.triton.forward import dropout_numbers, precise, slope_strides
from linbias.kernels.triton.sizes import FUSION, Sizes
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    LOG2E,
    NEAR,
    RIGHT,
    cut,
    drop,
    far_score,
    gap,
    key_bias,
    key_hash,
    key_limits,
    load_block,
    load_rows,
    my_tile,
    near_keys,
    near_score,
    read_slopes,
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
    DOUT, OUT, DLSE, ROW_MAX, LOG_SUM, DELTA, PIVOT, dout_b, dout_h, dout_t, dout_e, H, T, num_tiles,
    E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """What backward needs of every row; grid B * H * num_tiles.

    DELTA [B, H, T] = dout . out - dlse. PIVOT [B, H, T], so that exp2(score - PIVOT) is a weight: lse in bits, or inf in a
    row that saw no key; with PRECISE it leaves out log_sum, which is worth taking off on its own in float32.
    """
    head = tl.program_id(0) // num_tiles
    b, h = head // H, head % H
    start = tl.program_id(0) % num_tiles * ROWS
    offsets = tl.arange(0, ROWS)
    present = start + offsets < T
    rows = wide(head) * T + start
    DOUT += wide(b) * dout_b + wide(h) * dout_h + wide(start) * dout_t
    dout = load_rows(DOUT, offsets, present, dout_t, dout_e, E, PADDED_E).to(tl.float32)
    out = load_rows(OUT + rows * E, offsets, present, E, 1, E, PADDED_E).to(tl.float32)
    # What comes in is the gradient of lse in bits.
    dlse = tl.load(DLSE + rows + offsets, mask=present, other=0.0) * LOG2E
    tl.store(DELTA + rows + offsets, tl.sum(dout * out, 1) - dlse, mask=present)
    log_sum = tl.load(LOG_SUM + rows + offsets, mask=present, other=0.0)
    pivot = tl.load(ROW_MAX + rows + offsets, mask=present, other=0.0)
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
    """The weights of scores that still lack `lead`, unless PRECISE. All broadcast to the shape of score."""
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


@triton.jit(do_not_specialize=["threshold"])
def dq_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, RANGE, SEED, DOUT, DLSE, DELTA, PIVOT, LOG_SUM, VISITED, DQ, DSLOPES,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, left_b, left_h, right_b, right_h,
    dout_b, dout_h, dout_t, dout_e, B, H, G, T, S, num_tiles, visited_tiles,
    scale, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FORWARD_ROWS: tl.constexpr, FORWARD_KEYS: tl.constexpr, PRECISE: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, DROPOUT: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Fill DQ [B, H, T, D], and with SLOPES the tile's part of the slope gradients, DSLOPES [B, H, num_tiles, 2]; 1-D grid."""
    tile, b, h, g = my_tile(num_tiles, B, H, G)
    head = wide(b) * H + h
    first, end = key_limits(RANGE, b, S, HAS_RANGE)
    offsets = tl.arange(0, ROWS)
    start = tile * ROWS
    position = start + end - T
    present = start + offsets < T
    left, left_sight, right, right_sight = read_slopes(
        LEFT_SLOPES, RIGHT_SLOPES, b * left_b + h * left_h, b * right_b + h * right_h, HAS_RIGHT
    )
    Q += wide(b) * q_b + wide(h) * q_h + wide(start) * q_t
    DOUT += wide(b) * dout_b + wide(h) * dout_h + wide(start) * dout_t
    K += wide(b) * k_b + wide(g) * k_h
    V += wide(b) * v_b + wide(g) * v_h
    rows = head * T + start
    q = load_rows(Q, offsets, present, q_t, q_d, D, PADDED_D)
    dout = load_rows(DOUT, offsets, present, dout_t, dout_e, E, PADDED_E)
    delta = tl.load(DELTA + rows + offsets, mask=present, other=0.0)
    pivot, log_sum = load_pivot(PIVOT, LOG_SUM, rows + offsets, present, PRECISE)
    row_hashes = row_hash(SEED, head, start + offsets, DROPOUT)
    dq = tl.zeros((ROWS, PADDED_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    columns = tl.arange(0, KEYS)

    forward_tile = start // FORWARD_ROWS
    low, high = near_keys(
        forward_tile * FORWARD_ROWS + end - T, first, end, FORWARD_ROWS, FORWARD_KEYS
    )
    counts = VISITED + (head * visited_tiles + forward_tile) * 2
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
            row_term = row_bias(offsets, slope, ROWS, PART)
            for block in tl.range(begin, stop, KEYS, num_stages=STAGES):
                keys = block + columns
                inside = (keys >= first) & (keys < end)
                k = load_block(K, block, columns, inside, k_s, k_d, D, PADDED_D, HAS_RANGE, PART)
                v = load_block(V, block, columns, inside, v_s, v_d, E, PADDED_E, HAS_RANGE, PART)
                product = tl.dot(q, tl.trans(k), input_precision="ieee")
                distance = (position + offsets)[:, None] - keys[None, :]
                if PART == NEAR:
                    score = near_score(
                        product, distance, inside[None, :], scale, left, left_sight, right, right_sight, HAS_RIGHT
                    )  # fmt: skip
                    lead = tl.zeros((ROWS,), tl.float32)
                else:
                    key_term = cut(key_bias(columns, slope, KEYS, PART), inside, HAS_RANGE, PART)
                    lead = row_term + slope * gap(position, block, ROWS, KEYS, PART)
                    score = far_score(product, scale, key_term[None, :], lead[:, None], PRECISE)
                weight = weigh(score, lead[:, None], pivot[:, None], log_sum[:, None], PRECISE)
                dweight = tl.dot(dout, tl.trans(v), input_precision="ieee")
                dscore, _ = score_gradient(
                    weight, dweight, delta[:, None], row_hashes[:, None], key_hash(keys)[None, :],
                    threshold, factor, DROPOUT,
                )  # fmt: skip
                dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision="ieee")
                if SLOPES:
                    away = distance.to(tl.float32)
                    total += tl.sum(dscore, 1)
                    if PART != RIGHT:
                        moment_left += tl.sum(dscore * tl.maximum(away, 0.0), 1)
                        reach_left += tl.sum(weight * tl.maximum(away, 0.0), 1)
                    if PART != LEFT and HAS_RIGHT:
                        moment_right += tl.sum(dscore * tl.maximum(-away, 0.0), 1)
                        reach_right += tl.sum(weight * tl.maximum(-away, 0.0), 1)

    store_rows(DQ + rows * D, offsets, present, dq * (scale * LN2), D, PADDED_D)
    if SLOPES:
        # Sums of large terms that cancel: what makes sum dscore differ from dlse is rounding, mostly delta's, and every
        # dscore carries its weight's share of it.
        dlse = tl.load(DLSE + rows + offsets, mask=present, other=0.0) * LOG2E
        error = tl.where(pivot == INF, 0.0, total - dlse)
        to = DSLOPES + (head * num_tiles + tile) * 2
        tl.store(to, -tl.sum(moment_left - error * reach_left, 0))
        tl.store(to + 1, -tl.sum(moment_right - error * reach_right, 0))


@triton.jit
def looking_tiles(
    VISITED,
    s,
    end,
    position,
    first,
    num_tiles,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first and one past the last forward tile that visited any of the keys s .. s + BLOCK - 1; position is row 0's."""
    lowest, highest = num_tiles, 0
    for start in range(0, num_tiles, SCAN):
        tiles = start + tl.arange(0, SCAN)
        inside = tiles < num_tiles
        low, high = near_keys(position + tiles * ROWS, first, end, ROWS, KEYS)
        low -= tl.load(VISITED + 2 * tiles, mask=inside, other=0) * KEYS
        high += tl.load(VISITED + 2 * tiles + 1, mask=inside, other=0) * KEYS
        looked = inside & (low < s + BLOCK) & (high > s)
        lowest = tl.minimum(lowest, tl.min(tl.where(looked, tiles, num_tiles), 0))
        highest = tl.maximum(highest, tl.max(tl.where(looked, tiles + 1, 0), 0))
    return lowest, highest


@triton.jit(do_not_specialize=["threshold"])
def dkv_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, RANGE, SEED, DOUT, DELTA, PIVOT, LOG_SUM, VISITED, DK, DV,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, left_b, left_h, right_b, right_h,
    dout_b, dout_h, dout_t, dout_e, B, H, G, T, S, num_blocks, num_tiles, visited_tiles,
    scale, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FORWARD_ROWS: tl.constexpr, FORWARD_KEYS: tl.constexpr, PRECISE: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Fill DK [parts, B, G, S, D] and DV [parts, B, G, S, E]; grid (num_blocks * B * G, parts). Scores lie across: [keys, rows].

    A part has a share of the query heads that read the block, one after the other.
    """
    block, b, g, _ = my_tile(num_blocks, B, G, G)
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    first, end = key_limits(RANGE, b, S, HAS_RANGE)
    shift = end - T
    s = block * KEYS
    columns, offsets = tl.arange(0, KEYS), tl.arange(0, ROWS)
    keys = s + columns
    inside = (keys >= first) & (keys < end)
    K += wide(b) * k_b + wide(g) * k_h + wide(s) * k_s
    V += wide(b) * v_b + wide(g) * v_h + wide(s) * v_s
    k = load_rows(K, columns, inside, k_s, k_d, D, PADDED_D)
    v = load_rows(V, columns, inside, v_s, v_d, E, PADDED_E)
    key_hashes = key_hash(keys)[:, None]
    dk = tl.zeros((KEYS, PADDED_D), tl.float32)
    dv = tl.zeros((KEYS, PADDED_E), tl.float32)
    share = H // G // num_parts
    for h in range(g * (H // G) + part * share, g * (H // G) + (part + 1) * share):
        head = wide(b) * H + h
        left, left_sight, right, right_sight = read_slopes(
            LEFT_SLOPES,
            RIGHT_SLOPES,
            b * left_b + h * left_h,
            b * right_b + h * right_h,
            HAS_RIGHT,
        )
        counts = VISITED + head * visited_tiles * 2
        lowest, highest = looking_tiles(
            counts, s, end, shift, first, num_tiles, FORWARD_ROWS, FORWARD_KEYS, KEYS
        )
        lowest, highest = lowest * FORWARD_ROWS, highest * FORWARD_ROWS
        # Rows at the block's own positions: keys may lie on either side of them.
        mixed_low = tl.minimum(
            tl.maximum(tl.maximum(s - shift, 0) // ROWS * ROWS, lowest), highest
        )
        mixed_high = tl.cdiv(tl.maximum(s + KEYS - shift, 0), ROWS) * ROWS
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
                    tile = start // FORWARD_ROWS
                    low, high = near_keys(
                        tile * FORWARD_ROWS + shift, first, end, FORWARD_ROWS, FORWARD_KEYS
                    )
                    low -= tl.load(counts + 2 * tile) * FORWARD_KEYS
                    high += tl.load(counts + 2 * tile + 1) * FORWARD_KEYS
                    visible = inside & (keys >= low) & (keys < high)
                    present = start + offsets < T
                    rows = head * T + start + offsets
                    q = load_rows(
                        Q + wide(b) * q_b + wide(h) * q_h + wide(start) * q_t,
                        offsets, present, q_t, q_d, D, PADDED_D,
                    )  # fmt: skip
                    dout = load_rows(
                        DOUT + wide(b) * dout_b + wide(h) * dout_h + wide(start) * dout_t,
                        offsets, present, dout_t, dout_e, E, PADDED_E,
                    )  # fmt: skip
                    delta = tl.load(DELTA + rows, mask=present, other=0.0)
                    pivot, log_sum = load_pivot(PIVOT, LOG_SUM, rows, present, PRECISE)
                    product = tl.dot(k, tl.trans(q), input_precision="ieee")
                    if PART == NEAR:
                        distance = (start + shift + offsets)[None, :] - keys[:, None]
                        score = near_score(
                            product, distance, visible[:, None], scale, left, left_sight, right, right_sight, HAS_RIGHT
                        )  # fmt: skip
                        lead = tl.zeros((ROWS,), tl.float32)
                    else:
                        # Rows of a near tile may lie next to keys on a side that is hidden.
                        key_term = tl.where(
                            visible & (sight > 0), key_bias(columns, slope, KEYS, PART), INF
                        )
                        lead = row_term + slope * gap(start + shift, s, ROWS, KEYS, PART)
                        score = far_score(
                            product, scale, key_term[:, None], lead[None, :], PRECISE
                        )
                    weight = weigh(score, lead[None, :], pivot[None, :], log_sum[None, :], PRECISE)
                    dweight = tl.dot(v, tl.trans(dout), input_precision="ieee")
                    row_hashes = row_hash(SEED, head, start + offsets, DROPOUT)[None, :]
                    dscore, dropped = score_gradient(
                        weight, dweight, delta[None, :], row_hashes, key_hashes, threshold, factor, DROPOUT
                    )  # fmt: skip
                    dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee")
                    dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee")
    to = ((wide(part) * B + b) * G + g) * S + s
    exists = keys < S
    store_rows(DK + to * D, columns, exists, dk * (scale * LN2), D, PADDED_D)
    store_rows(DV + to * E, columns, exists, dv, E, PADDED_E)


def num_parts(programs: int, group_size: int) -> int:
    """Into how many parts dk and dv are cut: a divisor of the group's size, the least that gives work to a whole GPU."""
    divisors = (n for n in range(1, group_size + 1) if group_size % n == 0)
    return next((n for n in divisors if n * programs >= FEWEST_PROGRAMS), group_size)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    key_range: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    sizes: Sizes,
    dout: Tensor,
    dlse: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    dslopes: tuple[Tensor, Tensor] | None,
) -> None:
    """Fill dq, dk and dv, and dleft and dright [B, H], float32, where asked for.

    Args:
        seed: [], int64, on the device; None without dropout.
        dlse: [B, H, T], the gradient of lse in bits, contiguous.
        saved: What `forward` filled.
        gradients: dq, dk, dv, contiguous; dk and dv zeroed.
        dslopes: dleft and dright, zeroed, or None to leave them out.
    """
    (B, H, T, D), (G, S), E = q.shape, k.shape[1:3], v.shape[3]
    if B * H * T == 0:
        return
    out, row_max, log_sum, visited = saved
    dq, dk, dv = gradients
    delta, pivot = torch.empty_like(row_max), torch.empty_like(row_max)
    rows = 64
    row_tiles = triton.cdiv(T, rows)
    row_kernel[B * H * row_tiles,](
        dout, out, dlse, row_max, log_sum, delta, pivot, *dout.stride(), H, T, row_tiles,
        E=E, PADDED_E=padded(E), ROWS=rows, PRECISE=precise(q), **FUSION,
    )  # fmt: skip
    num_tiles = triton.cdiv(T, sizes.dq.rows)
    parts = None if dslopes is None else delta.new_empty(B, H, num_tiles, 2)
    strides = (
        *q.stride(), *k.stride(), *v.stride(), *slope_strides(left), *slope_strides(right), *dout.stride(), B, H, G, T, S,
    )  # fmt: skip
    numbers = scale * LOG2E.value, *dropout_numbers(dropout)
    constants = {
        "D": D, "E": E, "PADDED_D": padded(D), "PADDED_E": padded(E), "HAS_RIGHT": right is not None,
        "HAS_RANGE": key_range is not None, "DROPOUT": dropout > 0, "PRECISE": precise(q),
        "FORWARD_ROWS": sizes.forward.rows, "FORWARD_KEYS": sizes.forward.keys,
    }  # fmt: skip
    arrays = q, k, v, left, right, key_range, seed, dout
    dq_kernel[num_tiles * B * H,](
        *arrays, dlse, delta, pivot, log_sum, visited, dq, parts, *strides, num_tiles, visited.shape[2], *numbers,
        **constants, **sizes.dq.options(), SLOPES=dslopes is not None,
    )  # fmt: skip
    num_blocks = triton.cdiv(S, sizes.dkv.keys)
    if num_blocks:
        cuts = num_parts(num_blocks * B * G, H // G)
        part_dk, part_dv = (
            x if cuts == 1 else torch.empty(cuts, *x.shape, dtype=torch.float32, device=x.device) for x in (dk, dv)
        )  # fmt: skip
        dkv_kernel[num_blocks * B * G, cuts](
            *arrays, delta, pivot, log_sum, visited, part_dk, part_dv, *strides, num_blocks,
            triton.cdiv(T, sizes.forward.rows), visited.shape[2], *numbers, **constants, **sizes.dkv.options(),
        )  # fmt: skip
        if cuts > 1:
            dk.copy_(part_dk.sum(0))
            dv.copy_(part_dv.sum(0))
    if dslopes is not None and parts is not None:
        for side, gradient in enumerate(dslopes):
            gradient.copy_(parts[..., side].sum(-1, dtype=torch.float64))
