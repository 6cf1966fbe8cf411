"""The certificate of docs/math.md on a GPU: bounds on the keys not visited yet, turned into a number of blocks to visit.

Before the first tile, `measure_kernel` reads keys and values once and finds for each block of keys the largest |k - c|, where c
is the mean of SAMPLE keys spread over the range (any fixed vector serves); running maxima of these, from either end towards
the near keys, bound all that lies outwards. Blocks that hold anything not finite get inf, and so are never left out.
A tile asks for its number once when near keys are in its sums, and again after the keys that carry most of the weight.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.launch import Call, padded, strides
from linbias.kernels.triton.sizes import FUSION
from linbias.kernels.triton.tile import INF, head_of, load_rows, read_range, wide

SAMPLE = 64
BLOCKS_PER_PROGRAM = 4
CHUNK = 1024

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Covers the device's approximate log2, in bits.
MARGIN: tl.constexpr = tl.constexpr(2.0**-9)
# Keys whose bias is below so many bits carry most of a row's weight.
PREVIEW_BITS: tl.constexpr = tl.constexpr(3.0)
# More than what a square loses that underflows.
UNDERFLOW: tl.constexpr = tl.constexpr(2.0**-120)


@triton.jit
def norm(rows, D: tl.constexpr):
    """At least the Euclidean norm of each row but for rounding; rows [rows, PADDED_D], float32."""
    return tl.sqrt(tl.sum(rows * rows, 1) + D * UNDERFLOW)


class Bounds(NamedTuple):
    """What the certificate knows of the keys; both None where nothing may be left out."""

    center: Tensor | None  # [B, G, D], float32
    # [2, B, G, blocks], float32: the largest |k - c| from a block outwards, to the left and to the right
    reach: Tensor | None


@triton.jit
def measure_kernel(
    K, V, KEY_RANGE, CENTER, RADIUS, k_strides, v_strides, range_strides, G, S, num_blocks, num_groups, slack,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    KEYS: tl.constexpr, BLOCKS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Fill CENTER [B, G, D] and RADIUS [B, G, blocks]; grid B * G * num_groups, a group of BLOCKS blocks each."""
    head, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    b, g = head // G, head % G
    first, end = read_range(KEY_RANGE, range_strides, b, g, S)
    K, V = head_of(K, k_strides, b, g), head_of(V, v_strides, b, g)
    num_keys = end - first
    sample = first + tl.arange(0, SAMPLE).to(tl.int64) * num_keys // SAMPLE
    some = tl.arange(0, SAMPLE) * 0 < num_keys
    center = load_rows(K, sample, some, k_strides, D, PADDED_D).to(tl.float32)
    center = tl.sum(center, 0) * (1.0 / SAMPLE)
    entries = tl.arange(0, PADDED_D)
    if group == 0:
        tl.store(CENTER + wide(head) * D + entries, center, mask=entries < D)
    for i in range(BLOCKS):
        block = group * BLOCKS + i
        offsets = tl.arange(0, KEYS)
        keys = block * KEYS + offsets
        inside = (keys >= first) & (keys < end)
        start = wide(block) * KEYS
        k = load_rows(K + start * k_strides[2], offsets, inside, k_strides, D, PADDED_D).to(
            tl.float32
        )
        v = load_rows(V + start * v_strides[2], offsets, inside, v_strides, E, PADDED_E).to(
            tl.float32
        )
        difference = k - center[None, :]
        square = tl.sum(difference * difference, 1) + tl.sum(v * 0.0, 1) + D * UNDERFLOW
        square = tl.where(inside, tl.where(square < INF, square, INF), 0.0)
        radius = tl.sqrt(tl.max(square, 0)) * (1 + slack)
        tl.store(RADIUS + wide(head) * num_blocks + block, radius, mask=block < num_blocks)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def outwards_kernel(RADIUS, REACH, num_blocks, CHUNK: tl.constexpr):
    """REACH [2, heads, blocks]: the largest RADIUS [heads, blocks] up to a block, and from it on; grid (heads, 2)."""
    side = tl.program_id(1)
    RADIUS += wide(tl.program_id(0)) * num_blocks
    REACH += (wide(side) * tl.num_programs(0) + tl.program_id(0)) * num_blocks
    largest = 0.0
    for start in range(0, num_blocks, CHUNK):
        step = start + tl.arange(0, CHUNK)
        block = tl.where(side == 0, step, num_blocks - 1 - step)
        radius = tl.load(RADIUS + block, mask=step < num_blocks, other=0.0)
        reach = tl.maximum(tl.associative_scan(radius, 0, larger), largest)
        tl.store(REACH + block, reach, mask=step < num_blocks)
        largest = tl.max(reach, 0)


