"""The forward pass: a tile of query rows visits keys near to far, as long as the certificate asks.

Near tiles come first, with masks; then each side in a counted loop that the compiler can pipeline,
entered twice: the second time once the first has seen most of the weight. Where no key beyond can
exceed the maximum of a row by much (docs/math.md, section 4), a shorter loop keeps that maximum.
"""

import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import (
    Certificate,
    certificate_of,
    excess_of,
    log_count,
    norm,
    placed_trip_count,
    preview,
    trip_count,
)
from linbias.kernels.triton.launch import Call, arguments, array, options
from linbias.kernels.triton.row_ranges import sees_beyond, within
from linbias.kernels.triton.scores import load_block, query_tile, score_block
from linbias.kernels.triton.sequences import tiles_before
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    NEAR,
    add_block,
    add_values,
    gap_bias,
    head_of,
    load_rows,
    near_keys,
    row_hash,
    store_rows,
    take_off_bias,
    wide,
    zeros,
)

# Bits by which a score may exceed the maximum that its row keeps: float16 ends at 2^16, and
# dropout enlarges weights.
MOST_ABOVE: tl.constexpr = tl.constexpr(8.0)
# Of keys; with so few it does not pay to measure them in order to leave some out (reasoned, not
# measured).
FEWEST_BLOCKS = 16


