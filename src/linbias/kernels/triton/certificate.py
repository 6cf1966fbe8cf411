"""The certificate (docs/math.md) on a GPU: bounds on the keys not visited yet, as numbers of
blocks.

`measure_kernel` finds the largest |k - c| of each block, c being the mean of SAMPLE keys, and
`outwards_kernel` running maxima from either end. A tile asks once when near keys are in its sums,
and again after the keys that carry most of the weight. For keys at given positions `tails_kernel`
scans what blocks weigh outwards, and a tile searches for a tail that is small enough.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.launch import Call, arguments, options
from linbias.kernels.triton.sequences import (
    find,
    load_keys,
    norms_of_pages,
    read_sequence,
    tiles_before,
    tiles_of,
)
from linbias.kernels.triton.sizes import FUSION, Tile
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    RIGHT,
    beyond,
    clamp,
    head_of,
    load_places,
    read_range,
    read_slopes,
    wide,
    zeros,
)

CHUNK = 1024

SAMPLE: tl.constexpr = tl.constexpr(64)
BLOCKS: tl.constexpr = tl.constexpr(4)  # that a program measures
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Covers the device's approximate log2 and the rounding of sums (docs/math.md, section 4), in bits.
MARGIN: tl.constexpr = tl.constexpr(2.0**-6)
# Keys whose bias is below so many bits carry most of a row's weight.
PREVIEW_BITS: tl.constexpr = tl.constexpr(3.0)
# Blocks whose tails are looked at together, for one row and for several.
SEARCHED: tl.constexpr = tl.constexpr(128)
FEW_SEARCHED: tl.constexpr = tl.constexpr(32)
# More than what a square loses that underflows.
UNDERFLOW: tl.constexpr = tl.constexpr(2.0**-120)


@triton.jit
def norm(rows, D: tl.constexpr):
    """At least the Euclidean norm of each row but for rounding; rows [rows, PADDED_D], float32."""
    return tl.sqrt(tl.sum(rows * rows, 1) + D * UNDERFLOW)


class Certificate(NamedTuple):
    """What forward asks of the keys that a tile has not visited yet; without arrays: nothing."""

    center: Tensor | None = None  # [B or sequences, G, D], float32
    # [2, B, G, blocks], float32: the largest |k - c| from a block outwards, to the left and to the
    # right
    reach: Tensor | None = None
    tails: Tensor | None = None  # see `tails`; None where keys stand at their indices
    num_blocks: int = 0
    log_share: float = 0.0
    slack: float = 0.0


@triton.jit
def measure_kernel(call, CENTER, RADIUS, slack, SHAPE: tl.constexpr):
    """Fill CENTER [B, G, D] and RADIUS [B, G, blocks]; grid B * G * groups of BLOCKS blocks.

    Where pages have norms the center is 0, and no key is read.
    """
    KEYS: tl.constexpr = SHAPE.keys
    NORMS: tl.constexpr = call.sequences.page_norms is not None
    num_groups = tiles_of(call, call.S, BLOCKS * KEYS)
    head, place = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    sequence, group = find(call, place, head // call.G, True, BLOCKS * KEYS)
    g = head % call.G
    first, end = read_range(call, sequence, g)
    num_keys = end - first
    center = zeros(SHAPE.padded_D)
    if not NORMS:
        sample = first + tl.arange(0, SAMPLE).to(tl.int64) * num_keys // SAMPLE
        some = tl.arange(0, SAMPLE) * 0 < num_keys
        center = load_keys(
            call, call.k, sequence, g, 0, sample, some, SHAPE.D, SHAPE.padded_D, True
        )
        center = tl.sum(center.to(tl.float32), 0) * (1.0 / SAMPLE)
    entries = tl.arange(0, SHAPE.padded_D)
    if group == 0:
        to = CENTER + (wide(sequence.b) * call.G + g) * SHAPE.D
        tl.store(to + entries, center, mask=entries < SHAPE.D)
    to = RADIUS + wide(head) * tiles_of(call, call.S, KEYS)
    to += tiles_before(call, sequence.b, sequence.first_key, KEYS)
    for i in range(BLOCKS):
        block = group * BLOCKS + i
        start, offsets = wide(block) * KEYS, tl.arange(0, KEYS)
        keys = start + offsets
        inside = (keys >= first) & (keys < end)
        if NORMS:
            away = norms_of_pages(call, sequence, g, keys, inside)
            away = tl.where(away < INF, away, INF)
        else:
            k = load_keys(
                call, call.k, sequence, g, start, offsets, inside, SHAPE.D, SHAPE.padded_D, True
            )
            v = load_keys(
                call, call.v, sequence, g, start, offsets, inside, SHAPE.E, SHAPE.padded_E, True
            )
            difference = k.to(tl.float32) - center[None, :]
            square = tl.sum(difference * difference, 1) + tl.sum(v.to(tl.float32) * 0.0, 1)
            square += SHAPE.D * UNDERFLOW
            away = tl.sqrt(tl.where(square < INF, square, INF))
        radius = tl.max(tl.where(inside, away, 0.0), 0) * (1 + slack)
        tl.store(to + block, radius, mask=block * KEYS < sequence.S)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def outwards_kernel(call, RADIUS, REACH, KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """REACH [2, B, G, blocks]: the largest RADIUS [B, G, blocks] of a sequence up to a block, and
    from it on; grid (sequences * G, 2).
    """
    side, all_blocks = tl.program_id(1), tiles_of(call, call.S, KEYS)
    sequence = read_sequence(call, tl.program_id(0) // call.G)
    head = wide(sequence.batch) * call.G + tl.program_id(0) % call.G
    before = tiles_before(call, sequence.b, sequence.first_key, KEYS)
    RADIUS += head * all_blocks + before
    REACH += (wide(side) * call.B * call.G + head) * all_blocks + before
    num_blocks = tl.cdiv(sequence.S, KEYS)
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
    """log2 of what a geometric tail of that slope, in bits, and so many keys weighs at most."""
    y = slope * LN2
    # 1 - exp(-y), from below where it would cancel
    first_weight = tl.where(y < 0.01, y * (1 - 0.5 * y), 1 - tl.exp2(-slope))
    whole = -tl.log2(tl.where(first_weight > 0, first_weight, 1e-38))
    return tl.minimum(whole, tl.log2(tl.maximum(count, 1).to(tl.float32)))


@triton.jit
def excess_of(bound, row_max, row_sum, log_share):
    """log2 of a tail over what may be lost of the row's sum; inf in a row that saw no key yet."""
    seen = row_sum > 0
    log_sum = tl.where(seen, tl.log2(tl.where(seen, row_sum, 1.0)), -INF)
    return bound - log_share + MARGIN - tl.where(seen, row_max + log_sum, -INF)