@triton.jit
def log_count(slope, count):
    """log2 of what a geometric tail of that slope (in bits) and so many keys sums up to, at most."""
    y = slope * LN2
    # 1 - exp(-y), from below where it would cancel
    first_weight = tl.where(y < 0.01, y * (1 - 0.5 * y), 1 - tl.exp2(-slope))
    whole = -tl.log2(tl.where(first_weight > 0, first_weight, 1e-38))
    return tl.minimum(whole, tl.log2(tl.maximum(count, 1).to(tl.float32)))


@triton.jit
def trip_count(
    bound, slope, row_max, row_sum, present, distance, most, log_share, slack, KEYS: tl.constexpr
):
    """How many more blocks of KEYS a side must visit, 0 .. most: the certificate solved for the distance.

    bound: [rows], log2 of the tail if it began at distance 0; distance: [rows], from a row to the nearest unvisited key.
    Comparisons with NaN ask for all blocks, and so does a slope of 0.
    """
    seen = row_sum > 0
    log_sum = tl.where(seen, tl.log2(tl.where(seen, row_sum, 1.0)), -INF)
    excess = bound - log_share + MARGIN - tl.where(seen, row_max + log_sum, -INF)
    needed = excess / (tl.where(slope > 0, slope, 1.0) * (1 - slack)) - distance.to(tl.float32)
    blocks = tl.ceil(needed / KEYS)
    limit = most.to(tl.float32)
    blocks = tl.where(blocks <= limit, tl.maximum(blocks, 0.0), limit)
    blocks = tl.where(slope > 0, blocks, limit)
    return tl.max(tl.where(present, blocks, 0.0), 0).to(tl.int32)


@triton.jit
def preview(slope, KEYS: tl.constexpr):
    """How many blocks of keys carry most of a row's weight, going by the bias: they are visited before the second question."""
    flattest = tl.where(slope > 1e-6, slope, 1e-6)  # which NaN becomes, too
    return tl.ceil(1.0 / flattest * PREVIEW_BITS / KEYS).to(tl.int32)


def bounds(call: Call, keys: int) -> Bounds:
    """Measure all blocks of `keys` keys."""
    B, _, G, _, S, D, E = call.lengths
    num_blocks = triton.cdiv(S, keys)
    center = torch.empty(B, G, D, dtype=torch.float32, device=call.k.device)
    radius = torch.empty(B, G, num_blocks, dtype=torch.float32, device=call.k.device)
    num_groups = triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM)
    measure_kernel[B * G * num_groups,](
        call.k, call.v, call.key_range, center, radius, call.k.stride(), call.v.stride(), strides(call.key_range),
        G, S, num_blocks, num_groups, slack_of(D), D=D, E=E, PADDED_D=padded(D), PADDED_E=padded(E),
        KEYS=keys, BLOCKS=BLOCKS_PER_PROGRAM, SAMPLE=SAMPLE, **FUSION,
    )  # fmt: skip
    reach = radius.new_empty(2, B, G, num_blocks)
    outwards_kernel[B * G, 2](radius, reach, num_blocks, CHUNK=CHUNK, **FUSION)
    return Bounds(center, reach)


def slack_of(D: int) -> float:
    """Relative rounding of norms, of dot products over D terms, and of the scores in the sums."""
    return (D + 8) * 2.0**-23


def log_share(tolerance: float, two_sides: bool) -> float:
    """log2 of the share of a row's probability that one side may lose."""
    return math.log2(tolerance / 2 if two_sides else tolerance) if tolerance else -math.inf
