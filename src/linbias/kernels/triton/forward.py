"""The forward pass: a tile of query rows visits keys near to far, with an online softmax, for as long as the certificate asks.

One program: `rows` queries of one head. Near tiles come first, with masks; then each side in a counted loop that the compiler
can pipeline, entered twice: the second time for as long as the certificate asks once the first has seen most of the weight.
In registers: queries, acc [rows, E], a tile of scores; in shared memory: `num_stages` blocks of keys and values.
Shapes: q [B, H, T, D], k [B, G, S, D], v [B, G, S, E], any strides, D and E up to 256; float16, bfloat16, float32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import (
    Bounds,
    bounds,
    log_count,
    norm,
    padded,
    preview,
    slack_of,
    trip_count,
)
from linbias.kernels.triton.sizes import Sizes
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    LOG2E,
    NEAR,
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

# Of keys; with so few it does not pay to measure them in order to leave some out (reasoned, not measured).
FEWEST_BLOCKS = 16


@triton.jit
def add_block(
    score, lead, v, acc, row_max, row_sum, row_hashes, key_hashes, threshold, factor, DROPOUT: tl.constexpr
):  # fmt: skip
    """One step of the online softmax, in bits; the scores still lack `lead` [rows], which is taken off them all."""
    new_max = tl.maximum(row_max, tl.max(score, 1) - lead)
    # While a row has seen no key its maximum is -inf, and any finite pivot keeps its sums at 0.
    pivot = tl.where(new_max == -INF, 0.0, new_max)
    weight = tl.exp2(score - (pivot + lead)[:, None])
    shrink = tl.exp2(row_max - pivot)
    row_sum = row_sum * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    if DROPOUT:
        weight = drop(weight, row_hashes[:, None], key_hashes[None, :], threshold, factor)
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, RANGE, SEED, CENTER, REACH, OUT, ROW_MAX, LOG_SUM, VISITED,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, left_b, left_h, right_b, right_h,
    B, H, G, T, S, num_tiles, visited_tiles, num_blocks, reach_size,
    scale, log_share, slack, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    PRECISE: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, CERTIFY: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Fill OUT [B, H, T, E], ROW_MAX and LOG_SUM [B, H, T] in bits, VISITED [B, H, visited_tiles, 2]; 1-D grid."""
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
    K += wide(b) * k_b + wide(g) * k_h
    V += wide(b) * v_b + wide(g) * v_h
    q = load_rows(Q, offsets, present, q_t, q_d, D, PADDED_D)
    row_hashes = row_hash(SEED, head, start + offsets, DROPOUT)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    no_lead = tl.zeros((ROWS,), tl.float32)
    columns = tl.arange(0, KEYS)

    low, high = near_keys(position, first, end, ROWS, KEYS)
    for near in tl.range(low, high, KEYS, num_stages=STAGES):
        keys = near + columns
        inside = (keys >= first) & (keys < end)
        k = load_block(K, near, columns, inside, k_s, k_d, D, PADDED_D, HAS_RANGE, NEAR)
        v = load_block(V, near, columns, inside, v_s, v_d, E, PADDED_E, HAS_RANGE, NEAR)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        distance = (position + offsets)[:, None] - keys[None, :]
        score = near_score(
            product, distance, inside[None, :], scale, left, left_sight, right, right_sight, HAS_RIGHT
        )  # fmt: skip
        acc, row_max, row_sum = add_block(
            score, no_lead, v, acc, row_max, row_sum, row_hashes, key_hash(keys), threshold, factor, DROPOUT
        )  # fmt: skip

    base = row_sum
    q_norm = row_sum
    if CERTIFY:
        entries = tl.arange(0, PADDED_D)
        center = tl.load(CENTER + (wide(b) * G + g) * D + entries, mask=entries < D, other=0.0)
        REACH += (wide(b) * G + g) * num_blocks
        right_reach = REACH + reach_size
        wide_q = q.to(tl.float32)
        q_norm = norm(wide_q, D) * tl.abs(scale) * (1 + slack)
        largest = tl.sqrt(tl.sum(center * center, 0)) + tl.load(right_reach)
        base = tl.sum(wide_q * center[None, :], 1) * scale + slack * q_norm * largest

    for SIDE in tl.static_range(2):
        if SIDE == LEFT or HAS_RIGHT:
            if SIDE == LEFT:
                slope, sight, most = left, left_sight, low // KEYS - first // KEYS
            else:
                slope, sight, most = right, right_sight, tl.cdiv(end, KEYS) - high // KEYS
            most = tl.where(sight > 0, tl.maximum(most, 0), 0)
            row_term = row_bias(offsets, slope, ROWS, SIDE)
            visited = 0
            for turn in tl.range(0, 2 if CERTIFY else 1):
                count = most
                if CERTIFY:
                    if SIDE == LEFT:
                        nearest = low - visited * KEYS - 1
                        radius = tl.load(REACH + tl.maximum(nearest, 0) // KEYS)
                        distance = position + offsets - nearest
                        unseen = nearest + 1 - first
                    else:
                        nearest = high + visited * KEYS
                        radius = tl.load(right_reach + tl.minimum(nearest // KEYS, num_blocks - 1))
                        distance = nearest - position - offsets
                        unseen = end - nearest
                    bound = base + q_norm * radius + log_count(slope, unseen)
                    count = visited + trip_count(
                        bound, slope, row_max, row_sum, present, distance, most - visited, log_share, slack, KEYS
                    )  # fmt: skip
                    count = tl.where(turn == 0, tl.minimum(count, preview(slope, KEYS)), count)
                for n in tl.range(visited, count, num_stages=STAGES):
                    far = low - (n + 1) * KEYS if SIDE == LEFT else high + n * KEYS
                    keys = far + columns
                    inside = (keys >= first) & (keys < end)
                    k = load_block(K, far, columns, inside, k_s, k_d, D, PADDED_D, HAS_RANGE, SIDE)
                    product = tl.dot(q, tl.trans(k), input_precision="ieee")
                    key_term = cut(key_bias(columns, slope, KEYS, SIDE), inside, HAS_RANGE, SIDE)
                    lead = row_term + slope * gap(position, far, ROWS, KEYS, SIDE)
                    score = far_score(product, scale, key_term[None, :], lead[:, None], PRECISE)
                    if PRECISE:
                        lead = no_lead
                    v = load_block(V, far, columns, inside, v_s, v_d, E, PADDED_E, HAS_RANGE, SIDE)
                    acc, row_max, row_sum = add_block(
                        score, lead, v, acc, row_max, row_sum, row_hashes, key_hash(keys), threshold, factor, DROPOUT
                    )  # fmt: skip
                visited = count
            tl.store(VISITED + (head * visited_tiles + tile) * 2 + SIDE, visited)

    empty = row_sum == 0
    rows = head * T + start
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    store_rows(OUT + rows * E, offsets, present, out, E, PADDED_E)
    tl.store(ROW_MAX + rows + offsets, row_max, mask=present)
    log_sum = tl.where(empty, -INF, tl.log2(tl.where(empty, 1.0, row_sum)))
    tl.store(LOG_SUM + rows + offsets, log_sum, mask=present)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    key_range: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    tolerance: float,
    sizes: Sizes,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill out [B, H, T, E], row_max and log_sum [B, H, T] in bits, and visited [B, H, tiles, 2], int32.

    Args:
        left, right: [H] or [B, H], float32.
        key_range: [B, 2], int32, or None.
        seed: [], int64, on the device; None without dropout.
        results: out, row_max, log_sum, visited; visited with room for T / FEWEST_ROWS tiles.
    """
    (B, H, T, D), (G, S), E = q.shape, k.shape[1:3], v.shape[3]
    out, row_max, log_sum, visited = results
    if B * H * T == 0:
        return
    tile = sizes.forward
    certify = tolerance > 0 and S > FEWEST_BLOCKS * tile.keys
    measured = bounds(k, v, key_range, tile.keys) if certify else Bounds(None, None)
    num_tiles = triton.cdiv(T, tile.rows)
    forward_kernel[num_tiles * B * H,](
        q, k, v, left, right, key_range, seed, *measured, out, row_max, log_sum, visited,
        *q.stride(), *k.stride(), *v.stride(), *slope_strides(left), *slope_strides(right),
        B, H, G, T, S, num_tiles, visited.shape[2], triton.cdiv(S, tile.keys), B * G * triton.cdiv(S, tile.keys),
        scale * LOG2E.value, log_share(tolerance, right is not None), slack_of(D), *dropout_numbers(dropout),
        D=D, E=E, PADDED_D=padded(D), PADDED_E=padded(E), **tile.options(),
        PRECISE=precise(q), HAS_RIGHT=right is not None, HAS_RANGE=key_range is not None, CERTIFY=certify, DROPOUT=dropout > 0,
    )  # fmt: skip


def precise(q: Tensor) -> bool:
    """Must forward and backward find the same scores to the last bit? 16 bits do not show the difference."""
    return q.dtype == torch.float32


def slope_strides(slopes: Tensor | None) -> tuple[int, int]:
    if slopes is None:
        return 0, 0
    return (slopes.stride(0), slopes.stride(1)) if slopes.dim() == 2 else (0, slopes.stride(0))


def log_share(tolerance: float, two_sides: bool) -> float:
    """log2 of the share of a row's probability that one side may lose."""
    return math.log2(tolerance / 2 if two_sides else tolerance) if tolerance else -math.inf


def dropout_numbers(dropout: float) -> tuple[int, float]:
    """The threshold of the hash, and what remaining weights are multiplied by."""
    return min(round(dropout * 2**32), 2**32 - 1), 1 / (1 - dropout)
