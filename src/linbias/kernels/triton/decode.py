"""Decoding: few queries against a long cache, which is cut into parts that run at once.

One program: one part of one key/value head, for all query rows that read it (heads of a group times queries, packed into one
tile). With a `key_bound` it first takes the scores of the near keys, without their values, for the certificate; that gives the
window of the head, of which it then visits its share. Without one all keys are visited: to measure them would read more.
`merge_kernel` adds the parts up in order.
Bytes read: the longest window of each group, keys and values once, plus the near keys once more for every part (L2).
Source of the cut: Flash-Decoding (Dao et al. 2023). Shapes: T * H / G up to 64 (float32: 16), otherwise as forward's.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import (
    log_count,
    norm,
    padded,
    preview,
    slack_of,
    trip_count,
)
from linbias.kernels.triton.forward import add_block, log_share, slope_strides
from linbias.kernels.triton.sizes import FUSION, Sizes
from linbias.kernels.triton.tile import (
    INF,
    LOG2E,
    NEAR,
    key_limits,
    load_block,
    near_keys,
    near_score,
    read_slope,
    store_rows,
    wide,
)

MOST_ROWS = {2: 64, 4: 16}  # by bytes of an element: in float32 more rows do not fit the registers
PROGRAMS_PER_PROCESSOR = 4
MOST_PARTS = 64

NEAR_BLOCKS: tl.constexpr = tl.constexpr(4)  # at most, beside those at the queries' own positions


@triton.jit
def score_block(
    q, K, start, position, first, end, k_s, k_d, scale, left, left_sight, right, right_sight,
    D: tl.constexpr, PADDED_D: tl.constexpr, KEYS: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr,
):  # fmt: skip
    """The scores of all rows with the block of keys from `start`, and which of its keys there are."""
    columns = tl.arange(0, KEYS)
    keys = start + columns
    inside = (keys >= first) & (keys < end)
    k = load_block(K, start, columns, inside, k_s, k_d, D, PADDED_D, HAS_RANGE, NEAR)
    score = near_score(
        tl.dot(q, tl.trans(k), input_precision="ieee"), position[:, None] - keys[None, :], inside[None, :], scale,
        left[:, None], left_sight[:, None], right[:, None], right_sight[:, None], HAS_RIGHT,
    )  # fmt: skip
    return score, inside


@triton.jit
def decode_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, RANGE, BOUND, PART_OUT, PART_MAX, PART_SUM,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, left_b, left_h, right_b, right_h,
    H, G, T, S, scale, log_share, slack,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_RANGE: tl.constexpr, CERTIFY: tl.constexpr,
):  # fmt: skip
    """Fill PART_OUT [B * G, parts, rows, E], unnormalised, PART_MAX and PART_SUM [B * G, parts, rows]; grid (B * G, parts)."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    group = H // G
    first, end = key_limits(RANGE, b, S, HAS_RANGE)
    offsets = tl.arange(0, ROWS)
    h, t = g * group + offsets // T, offsets % T
    present = offsets < group * T
    position = t + end - T
    left_at, right_at = b * left_b + h * left_h, b * right_b + h * right_h
    left, left_sight = read_slope(tl.load(LEFT_SLOPES + left_at, mask=present, other=INF))
    right, right_sight = tl.zeros_like(left), tl.zeros_like(left_sight)
    if HAS_RIGHT:
        right, right_sight = read_slope(tl.load(RIGHT_SLOPES + right_at, mask=present, other=INF))
    Q += wide(b) * q_b
    K += wide(b) * k_b + wide(g) * k_h
    V += wide(b) * v_b + wide(g) * v_h
    entries = tl.arange(0, PADDED_D)
    from_rows = h.to(tl.int64) * q_h + t.to(tl.int64) * q_t
    q = tl.load(
        Q + from_rows[:, None] + entries[None, :] * q_d,
        mask=present[:, None] & (entries < D)[None, :],
        other=0.0,
    )
    columns = tl.arange(0, KEYS)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    no_lead = tl.zeros((ROWS,), tl.float32)

    low, high = near_keys(end - T, first, end, 1, KEYS)
    high = tl.cdiv(end, KEYS) * KEYS
    # How many blocks lie to the left of these, for rows that may look there.
    seen = present & (left_sight > 0)
    most = tl.max(tl.where(seen, tl.maximum((low - first // KEYS * KEYS) // KEYS, 0), 0), 0)
    count = most
    if CERTIFY:
        wanted = tl.where(seen, preview(left, KEYS), 0)
        near = tl.minimum(tl.max(wanted, 0), tl.minimum(most, NEAR_BLOCKS))
        for start in tl.range(low - near * KEYS, high, KEYS, num_stages=STAGES):
            score, _ = score_block(
                q, K, start, position, first, end, k_s, k_d, scale, left, left_sight, right, right_sight,
                D, PADDED_D, KEYS, HAS_RIGHT, HAS_RANGE,
            )  # fmt: skip
            new_max = tl.maximum(row_max, tl.max(score, 1))
            pivot = tl.where(new_max == -INF, 0.0, new_max)
            row_sum = row_sum * tl.exp2(row_max - pivot) + tl.sum(
                tl.exp2(score - pivot[:, None]), 1
            )
            row_max = new_max
        wide_q = q.to(tl.float32)
        q_norm = norm(wide_q, D) * tl.abs(scale) * (1 + slack)
        nearest = low - near * KEYS - 1
        largest = q_norm * tl.load(BOUND + tl.program_id(0)) * (1 + 3 * slack)
        count = near + trip_count(
            largest + log_count(left, nearest + 1 - first), left, row_max, row_sum, seen,
            position - nearest, most - near, log_share, slack, KEYS,
        )  # fmt: skip
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)

    total = count + (high - low) // KEYS
    share = tl.cdiv(total, num_parts)
    for n in tl.range(part * share, tl.minimum((part + 1) * share, total), num_stages=STAGES):
        start = high - (n + 1) * KEYS
        score, inside = score_block(
            q, K, start, position, first, end, k_s, k_d, scale, left, left_sight, right, right_sight,
            D, PADDED_D, KEYS, HAS_RIGHT, HAS_RANGE,
        )  # fmt: skip
        v = load_block(V, start, columns, inside, v_s, v_d, E, PADDED_E, HAS_RANGE, NEAR)
        acc, row_max, row_sum = add_block(
            score, no_lead, v, acc, row_max, row_sum, offsets, columns, 0, 1.0, False
        )
    rows = (wide(tl.program_id(0)) * num_parts + part) * group * T
    store_rows(PART_OUT + rows * E, offsets, present, acc, E, PADDED_E)
    tl.store(PART_MAX + rows + offsets, row_max, mask=present)
    tl.store(PART_SUM + rows + offsets, row_sum, mask=present)


@triton.jit
def merge_kernel(
    PART_OUT,
    PART_MAX,
    PART_SUM,
    OUT,
    ROW_MAX,
    LOG_SUM,
    num_parts,
    rows,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
):
    """Add up the parts of one row; grid (B * G * rows). Rows lie in the order of OUT [B, H, T, E]."""
    row = wide(tl.program_id(0))
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
    tl.store(ROW_MAX + row, row_max)
    tl.store(LOG_SUM + row, tl.where(empty, -INF, tl.log2(tl.where(empty, 1.0, row_sum))))


def serves(T: int, group_size: int, itemsize: int) -> bool:
    """Are there so few query rows that all of a group fit one tile?"""
    return T * group_size <= MOST_ROWS[itemsize]


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    right: Tensor | None,
    key_range: Tensor | None,
    key_bound: Tensor | None,
    scale: float,
    tolerance: float,
    sizes: Sizes,
    num_processors: int,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill out [B, H, T, E], row_max and log_sum [B, H, T] in bits.

    Args:
        left, right: [H] or [B, H], float32.
        key_range: [B, 2], int32, or None.
        key_bound: [B, G], float32, at least |k| of every key in the range, or None.
        num_processors: Of the device; the cache is cut into parts until all are busy.
    """
    (B, H, T, D), (G, S), E = q.shape, k.shape[1:3], v.shape[3]
    if B * H * T == 0:
        return
    tile, rows = sizes.decode, H // G * T
    num_blocks = triton.cdiv(S, tile.keys)
    certify = tolerance > 0 and key_bound is not None and num_blocks > 2
    wanted = triton.cdiv(num_processors * PROGRAMS_PER_PROCESSOR, B * G)
    num_parts = max(1, min(wanted, MOST_PARTS, num_blocks // 2))
    options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    part_out = torch.empty(B * G, num_parts, rows, E, **options)
    part_max, part_sum = torch.empty(2, B * G, num_parts, rows, **options)
    decode_kernel[B * G, num_parts](
        q, k, v, left, right, key_range, key_bound, part_out, part_max, part_sum,
        *q.stride(), *k.stride(), *v.stride(), *slope_strides(left), *slope_strides(right),
        # What lies to the right of the queries is near: one side has all of the tolerance.
        H, G, T, S, scale * LOG2E.value, log_share(tolerance, False), slack_of(D),
        D=D, E=E, PADDED_D=padded(D), PADDED_E=padded(E), **tile._replace(rows=max(tile.rows, padded(rows))).options(),
        HAS_RIGHT=right is not None, HAS_RANGE=key_range is not None, CERTIFY=certify,
    )  # fmt: skip
    merge_kernel[B * H * T,](
        part_out,
        part_max,
        part_sum,
        *results,
        num_parts,
        rows,
        E=E,
        PADDED_E=padded(E),
        num_warps=1,
        **FUSION,
    )
