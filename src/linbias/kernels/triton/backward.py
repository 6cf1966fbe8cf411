"""The backward pass, over exactly the keys that forward visited, by its counts: no atomics.

`dq_kernel` goes over the keys of a query tile. `dkv_kernel` goes over the rows between the first
and the last tile that visited its block of keys, and gives keys that a tile did not visit a weight
of 0. Both recompute the scores. Every sum has one owner and one order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import LN2
from linbias.kernels.triton.launch import Array, Call, arguments, array, options
from linbias.kernels.triton.row_ranges import hide, hulls, read_row_ranges, within
from linbias.kernels.triton.scores import load_block, query_tile, score_block
from linbias.kernels.triton.sequences import find, load_keys, tiles_before, tiles_of
from linbias.kernels.triton.sizes import Tile
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    LOG2E,
    NEAR,
    RIGHT,
    between,
    distance_to,
    drop,
    far_score,
    from_anchor,
    gap_bias,
    head_of,
    key_bias,
    key_hash,
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
    zeros,
)

SCAN: tl.constexpr = tl.constexpr(1024)
# Key blocks of fewer key/value heads than that are shared out by query heads.
FEWEST_PROGRAMS = 256


class Saved(NamedTuple):
    """What backward knows of rows: their gradients, and what forward and `row_kernel` left."""

    dout: Array
    dlse: Tensor  # of lse in bits
    delta: Tensor
    pivot: Tensor
    log_sum: Tensor
    visited: Array


@triton.jit
def row_kernel(call, saved, OUT, ROW_MAX, SHAPE: tl.constexpr):
    """Fill delta = dout . out - dlse and pivot [B, H, T]; grid B * H * tiles.

    exp2(score - pivot) is a weight, inf in a row without keys; in float32 log_sum is apart from
    it.
    """
    PRECISE: tl.constexpr = call.q.at.dtype.element_ty == tl.float32
    place, b, h, g = my_tile(tiles_of(call, call.T, SHAPE.rows), call.B, call.H, call.G)
    sequence, index = find(call, place, b, False, SHAPE.rows)
    batch, row = sequence.batch, sequence.first_row + index * SHAPE.rows
    offsets = tl.arange(0, SHAPE.rows)
    present = index * SHAPE.rows + offsets < sequence.T
    rows = (wide(batch) * call.H + h) * call.T + row + offsets
    DOUT, OUT_ROWS = head_of(saved.dout, batch, h, row), head_of(OUT, batch, h, row)
    dout = load_rows(DOUT, offsets, present, saved.dout.strides, SHAPE.E, SHAPE.padded_E, True)
    out = load_rows(OUT_ROWS, offsets, present, OUT.strides, SHAPE.E, SHAPE.padded_E, True)
    dlse = tl.load(saved.dlse + rows, mask=present, other=0.0) * LOG2E
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1) - dlse
    tl.store(saved.delta + rows, delta, mask=present)
    log_sum = tl.load(saved.log_sum + rows, mask=present, other=0.0)
    pivot = tl.load(ROW_MAX + rows, mask=present, other=0.0)
    if call.query_start is not None and call.x is None:
        first, end = read_range(call, sequence, g)
        _, gap = read_start(call, sequence, first, end)
        pivot += gap_bias(gap, read_slopes(call, sequence.b, h))
    if not PRECISE:
        pivot += log_sum
    tl.store(saved.pivot + rows, tl.where(log_sum == -INF, INF, pivot), mask=present)


class Loss(NamedTuple):
    """What rows bring to the gradients, [rows, E] and [rows]."""

    dout: Any
    delta: Any
    pivot: Any  # inf in absent rows
    log_sum: Any  # what else is to be taken off a score
    hashes: Any


@triton.jit
def load_loss(call, saved, sequence, h, start, offsets, present, SHAPE: tl.constexpr):
    """Of rows start + offsets of head h of a sequence."""
    PRECISE: tl.constexpr = call.q.at.dtype.element_ty == tl.float32
    row = sequence.first_row + start
    DOUT = head_of(saved.dout, sequence.batch, h, row)
    dout = load_rows(DOUT, offsets, present, saved.dout.strides, SHAPE.E, SHAPE.padded_E, True)
    rows = (wide(sequence.batch) * call.H + h) * call.T + row + offsets
    delta = tl.load(saved.delta + rows, mask=present, other=0.0)
    pivot = tl.load(saved.pivot + rows, mask=present, other=float("inf"))
    log_sum = pivot
    if PRECISE:
        log_sum = tl.load(saved.log_sum + rows, mask=present, other=0.0)
        log_sum = tl.where(log_sum == -INF, 0.0, log_sum)
    hashes = row_hash(call.dropout, wide(sequence.b) * call.H + h, start + offsets)
    return Loss(dout, delta, pivot, log_sum, hashes)


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
def score_gradient(weight, dweight, delta, row_hashes, key_hashes, dropout):
    """The gradients of the scores, and the weights that met the values."""
    dropped = drop(weight, row_hashes, key_hashes, dropout)
    dweight = drop(dweight, row_hashes, key_hashes, dropout)
    return weight * (dweight - delta), dropped


@triton.jit
def visited_keys(COUNTS, HULLS, tiles, exists, query_start, first, end, FORWARD: tl.constexpr):
    """Where the keys begin and end that forward's tiles visited, by a sequence's part of a head of
    VISITED and of HULLS.
    """
    position = query_start + tiles * FORWARD.rows
    low, high = near_keys(position, FORWARD.rows, first, end, FORWARD.keys)
    low -= tl.load(COUNTS + 2 * tiles, mask=exists, other=0) * FORWARD.keys
    high += tl.load(COUNTS + 2 * tiles + 1, mask=exists, other=0) * FORWARD.keys
    if HULLS is not None:
        low = tl.maximum(low, tl.load(HULLS + 4 * tiles, mask=exists, other=0))
        high = tl.minimum(high, tl.load(HULLS + 4 * tiles + 1, mask=exists, other=0))
    return low, high


@triton.jit
def dq_kernel(call, saved, DQ, DSLOPES, DXQ, SHAPE: tl.constexpr, FORWARD: tl.constexpr):
    """Fill DQ [B, H, T, D], unless None DSLOPES [B, H, tiles, 2], parts of tiles, and DXQ [B,
    H, T].
    """
    HAS_RIGHT: tl.constexpr = call.right is not None
    SLOPES: tl.constexpr = DSLOPES is not None
    PLACES: tl.constexpr = DXQ is not None
    PRECISE: tl.constexpr = call.q.at.dtype.element_ty == tl.float32
    KEYS: tl.constexpr = SHAPE.keys
    tile = query_tile(call, SHAPE.rows)
    sequence, h, offsets, present = tile.sequence, tile.h, tile.offsets, tile.present
    rows = tile.rows
    Q = head_of(call.q, sequence.batch, h, tile.row)
    q = load_rows(Q, offsets, present, call.q.strides, SHAPE.D, SHAPE.padded_D, True)
    loss = load_loss(call, saved, sequence, h, tile.start, offsets, present, SHAPE)
    dq, total = zeros(SHAPE.rows, SHAPE.padded_D), zeros(SHAPE.rows)
    total_right, share_right = total, total
    moment_left, reach_left = total, total
    moment_right, reach_right = total, total

    forward_tile = tile.start // FORWARD.rows
    position = tile.query_start + forward_tile * FORWARD.rows
    low, high = near_keys(position, FORWARD.rows, tile.key_first, tile.key_end, FORWARD.keys)
    before = tiles_before(call, sequence.b, sequence.first_row, FORWARD.rows)
    counts = head_of(saved.visited, sequence.batch, h, before + forward_tile)
    for PART in tl.static_range(2, -1, -1):  # near keys first
        if PART != RIGHT or HAS_RIGHT:
            if PART == LEFT:
                begin, stop = low - tl.load(counts) * FORWARD.keys, low
            elif PART == RIGHT:
                begin, stop = high, high + tl.load(counts + 1) * FORWARD.keys
            else:
                begin, stop = low, high
            if call.query_range is not None:
                begin, stop = within(begin, stop, tile.first, tile.end, KEYS)
            end = stop
            if PART == NEAR:  # at least one block, see `forward_kernel`
                stop = tl.maximum(stop, begin + KEYS)
                tl.assume(stop > begin)
            for start in tl.range(begin, stop, KEYS, num_stages=SHAPE.stages):
                block = score_block(call, tile, q, start, end, SHAPE, PART)
                v = load_block(
                    call, call.v, tile, start, block.inside, SHAPE.E, SHAPE.padded_E, PART
                )
                weight = weigh(
                    block.score,
                    block.lead[:, None],
                    loss.pivot[:, None],
                    loss.log_sum[:, None],
                    PRECISE,
                )
                dweight = tl.dot(loss.dout, tl.trans(v), input_precision="ieee")
                key_hashes = key_hash(call.dropout, block.keys)
                dscore, _ = score_gradient(
                    weight,
                    dweight,
                    loss.delta[:, None],
                    loss.hashes[:, None],
                    key_hashes[None, :],
                    call.dropout,
                )
                dq = tl.dot(dscore.to(block.k.dtype), block.k, dq, input_precision="ieee")
                if SLOPES or PLACES:
                    total += tl.sum(dscore, 1)
                if PLACES:
                    if PART != LEFT and HAS_RIGHT:
                        total_right += tl.sum(tl.where(block.order < 0, dscore, 0.0), 1)
                        share_right += tl.sum(tl.where(block.order < 0, weight, 0.0), 1)
                if SLOPES:
                    if PART != RIGHT:
                        to_left = tl.maximum(block.away, 0.0)
                        moment_left += tl.sum(dscore * to_left, 1)
                        reach_left += tl.sum(weight * to_left, 1)
                    if PART != LEFT and HAS_RIGHT:
                        to_right = tl.maximum(-block.away, 0.0)
                        moment_right += tl.sum(dscore * to_right, 1)
                        reach_right += tl.sum(weight * to_right, 1)

    dq *= call.scale * LN2
    store_rows(DQ + rows * SHAPE.D, offsets, present, dq, SHAPE.D, SHAPE.padded_D)
    if SLOPES or PLACES:
        # Sums of large terms that cancel: sum dscore differs from dlse by rounding, mostly
        # delta's, of which every dscore has its weight's share. Distances lack the gap.
        dlse = tl.load(saved.dlse + rows + offsets, mask=present, other=0.0) * LOG2E
        dlse = tl.where(loss.pivot == INF, 0.0, dlse)
        error = tl.where(loss.pivot == INF, 0.0, total - dlse)
    if PLACES:
        # The weights of a row that saw a key are 1 together, and so its dscore is dlse.
        right_total = total_right - error * share_right
        dxq = tile.slopes.right * right_total - tile.slopes.left * (dlse - right_total)
        tl.store(DXQ + rows + offsets, dxq * LN2, mask=present)
    if SLOPES:
        gap = 0 if call.x is not None else tile.gap
        gap_left = tl.maximum(gap, 0).to(tl.float32)
        gap_right = tl.maximum(-gap, 0).to(tl.float32)
        head = wide(sequence.batch) * call.H + h
        to = DSLOPES + (head * tiles_of(call, call.T, SHAPE.rows) + tile.place) * 2
        tl.store(to, -tl.sum(moment_left - error * reach_left + gap_left * dlse, 0))
        tl.store(to + 1, -tl.sum(moment_right - error * reach_right + gap_right * dlse, 0))


@triton.jit
def tiles_that_visited(
    T, COUNTS, HULLS, s, query_start, first, end, FORWARD: tl.constexpr, KEYS: tl.constexpr
):
    """The first and one past the last of T rows' forward tiles that visited any of KEYS keys from
    s on.
    """
    num_tiles = tl.cdiv(T, FORWARD.rows)
    lowest, highest = num_tiles, 0
    for start in range(0, num_tiles, SCAN):
        tiles = start + tl.arange(0, SCAN)
        exists = tiles < num_tiles
        low, high = visited_keys(COUNTS, HULLS, tiles, exists, query_start, first, end, FORWARD)
        visited = exists & (low < s + KEYS) & (high > s)
        lowest = tl.minimum(lowest, tl.min(tl.where(visited, tiles, num_tiles), 0))
        highest = tl.maximum(highest, tl.max(tl.where(visited, tiles + 1, 0), 0))
    return lowest, highest


@triton.jit
def dkv_kernel(call, saved, HULLS, DK, DV, DX, SHAPE: tl.constexpr, FORWARD: tl.constexpr):
    """Fill DK and DV [parts, B, G, S, size], unless None DX [B, H, S].

    Grid (blocks * B * G, parts): a part has a share of the query heads that read the block. Scores
    lie across: [keys, rows].
    """
    HAS_RIGHT: tl.constexpr = call.right is not None
    PLACED: tl.constexpr = call.x is not None
    PLACES: tl.constexpr = DX is not None
    RANGED: tl.constexpr = call.query_range is not None
    PRECISE: tl.constexpr = call.q.at.dtype.element_ty == tl.float32
    ROWS: tl.constexpr = SHAPE.rows
    KEYS: tl.constexpr = SHAPE.keys
    place, b, g, _ = my_tile(tiles_of(call, call.S, KEYS), call.B, call.G, call.G)
    sequence, block = find(call, place, b, True, KEYS)
    b, batch = sequence.b, sequence.batch
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    first, end = read_range(call, sequence, g)
    query_start, _ = read_start(call, sequence, first, end)
    s = block * KEYS
    columns, offsets = tl.arange(0, KEYS), tl.arange(0, ROWS)
    keys = s + columns
    inside = (keys >= first) & (keys < end)
    k = load_keys(call, call.k, sequence, g, s, columns, inside, SHAPE.D, SHAPE.padded_D, True)
    v = load_keys(call, call.v, sequence, g, s, columns, inside, SHAPE.E, SHAPE.padded_E, True)
    key_hashes = key_hash(call.dropout, keys)[:, None]
    dk, dv = zeros(KEYS, SHAPE.padded_D), zeros(KEYS, SHAPE.padded_E)
    before = tiles_before(call, b, sequence.first_row, FORWARD.rows)
    if RANGED:
        HULLS += (wide(batch) * tiles_of(call, call.T, FORWARD.rows) + before) * 4
    group = call.H // call.G
    share = group // num_parts
    for h in range(g * group + part * share, g * group + (part + 1) * share):
        slopes = read_slopes(call, b, h)
        if PLACED:
            x = load_places(call.x, b, h, keys, inside)
            low_key, high_key = tl.maximum(s, first), tl.minimum(s + KEYS, end) - 1
            low_x = load_places(call.x, b, h, low_key, low_key <= high_key)
            high_x = load_places(call.x, b, h, high_key, low_key <= high_key)
            dx = zeros(KEYS)
        counts = head_of(saved.visited, batch, h, before)
        lowest, highest = tiles_that_visited(
            sequence.T, counts, HULLS, s, query_start, first, end, FORWARD, KEYS
        )
        lowest, highest = lowest * FORWARD.rows, highest * FORWARD.rows
        # Rows at the block's own positions: keys may lie on either side of them.
        mixed_low = tl.maximum(s - query_start, 0) // ROWS * ROWS
        mixed_low = tl.minimum(tl.maximum(mixed_low, lowest), highest)
        mixed_high = tl.cdiv(tl.maximum(s + KEYS - query_start, 0), ROWS) * ROWS
        mixed_high = tl.minimum(tl.maximum(mixed_high, mixed_low), highest)
        for PART in tl.static_range(3):
            if PART != RIGHT or HAS_RIGHT:
                if PART == LEFT:
                    slope, sight, begin, stop = slopes.left, slopes.left_sight, mixed_high, highest
                elif PART == RIGHT:
                    slope, sight, begin, stop = slopes.right, slopes.right_sight, lowest, mixed_low
                else:
                    begin, stop = mixed_low if HAS_RIGHT else lowest, mixed_high
                for start in tl.range(begin, stop, ROWS, num_stages=SHAPE.stages):
                    position = query_start + start
                    forward_tile = start // FORWARD.rows
                    low, high = visited_keys(
                        counts, HULLS, forward_tile, True, query_start, first, end, FORWARD
                    )
                    visible = inside & (keys >= low) & (keys < high)
                    present = start + offsets < sequence.T
                    Q = head_of(call.q, batch, h, sequence.first_row + start)
                    q = load_rows(
                        Q, offsets, present, call.q.strides, SHAPE.D, SHAPE.padded_D, True
                    )
                    loss = load_loss(call, saved, sequence, h, start, offsets, present, SHAPE)
                    product = tl.dot(k, tl.trans(q), input_precision="ieee")
                    order = (position + offsets)[None, :] - keys[:, None]
                    if PLACED:
                        xq = load_places(call.xq, b, h, start + offsets, present)
                    if PART == NEAR:
                        distance = order.to(tl.float32)
                        if PLACED:
                            row_high, row_low = from_anchor(xq, low_x)
                            key_high, key_low = from_anchor(x, low_x)
                            distance = between(
                                row_high[None, :],
                                row_low[None, :],
                                key_high[:, None],
                                key_low[:, None],
                                order,
                            )
                        score = near_score(
                            product,
                            order,
                            distance,
                            visible[:, None],
                            call.scale,
                            slopes,
                            HAS_RIGHT,
                        )
                        lead = zeros(ROWS)
                    else:
                        if PLACED:
                            anchor = high_x if PART == LEFT else low_x
                            key_term, lead = placed_bias(x, xq, anchor, slope, PART)
                        else:
                            key_term = key_bias(columns, slope, KEYS, PART)
                            away = distance_to(s, position, ROWS, KEYS, PART)
                            lead = row_bias(offsets, slope, ROWS, PART) + slope * away
                        # Rows of a near tile may lie next to keys on a side that is hidden.
                        key_term = tl.where(visible & (sight > 0), key_term, INF)
                        score = far_score(
                            product, call.scale, key_term[:, None], lead[None, :], PRECISE
                        )
                    if RANGED:
                        row_first, row_end = read_row_ranges(
                            call, sequence, start + offsets, present
                        )
                        hull = HULLS + forward_tile * 4
                        if (s < tl.load(hull + 2)) | (s + KEYS > tl.load(hull + 3)):
                            score = hide(
                                score, keys[:, None], row_first[None, :], row_end[None, :]
                            )
                    weight = weigh(
                        score, lead[None, :], loss.pivot[None, :], loss.log_sum[None, :], PRECISE
                    )
                    dweight = tl.dot(v, tl.trans(loss.dout), input_precision="ieee")
                    dscore, dropped = score_gradient(
                        weight,
                        dweight,
                        loss.delta[None, :],
                        loss.hashes[None, :],
                        key_hashes,
                        call.dropout,
                    )
                    dv = tl.dot(dropped.to(loss.dout.dtype), loss.dout, dv, input_precision="ieee")
                    dk = tl.dot(dscore.to(q.dtype), q, dk, input_precision="ieee")
                    if PLACES:
                        pull = tl.where(order < 0, -slopes.right, slopes.left)
                        dx += tl.sum(pull * dscore, 1)
        if PLACES:
            to = DX + (wide(b) * call.H + h) * call.S
            tl.store(to + keys, dx * LN2, mask=keys < call.S)
    to = ((wide(part) * call.B + batch) * call.G + g) * call.S + sequence.first_key + s
    exists = keys < sequence.S
    dk *= call.scale * LN2
    store_rows(DK + to * SHAPE.D, columns, exists, dk, SHAPE.D, SHAPE.padded_D)
    store_rows(DV + to * SHAPE.E, columns, exists, dv, SHAPE.E, SHAPE.padded_E)


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
    """Fill the gradients that are not None, contiguous.

    dlse: of lse in bits, contiguous. out, row_max, log_sum, visited: what `forward` filled.
    """
    B, H, G, T, S, *_ = call.lengths
    if B * H * T == 0:
        for gradient in (dq, dk, dv, dleft, dright, dpositions, dquery_positions):
            if gradient is not None:
                gradient.zero_()
        return
    given, sizes = arguments(call), call.sizes
    saved = Saved(
        dout=array(dout),
        dlse=dlse,
        delta=torch.empty_like(row_max),
        pivot=torch.empty_like(row_max),
        log_sum=log_sum,
        visited=array(visited),
    )
    rows = Tile(64, 1, 4, 1)
    row_kernel[call.places(T, rows.rows) * B * H,](
        given, saved, array(out), row_max, **options(call, rows)
    )
    num_tiles = call.places(T, sizes.dq.rows)
    parts = None if dleft is None else saved.delta.new_empty(B, H, num_tiles, 2)
    dq_kernel[num_tiles * B * H,](
        given,
        saved,
        dq,
        parts,
        dquery_positions,
        FORWARD=sizes.forward,
        **options(call, sizes.dq),
    )
    num_blocks = call.places(S, sizes.dkv.keys)
    if num_blocks:
        cuts = num_parts(num_blocks * B * G, H // G)
        part_dk, part_dv = (
            x if cuts == 1 else saved.delta.new_empty(cuts, *x.shape) for x in (dk, dv)
        )
        dkv_kernel[num_blocks * B * G, cuts](
            given,
            saved,
            hulls(call, sizes.forward.rows),
            part_dk,
            part_dv,
            dpositions,
            FORWARD=sizes.forward,
            **options(call, sizes.dkv),
        )
        if cuts > 1:
            dk.copy_(part_dk.sum(0))
            dv.copy_(part_dv.sum(0))
    for side, gradient in enumerate((dleft, dright)):
        if parts is not None and gradient is not None:
            gradient.copy_(_of_sequences(call, parts[..., side].double()))


def _of_sequences(call: Call, parts: Tensor) -> Tensor:
    """[B or sequences, H]: sums of what tiles of dq's rows gave, [B, H, places]."""
    if call.sequences is None:
        return parts.sum(-1)
    offsets = call.sequences.query_offsets.long()
    places = offsets // call.sizes.dq.rows + torch.arange(len(offsets), device=offsets.device)
    return torch.segment_reduce(parts[0].T.contiguous(), "sum", lengths=places.diff(), unsafe=True)
