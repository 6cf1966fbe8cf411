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

from linbias.triton.certificate import LN2, padded
from linbias.triton.forward import dropout_numbers, slope_strides
from linbias.triton.sizes import FUSION, Sizes
from linbias.triton.tile import (
    INF,
    LEFT,
    LOG2E,
    RIGHT,
    drop,
    far_terms,
    key_hash,
    key_limits,
    load_rows,
    near_keys,
    near_score,
    read_slope,
    row_hash,
    store_rows,
    wide,
)

NEAR: tl.constexpr = tl.constexpr(2)  # after LEFT and RIGHT
SCAN: tl.constexpr = tl.constexpr(1024)


@triton.jit
def delta_kernel(
    DOUT, OUT, DLSE, DELTA, dout_b, dout_h, dout_t, dout_e, H, T,
    E: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """DELTA [B, H, T] = dout . out - dlse; grid (B * H, tiles)."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.program_id(1) * ROWS
    offsets = tl.arange(0, ROWS)
    present = start + offsets < T
    rows = tl.program_id(0).to(tl.int64) * T + start
    DOUT += b.to(tl.int64) * dout_b + wide(h) * dout_h + wide(start) * dout_t
    dout = load_rows(DOUT, offsets, present, dout_t, dout_e, E, PADDED_E).to(tl.float32)
    out = load_rows(OUT + rows * E, offsets, present, E, 1, E, PADDED_E).to(tl.float32)
    # What comes in is the gradient of lse in bits.
    dlse = tl.load(DLSE + rows + offsets, mask=present, other=0.0) * LOG2E
    tl.store(DELTA + rows + offsets, tl.sum(dout * out, 1) - dlse, mask=present)


@triton.jit
def load_pivot(ROW_MAX, LOG_SUM, rows, present):
    """Row maximum and log of the sum, so that exp2(score - both) is the weight: 0 in a row that saw no key."""
    row_max = tl.load(ROW_MAX + rows, mask=present, other=float("-inf"))
    log_sum = tl.load(LOG_SUM + rows, mask=present, other=float("-inf"))
    empty = log_sum == -INF
    return tl.where(empty, INF, row_max), tl.where(empty, 0.0, log_sum)


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


@triton.jit(do_not_specialize=["seed", "threshold"])
def dq_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, RANGE, DOUT, DLSE, DELTA, ROW_MAX, LOG_SUM, VISITED, DQ, DSLOPES,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, left_b, left_h, right_b, right_h,
    dout_b, dout_h, dout_t, dout_e, B, H, G, T, S, num_tiles, visited_tiles,
    scale, seed, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FORWARD_ROWS: tl.constexpr, FORWARD_KEYS: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, DROPOUT: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Fill DQ [B, H, T, D], and with SLOPES the tile's part of the slope gradients, DSLOPES [B, H, num_tiles, 2]; 1-D grid."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, h, b = index % num_tiles, index // num_tiles // B, index // num_tiles % B
    g = h // (H // G)
    head = b.to(tl.int64) * H + h
    first, end = key_limits(RANGE, b, S, HAS_RANGE)
    offsets = tl.arange(0, ROWS)
    start = tile * ROWS
    position = start + end - T
    present = start + offsets < T
    left, left_hidden = read_slope(tl.load(LEFT_SLOPES + b * left_b + h * left_h))
    right, right_hidden = read_slope(tl.full((), float("inf"), tl.float32))
    if HAS_RIGHT:
        right, right_hidden = read_slope(tl.load(RIGHT_SLOPES + b * right_b + h * right_h))
    Q += b.to(tl.int64) * q_b + wide(h) * q_h + wide(start) * q_t
    DOUT += b.to(tl.int64) * dout_b + wide(h) * dout_h + wide(start) * dout_t
    K += b.to(tl.int64) * k_b + g.to(tl.int64) * k_h
    V += b.to(tl.int64) * v_b + g.to(tl.int64) * v_h
    rows = head * T + start
    q = load_rows(Q, offsets, present, q_t, q_d, D, PADDED_D)
    dout = load_rows(DOUT, offsets, present, dout_t, dout_e, E, PADDED_E)
    delta = tl.load(DELTA + rows + offsets, mask=present, other=0.0)
    row_max, log_sum = load_pivot(ROW_MAX, LOG_SUM, rows + offsets, present)
    row_hashes = row_hash(seed, head, start + offsets)
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
            for block in tl.range(begin, stop, KEYS, num_stages=STAGES):
                keys = block + columns
                inside = (keys >= first) & (keys < end)
                k = load_rows(K + wide(block) * k_s, columns, inside, k_s, k_d, D, PADDED_D)
                v = load_rows(V + wide(block) * v_s, columns, inside, v_s, v_d, E, PADDED_E)
                product = tl.dot(q, tl.trans(k), input_precision="ieee")
                distance = ((position + offsets)[:, None] - keys[None, :]).to(tl.float32)
                if PART == NEAR:
                    score = near_score(
                        product,
                        distance,
                        inside[None, :],
                        scale,
                        left,
                        left_hidden,
                        right,
                        right_hidden,
                    )
                else:
                    row_term, key_term = far_terms(
                        offsets, keys, inside, position, slope, ROWS, PART
                    )
                    score = product * scale - key_term[None, :] - row_term[:, None]
                weight = tl.exp2(score - row_max[:, None] - log_sum[:, None])
                dweight = tl.dot(dout, tl.trans(v), input_precision="ieee")
                dscore, _ = score_gradient(
                    weight, dweight, delta[:, None], row_hashes[:, None], key_hash(keys)[None, :],
                    threshold, factor, DROPOUT,
                )  # fmt: skip
                dq = tl.dot(dscore.to(k.dtype), k, dq, input_precision="ieee")
                if SLOPES:
                    total += tl.sum(dscore, 1)
                    if PART != RIGHT:
                        moment_left += tl.sum(dscore * tl.maximum(distance, 0.0), 1)
                        reach_left += tl.sum(weight * tl.maximum(distance, 0.0), 1)
                    if PART != LEFT and HAS_RIGHT:
                        moment_right += tl.sum(dscore * tl.maximum(-distance, 0.0), 1)
                        reach_right += tl.sum(weight * tl.maximum(-distance, 0.0), 1)

    store_rows(DQ + rows * D, offsets, present, dq * (scale * LN2), D, PADDED_D)
    if SLOPES:
        # Sums of large terms that cancel: what makes sum dscore differ from dlse is rounding, mostly delta's, and every
        # dscore carries its weight's share of it.
        dlse = tl.load(DLSE + rows + offsets, mask=present, other=0.0) * LOG2E
        error = tl.where(row_max == INF, 0.0, total - dlse)
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


@triton.jit(do_not_specialize=["seed", "threshold"])
def dkv_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, RANGE, DOUT, DELTA, ROW_MAX, LOG_SUM, VISITED, DK, DV,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, left_b, left_h, right_b, right_h,
    dout_b, dout_h, dout_t, dout_e, B, H, G, T, S, num_blocks, num_tiles, visited_tiles,
    scale, seed, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FORWARD_ROWS: tl.constexpr, FORWARD_KEYS: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Fill DK [B, G, S, D] and DV [B, G, S, E]; 1-D grid. Scores lie across: [keys, rows]."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    block, g, b = (
        num_blocks - 1 - index % num_blocks,
        index // num_blocks // B,
        index // num_blocks % B,
    )
    first, end = key_limits(RANGE, b, S, HAS_RANGE)
    shift = end - T
    s = block * KEYS
    columns, offsets = tl.arange(0, KEYS), tl.arange(0, ROWS)
    keys = s + columns
    inside = (keys >= first) & (keys < end)
    K += b.to(tl.int64) * k_b + g.to(tl.int64) * k_h + s.to(tl.int64) * k_s
    V += b.to(tl.int64) * v_b + g.to(tl.int64) * v_h + s.to(tl.int64) * v_s
    k = load_rows(K, columns, inside, k_s, k_d, D, PADDED_D)
    v = load_rows(V, columns, inside, v_s, v_d, E, PADDED_E)
    key_hashes = key_hash(keys)[:, None]
    dk = tl.zeros((KEYS, PADDED_D), tl.float32)
    dv = tl.zeros((KEYS, PADDED_E), tl.float32)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        head = b.to(tl.int64) * H + h
        left, left_hidden = read_slope(tl.load(LEFT_SLOPES + b * left_b + h * left_h))
        right, right_hidden = read_slope(tl.full((), float("inf"), tl.float32))
        if HAS_RIGHT:
            right, right_hidden = read_slope(tl.load(RIGHT_SLOPES + b * right_b + h * right_h))
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
                    slope, begin, stop = left, mixed_high, highest
                elif PART == RIGHT:
                    slope, begin, stop = right, lowest, mixed_low
                else:
                    slope, begin, stop = left, mixed_low if HAS_RIGHT else lowest, mixed_high
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
                        Q + b.to(tl.int64) * q_b + wide(h) * q_h + wide(start) * q_t,
                        offsets, present, q_t, q_d, D, PADDED_D,
                    )  # fmt: skip
                    dout = load_rows(
                        DOUT + b.to(tl.int64) * dout_b + wide(h) * dout_h + wide(start) * dout_t,
                        offsets, present, dout_t, dout_e, E, PADDED_E,
                    )  # fmt: skip
                    delta = tl.load(DELTA + rows, mask=present, other=0.0)
                    row_max, log_sum = load_pivot(ROW_MAX, LOG_SUM, rows, present)
                    product = tl.dot(k, tl.trans(q), input_precision="ieee")
                    if PART == NEAR:
                        distance = ((start + shift + offsets)[None, :] - keys[:, None]).to(
                            tl.float32
                        )
                        score = near_score(
                            product,
                            distance,
                            visible[:, None],
                            scale,
                            left,
                            left_hidden,
                            right,
                            right_hidden,
                        )
                    else:
                        row_term, key_term = far_terms(
                            offsets, keys, visible, start + shift, slope, ROWS, PART
                        )
                        score = product * scale - key_term[:, None] - row_term[None, :]
                    weight = tl.exp2(score - row_max[None, :] - log_sum[None, :])
                    dweight = tl.dot(v, tl.trans(dout), input_precision="ieee")
                    dscore, dropped = score_gradient(
                        weight, dweight, delta[None, :], row_hash(seed, head, start + offsets)[None, :], key_hashes,
                        threshold, factor, DROPOUT,
                    )  # fmt: skip
                    dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee")
                    dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee")
    to = (b.to(tl.int64) * G + g) * S + s
    exists = keys < S
    store_rows(DK + to * D, columns, exists, dk * (scale * LN2), D, PADDED_D)
    store_rows(DV + to * E, columns, exists, dv, E, PADDED_E)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    key_range: Tensor | None,
    seed: int,
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
    delta = torch.empty_like(row_max)
    rows = 64
    delta_kernel[B * H, triton.cdiv(T, rows)](
        dout, out, dlse, delta, *dout.stride(), H, T, E=E, PADDED_E=padded(E), ROWS=rows, **FUSION
    )
    num_tiles = triton.cdiv(T, sizes.dq.rows)
    parts = (
        None
        if dslopes is None
        else torch.empty(B, H, num_tiles, 2, dtype=torch.float32, device=q.device)
    )
    strides = (
        *q.stride(), *k.stride(), *v.stride(), *slope_strides(left), *slope_strides(right), *dout.stride(), B, H, G, T, S,
    )  # fmt: skip
    numbers = scale * LOG2E.value, seed, *dropout_numbers(dropout)
    constants = {
        "D": D, "E": E, "PADDED_D": padded(D), "PADDED_E": padded(E), "HAS_RIGHT": right is not None,
        "HAS_RANGE": key_range is not None, "DROPOUT": dropout > 0,
        "FORWARD_ROWS": sizes.forward.rows, "FORWARD_KEYS": sizes.forward.keys,
    }  # fmt: skip
    arrays = q, k, v, left, right, key_range, dout
    dq_kernel[num_tiles * B * H,](
        *arrays, dlse, delta, row_max, log_sum, visited, dq, parts, *strides, num_tiles, visited.shape[2], *numbers,
        **constants, **sizes.dq.options(), SLOPES=dslopes is not None,
    )  # fmt: skip
    num_blocks = triton.cdiv(S, sizes.dkv.keys)
    if num_blocks:
        dkv_kernel[num_blocks * B * G,](
            *arrays, delta, row_max, log_sum, visited, dk, dv, *strides, num_blocks,
            triton.cdiv(T, sizes.forward.rows), visited.shape[2], *numbers, **constants, **sizes.dkv.options(),
        )  # fmt: skip
    if dslopes is not None and parts is not None:
        for side, gradient in enumerate(dslopes):
            gradient.copy_(parts[..., side].sum(-1, dtype=torch.float64))