@triton.jit
def forward_kernel(call, certificate, OUT, ROW_MAX, LOG_SUM, VISITED, SHAPE: tl.constexpr):
    """Fill OUT, ROW_MAX and LOG_SUM [B, H, T] in bits, and VISITED [B, H, tiles, 2]; 1-D grid.

    Without a certificate all keys are visited.
    """
    HAS_RIGHT: tl.constexpr = call.right is not None
    RANGED: tl.constexpr = call.query_range is not None
    PLACED: tl.constexpr = call.x is not None
    CERTIFY: tl.constexpr = certificate.center is not None
    KEYS: tl.constexpr = SHAPE.keys
    tile = query_tile(call, SHAPE.rows)
    Q = head_of(call.q, tile.sequence.batch, tile.h, tile.row)
    q = load_rows(Q, tile.offsets, tile.present, call.q.strides, SHAPE.D, SHAPE.padded_D, True)
    row_hashes = row_hash(call.dropout, tile.head, tile.start + tile.offsets)
    acc, row_sum = zeros(SHAPE.rows, SHAPE.padded_E), zeros(SHAPE.rows)
    row_max = row_sum - INF

    low, high = near_keys(tile.position, SHAPE.rows, tile.key_first, tile.key_end, KEYS)
    near_low, near_high = low, high
    if RANGED:
        low, high = within(low, high, tile.first, tile.end, KEYS)
    # Of no block one is visited, whose keys are masked: a loop that may run not at all would have
    # the compiler wait for each product by itself.
    stop = tl.maximum(high, low + KEYS)
    tl.assume(stop > low)
    for near in tl.range(low, stop, KEYS, num_stages=SHAPE.stages):
        block = score_block(call, tile, q, near, high, SHAPE, NEAR)
        v = load_block(call, call.v, tile, near, block.inside, SHAPE.E, SHAPE.padded_E, NEAR)
        acc, row_max, row_sum = add_block(call, block, v, row_hashes, acc, row_max, row_sum)

    if CERTIFY:
        slack, sequence = certificate.slack, tile.sequence
        entries = tl.arange(0, SHAPE.padded_D)
        center = certificate.center + (wide(sequence.b) * call.G + tile.g) * SHAPE.D + entries
        center = tl.load(center, mask=entries < SHAPE.D, other=0.0)
        key_head = wide(sequence.batch) * call.G + tile.g
        left_reach = certificate.reach + key_head * certificate.num_blocks
        left_reach += tiles_before(call, sequence.b, sequence.first_key, KEYS)
        right_reach = left_reach + wide(call.B) * call.G * certificate.num_blocks
        last_block = tl.maximum(tl.cdiv(sequence.S, KEYS) - 1, 0)
        wide_q = q.to(tl.float32)
        q_norm = norm(wide_q, SHAPE.D) * tl.abs(call.scale) * (1 + slack)
        largest = tl.sqrt(tl.sum(center * center, 0)) + tl.load(right_reach)
        base = tl.sum(wide_q * center[None, :], 1) * call.scale + slack * q_norm * largest

    for SIDE in tl.static_range(2):
        if SIDE == LEFT or HAS_RIGHT:
            if SIDE == LEFT:
                slope, sight = tile.slopes.left, tile.slopes.left_sight
                most = low // KEYS - tile.first // KEYS
            else:
                slope, sight = tile.slopes.right, tile.slopes.right_sight
                most = tl.cdiv(tile.end, KEYS) - high // KEYS
            some = (sight > 0) & (tile.start < tile.sequence.T)
            most = tl.where(some, tl.maximum(most, 0), 0)
            visited, needed = 0, 0
            for turn in tl.range(0, 2 if CERTIFY else 1):
                count = most
                if CERTIFY:
                    if SIDE == LEFT:
                        nearest = low - visited * KEYS - 1
                        radius = tl.load(left_reach + tl.maximum(nearest, 0) // KEYS)
                        distance = tile.position + tile.offsets - nearest
                        unseen = nearest + 1 - tile.first
                    else:
                        nearest = high + visited * KEYS
                        radius = tl.load(right_reach + tl.minimum(nearest // KEYS, last_block))
                        distance = nearest - tile.position - tile.offsets
                        unseen = tile.end - nearest
                    highest = base + q_norm * radius
                    bound = highest
                    asking = tile.present
                    if RANGED:
                        asking &= sees_beyond(tile.row_first, tile.row_end, nearest, SIDE)
                    if not PLACED:
                        bound += log_count(slope, unseen)
                    excess = excess_of(bound, row_max, row_sum, certificate.log_share)
                    left_out = most - visited
                    if PLACED:
                        count = visited + placed_trip_count(
                            call,
                            tile,
                            certificate,
                            excess,
                            slope,
                            asking,
                            nearest,
                            left_out,
                            turn,
                            KEYS,
                            SIDE,
                        )
                    else:
                        needed = visited + trip_count(
                            excess, slope, asking, distance, left_out, slack, KEYS
                        )
                        rising = visited + trip_count(
                            highest - row_max - MOST_ABOVE,
                            slope,
                            asking,
                            distance,
                            left_out,
                            slack,
                            KEYS,
                        )
                        first_part = tl.where(turn == 0, preview(slope, KEYS), rising)
                        count = tl.minimum(needed, first_part)
                for n in tl.range(visited, count, num_stages=SHAPE.stages):
                    far = low - (n + 1) * KEYS if SIDE == LEFT else high + n * KEYS
                    block = score_block(call, tile, q, far, 0, SHAPE, SIDE)
                    v = load_block(
                        call, call.v, tile, far, block.inside, SHAPE.E, SHAPE.padded_E, SIDE
                    )
                    acc, row_max, row_sum = add_block(
                        call, block, v, row_hashes, acc, row_max, row_sum
                    )
                visited = count
            if CERTIFY and not PLACED:
                pivot = tl.where(row_max == -INF, 0.0, row_max)
                for n in tl.range(visited, needed, num_stages=SHAPE.stages):
                    far = low - (n + 1) * KEYS if SIDE == LEFT else high + n * KEYS
                    block = score_block(call, tile, q, far, 0, SHAPE, SIDE)
                    v = load_block(
                        call, call.v, tile, far, block.inside, SHAPE.E, SHAPE.padded_E, SIDE
                    )
                    weight = tl.exp2(block.score - (pivot + block.lead)[:, None])
                    row_sum += tl.sum(weight, 1)
                    acc = add_values(call, block, weight, v, row_hashes, acc)
                visited = needed
            if RANGED:
                # Counts begin at the near blocks, whether these hold keys that are seen or not.
                skipped = near_low - low if SIDE == LEFT else high - near_high
                visited = tl.where(visited > 0, visited + skipped // KEYS, 0)
            to = head_of(VISITED, tile.sequence.batch, tile.h, tile.place)
            tl.store(to + SIDE, visited)

    empty = row_sum == 0
    rows = tile.rows
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    store_rows(OUT + rows * SHAPE.E, tile.offsets, tile.present, out, SHAPE.E, SHAPE.padded_E)
    log_sum = tl.where(empty, -INF, tl.log2(tl.where(empty, 1.0, row_sum)))
    if call.query_start is not None and not PLACED:
        bias = gap_bias(tile.gap, tile.slopes)
        row_max, log_sum = take_off_bias(row_max, log_sum, bias)
    tl.store(ROW_MAX + rows + tile.offsets, row_max, mask=tile.present)
    tl.store(LOG_SUM + rows + tile.offsets, log_sum, mask=tile.present)


def forward(call: Call, out: Tensor, row_max: Tensor, log_sum: Tensor, visited: Tensor) -> None:
    """Fill out [B, H, T, E], row_max and log_sum [B, H, T] in bits, and visited [B, H, tiles, 2].

    It counts the blocks that each tile visits to the left and right of its own; there is room for
    tiles of FEWEST_ROWS rows.
    """
    B, H, _, T, S, *_ = call.lengths
    if B * H * T == 0:
        return
    tile = call.sizes.forward
    longest = S if call.sequences is None else call.sequences.longest[1]
    certify = call.tolerance > 0 and longest > FEWEST_BLOCKS * tile.keys
    certificate = certificate_of(call, tile) if certify else Certificate()
    results = out, row_max, log_sum, array(visited)
    forward_kernel[call.places(T, tile.rows) * B * H,](
        arguments(call), certificate, *results, **options(call, tile)
    )