@triton.jit
def trip_count(excess, slope, present, distance, most, slack, KEYS: tl.constexpr):
    """How many more blocks a side must visit, 0 .. most; NaN and a slope of 0 ask for all.

    excess: [rows], of a tail at distance 0; distance: [rows], of the nearest unvisited key.
    """
    needed = excess / (tl.where(slope > 0, slope, 1.0) * (1 - slack)) - distance.to(tl.float32)
    blocks = tl.ceil(needed / KEYS)
    limit = most.to(tl.float32)
    blocks = tl.where(blocks <= limit, tl.maximum(blocks, 0.0), limit)
    blocks = tl.where(slope > 0, blocks, limit)
    return tl.max(tl.where(present, blocks, 0.0), 0).to(tl.int32)


@triton.jit
def preview(slope, KEYS: tl.constexpr):
    """How many blocks carry most of a row's weight, going by the bias."""
    flattest = tl.where(slope > 1e-6, slope, 1e-6)  # which NaN becomes, too
    return tl.ceil(1.0 / flattest * PREVIEW_BITS / KEYS).to(tl.int32)


@triton.jit
def most_needed(excess, slope, xq, x, present, slack, SIDE: tl.constexpr):
    """`excess_of` a tail that begins at x, [rows]; inf where that is no number, -inf in absent
    rows.
    """
    needed = excess - slope * (1 - slack) * beyond(x, xq, SIDE)
    return tl.where(present, tl.where(needed < INF, needed, INF), -INF)


@triton.jit
def search(needed, slope, X, stride, TAILS, nearest, most, KEYS: tl.constexpr, SIDE: tl.constexpr):
    """How many of the blocks from key `nearest` outwards come before the first that may be left
    out.

    needed, slope, X [rows]: of a tail from `nearest`, in bits; X points to positions. Tails fall
    outwards; several are looked at together. Without TAILS a tail counts its keys.
    """
    WIDTH: tl.constexpr = FEW_SEARCHED if TAILS is None else SEARCHED
    count = 0
    going = most > 0
    reference = tl.load(X + tl.where(going, wide(nearest), 0) * stride)
    while going:
        blocks = count + tl.arange(0, WIDTH)
        inside = blocks < most
        key = nearest - blocks * KEYS if SIDE == LEFT else nearest + blocks * KEYS
        x = tl.load(X[:, None] + (wide(key) * stride)[None, :], mask=inside[None, :], other=0.0)
        tail = needed[:, None] - slope[:, None] * beyond(x, reference[:, None], SIDE)
        if TAILS is not None:
            tail += tl.load(TAILS + key // KEYS, mask=inside, other=0.0)[None, :]
        asked = inside & (tl.max((~(tail <= 0)).to(tl.int32), 0) > 0)
        more = tl.sum(asked.to(tl.int32), 0)
        count += more
        going = more == WIDTH
    return count


@triton.jit
def placed_trip_count(
    call,
    tile,
    certificate,
    excess,
    slope,
    present,
    nearest,
    most,
    turn,
    KEYS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """`trip_count` where keys have positions, in turn 0 for most of the weight alone."""
    slack = certificate.slack
    TAILS = certificate.tails
    TAILS += (SIDE * wide(call.B) * call.H + tile.head) * certificate.num_blocks
    X, stride = head_of(call.x, tile.sequence.b, tile.h, 0), call.x.strides[2]
    here = tl.minimum(tl.maximum(nearest, 0), call.S - 1)
    x = tl.load(X + wide(here) * stride)
    needed = tl.max(most_needed(excess, slope, tile.xq, x, present, slack, SIDE), 0)
    # A constant before an array would be one for the interpreter of Triton 3.7.
    near = tl.minimum(needed, -tl.load(TAILS + here // KEYS) + PREVIEW_BITS)
    needed = tl.where(turn == 0, near, needed)
    one, none = tl.arange(0, 1), zeros(1)
    steep = slope * (1 - slack) + none
    asked = search(needed + none, steep, X + one, stride, TAILS, nearest, most, KEYS, SIDE)
    return tl.where(slope > 0, asked, most)


@triton.jit
def log_add(a, b):
    """log2(2^a + 2^b)."""
    largest = tl.maximum(a, b)
    pivot = tl.where(largest == -INF, 0.0, largest)
    return pivot + tl.log2(tl.exp2(a - pivot) + tl.exp2(b - pivot))


@triton.jit
def further_block(sum, step, next_sum, next_step):
    """Two stretches of keys as one: log of their weights, seen from its end, and the bias between
    ends.
    """
    return log_add(sum - next_step, next_sum), step + next_step


@triton.jit
def blocks_kernel(call, SUMS, KEYS: tl.constexpr):
    """Fill SUMS [2, B, H, blocks]: log2 of what a block weighs, seen from its key nearest to the
    rows.

    Grid B * H * groups of BLOCKS blocks.
    """
    num_blocks = tl.cdiv(call.S, KEYS)
    num_groups = tl.cdiv(num_blocks, BLOCKS)
    head, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    num_heads = tl.num_programs(0) // num_groups
    b, h = head // call.H, head % call.H
    first, end = read_range(call, read_sequence(call, b), h // (call.H // call.G))
    slopes = read_slopes(call, b, h)
    for i in range(BLOCKS):
        block = group * BLOCKS + i
        keys = block * KEYS + tl.arange(0, KEYS)
        inside = (keys >= first) & (keys < end)
        x = load_places(call.x, b, h, keys, inside)
        for SIDE in tl.static_range(2):
            slope = slopes.left if SIDE == LEFT else slopes.right
            edge = edge_of(block, first, end, KEYS, SIDE)
            anchor = load_places(call.x, b, h, edge, (edge >= first) & (edge < end))
            weight = tl.where(inside, tl.exp2(-slope * beyond(x, anchor, SIDE)), 0.0)
            to = (SIDE * num_heads + wide(head)) * num_blocks + block
            tl.store(SUMS + to, tl.log2(tl.sum(weight, 0)), mask=block < num_blocks)


@triton.jit
def edge_of(block, first, end, KEYS: tl.constexpr, SIDE: tl.constexpr):
    """The key of a block, or of the range beyond which it lies, that is nearest to the rows."""
    edge = block * KEYS + (KEYS - 1 if SIDE == LEFT else 0)
    return clamp(edge, first, end - 1)


@triton.jit
def tails_kernel(call, SUMS, TAILS, KEYS: tl.constexpr, CHUNK: tl.constexpr):
    """TAILS [2, B, H, blocks]: log2 of what a block and all beyond weigh, likewise; grid (B * H,
    2).
    """
    num_blocks = tl.cdiv(call.S, KEYS)
    head, side = tl.program_id(0), tl.program_id(1)
    b, h = head // call.H, head % call.H
    first, end = read_range(call, read_sequence(call, b), h // (call.H // call.G))
    slopes = read_slopes(call, b, h)
    slope = tl.where(side == LEFT, slopes.left, slopes.right)
    SUMS += (wide(side) * tl.num_programs(0) + head) * num_blocks
    TAILS += (wide(side) * tl.num_programs(0) + head) * num_blocks
    tail = float("-inf")
    for start in range(0, num_blocks, CHUNK):
        steps = start + tl.arange(0, CHUNK)
        inside = steps < num_blocks
        block = tl.where(side == LEFT, steps, num_blocks - 1 - steps)
        left_edge = edge_of(block, first, end, KEYS, LEFT)
        right_edge = edge_of(block, first, end, KEYS, RIGHT)
        left_before = edge_of(block - 1, first, end, KEYS, LEFT)
        right_before = edge_of(block + 1, first, end, KEYS, RIGHT)
        edge = tl.where(side == LEFT, left_edge, right_edge)
        edge_before = tl.where(side == LEFT, left_before, right_before)
        there = inside & (edge >= first)  # of a range without keys, none is
        x = load_places(call.x, b, h, edge, there)
        before = load_places(call.x, b, h, edge_before, there)
        step = slope * tl.abs(x - before).to(tl.float32)
        sums = tl.load(SUMS + block, mask=inside, other=float("-inf"))
        sums, step = tl.associative_scan((sums, step), 0, further_block)
        found = log_add(tail - step, sums)
        tl.store(TAILS + block, found, mask=inside)
        tail = tl.max(tl.where(steps == start + CHUNK - 1, found, -INF), 0)


def tails(call: Call, keys: int) -> Tensor:
    """What all keys from a block of `keys` keys outwards weigh, in bits: [2, B, H, blocks]."""
    B, H, _, _, S, *_ = call.lengths
    num_blocks = triton.cdiv(S, keys)
    sums = torch.empty(2, B, H, num_blocks, dtype=torch.float32, device=call.k.device)
    found = torch.empty_like(sums)
    given, options = arguments(call), {"KEYS": keys, **FUSION}
    blocks_kernel[B * H * triton.cdiv(num_blocks, BLOCKS.value),](given, sums, **options)
    chunk = min(CHUNK, triton.next_power_of_2(num_blocks))
    tails_kernel[B * H, 2](given, sums, found, CHUNK=chunk, **options)
    return found


def certificate_of(call: Call, tile: Tile) -> Certificate:
    """Measure all blocks of a tile's keys."""
    B, _, G, _, S, D, _ = call.lengths
    num_blocks, slack = call.places(S, tile.keys), slack_of(D)
    center = torch.empty(call.num_sequences, G, D, dtype=torch.float32, device=call.k.device)
    radius = center.new_empty(B, G, num_blocks)
    given, groups = arguments(call), call.places(S, tile.keys * BLOCKS.value)
    measure_kernel[B * G * groups,](
        given, center, radius, slack, **options(call, tile._replace(num_warps=4))
    )
    reach = radius.new_empty(2, B, G, num_blocks)
    outwards_kernel[call.num_sequences * G, 2](
        given, radius, reach, KEYS=tile.keys, CHUNK=CHUNK, **FUSION
    )
    return Certificate(
        center=center,
        reach=reach,
        tails=None if call.positions is None else tails(call, tile.keys),
        num_blocks=num_blocks,
        log_share=log_share(call.tolerance, call.right is not None),
        slack=slack,
    )


def slack_of(D: int) -> float:
    """Relative rounding of norms, of dot products over D terms, and of the scores in the sums."""
    return (D + 8) * 2.0**-23


def log_share(tolerance: float, two_sides: bool) -> float:
    """log2 of the share of a row's probability that one side may lose."""
    return math.log2(tolerance / 2 if two_sides else tolerance) if tolerance else -math.inf
