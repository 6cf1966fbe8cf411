"""The forward pass: a tile of query rows visits keys near to far, as long as the certificate asks.

Near tiles come first, with masks; then each side in a counted loop that the compiler can pipeline,
entered twice: the second time once the first has seen most of the weight.
"""

import triton
import triton.language as tl
from torch import Tensor

from linbias.kernels.triton.certificate import (
    Bounds,
    bounds,
    log_count,
    log_share,
    norm,
    placed_trip_count,
    preview,
    slack_of,
    tails,
    trip_count,
)
from linbias.kernels.triton.launch import Call, arguments, dropout_arguments
from linbias.kernels.triton.row_ranges import (
    hide,
    read_row_ranges,
    seen_by_all,
    seen_by_any,
    sees_beyond,
    within,
)
from linbias.kernels.triton.tile import (
    INF,
    LEFT,
    NEAR,
    add_block,
    between,
    cut,
    distance_to,
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
    take_off_bias,
    wide,
)

# Of keys; with so few it does not pay to measure them in order to leave some out (reasoned, not
# measured).
FEWEST_BLOCKS = 16


@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    Q, K, V, LEFT_SLOPES, RIGHT_SLOPES, KEY_RANGE, QUERY_START, QUERY_RANGE, X, XQ, SEED, CENTER,
    REACH, TAILS, OUT, ROW_MAX, LOG_SUM, VISITED,
    q_strides, k_strides, v_strides, left_strides, right_strides, range_strides, start_strides,
    query_range_strides, x_strides, xq_strides, B, H, G, T, S, num_tiles, visited_tiles,
    num_blocks, scale, log_share, slack, threshold, factor,
    D: tl.constexpr, E: tl.constexpr, PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fill OUT, ROW_MAX and LOG_SUM [B, H, T] in bits, and VISITED [B, H, visited_tiles, 2]; 1-D
    grid.

    CENTER and REACH: of `certificate.Bounds`; None: all keys are visited. TAILS: of positions.
    """
    HAS_RIGHT: tl.constexpr = RIGHT_SLOPES is not None
    HAS_RANGE: tl.constexpr = KEY_RANGE is not None
    RANGED: tl.constexpr = QUERY_RANGE is not None
    CERTIFY: tl.constexpr = REACH is not None
    PLACED: tl.constexpr = X is not None
    DROPOUT: tl.constexpr = SEED is not None
    # Backward must find the same scores to the last bit; 16-bit inputs do not show the difference.
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
    K, V = head_of(K, k_strides, b, g), head_of(V, v_strides, b, g)
    q = load_rows(Q, offsets, present, q_strides, D, PADDED_D)
    row_hashes = row_hash(SEED, head, start + offsets)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    no_lead = tl.zeros((ROWS,), tl.float32)
    columns = tl.arange(0, KEYS)

    if PLACED:
        X, XQ = head_of(X, x_strides, b, h), head_of(XQ, xq_strides, b, h)
        xq = load_places(XQ, start + offsets, present, xq_strides)
        own = tl.load(XQ + wide(start) * xq_strides[2])
        row_high, row_low = from_anchor(xq, own)

    low, high = near_keys(position, ROWS, first, end, KEYS)
    near_low, near_high = low, high
    row_first, row_end = read_row_ranges(
        QUERY_RANGE, query_range_strides, b, start + offsets, present, S
    )
    if RANGED:
        first, end = seen_by_any(first, end, row_first, row_end)
        all_first, all_end = seen_by_all(row_first, row_end)
        low, high = within(low, high, first, end, KEYS)
    for near in tl.range(low, high, KEYS, num_stages=STAGES):
        keys = near + columns
        inside = (keys >= first) & (keys < end)
        k = load_block(K, near, columns, inside, k_strides, D, PADDED_D, HAS_RANGE, NEAR)
        v = load_block(V, near, columns, inside, v_strides, E, PADDED_E, HAS_RANGE, NEAR)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        order = (position + offsets)[:, None] - keys[None, :]
        distance = order.to(tl.float32)
        if PLACED:
            key_high, key_low = from_anchor(load_places(X, keys, inside, x_strides), own)
            distance = between(
                row_high[:, None], row_low[:, None], key_high[None, :], key_low[None, :], order
            )
        score = near_score(
            product, order, distance, inside[None, :], scale, left, left_sight, right, right_sight,
            HAS_RIGHT
        )  # fmt: skip
        if RANGED:
            score = hide(score, keys[None, :], row_first[:, None], row_end[:, None])
        acc, row_max, row_sum = add_block(
            score, no_lead, v, acc, row_max, row_sum, row_hashes, key_hash(SEED, keys), threshold,
            factor, DROPOUT
        )  # fmt: skip

    base = row_sum
    q_norm = row_sum
    if CERTIFY:
        entries = tl.arange(0, PADDED_D)
        center = tl.load(CENTER + (wide(b) * G + g) * D + entries, mask=entries < D, other=0.0)
        left_reach = REACH + (wide(b) * G + g) * num_blocks
        right_reach = left_reach + wide(B) * G * num_blocks
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
                        radius = tl.load(left_reach + tl.maximum(nearest, 0) // KEYS)
                        distance = position + offsets - nearest
                        unseen = nearest + 1 - first
                    else:
                        nearest = high + visited * KEYS
                        radius = tl.load(right_reach + tl.minimum(nearest // KEYS, num_blocks - 1))
                        distance = nearest - position - offsets
                        unseen = end - nearest
                    bound = base + q_norm * radius
                    asking = present
                    if RANGED:
                        asking &= sees_beyond(row_first, row_end, nearest, SIDE)
                    if PLACED:
                        count = visited + placed_trip_count(
                            bound, slope, row_max, row_sum, asking, xq, X, x_strides[2], S,
                            TAILS + (SIDE * wide(B) * H + head) * num_blocks, nearest,
                            most - visited, log_share, slack, turn == 0, KEYS, SIDE,
                        )  # fmt: skip
                    else:
                        count = visited + trip_count(
                            bound + log_count(slope, unseen), slope, row_max, row_sum, asking,
                            distance, most - visited, log_share, slack, KEYS,
                        )  # fmt: skip
                        count = tl.where(turn == 0, tl.minimum(count, preview(slope, KEYS)), count)
                for n in tl.range(visited, count, num_stages=STAGES):
                    far = low - (n + 1) * KEYS if SIDE == LEFT else high + n * KEYS
                    keys = far + columns
                    inside = (keys >= first) & (keys < end)
                    k = load_block(
                        K, far, columns, inside, k_strides, D, PADDED_D, HAS_RANGE, SIDE
                    )
                    product = tl.dot(q, tl.trans(k), input_precision="ieee")
                    if PLACED:
                        x = load_places(X, keys, inside, x_strides)
                        anchor = tl.load(
                            X + wide(far + (KEYS - 1 if SIDE == LEFT else 0)) * x_strides[2]
                        )
                        key_term, lead = placed_bias(x, xq, anchor, slope, SIDE)
                    else:
                        key_term = key_bias(columns, slope, KEYS, SIDE)
                        lead = row_term + slope * distance_to(far, position, ROWS, KEYS, SIDE)
                    key_term = cut(key_term, inside, HAS_RANGE, SIDE)
                    score = far_score(product, scale, key_term[None, :], lead[:, None], PRECISE)
                    if RANGED:
                        if (far < all_first) | (far + KEYS > all_end):
                            score = hide(
                                score, keys[None, :], row_first[:, None], row_end[:, None]
                            )
                    if PRECISE:
                        lead = no_lead
                    v = load_block(
                        V, far, columns, inside, v_strides, E, PADDED_E, HAS_RANGE, SIDE
                    )
                    acc, row_max, row_sum = add_block(
                        score, lead, v, acc, row_max, row_sum, row_hashes, key_hash(SEED, keys),
                        threshold, factor, DROPOUT
                    )  # fmt: skip
                visited = count
            if RANGED:
                # Counts begin at the near blocks, whether these hold keys that are seen or not.
                skipped = near_low - low if SIDE == LEFT else high - near_high
                visited = tl.where(visited > 0, visited + skipped // KEYS, 0)
            tl.store(VISITED + (head * visited_tiles + tile) * 2 + SIDE, visited)

    empty = row_sum == 0
    rows = head * T + start
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    store_rows(OUT + rows * E, offsets, present, out, E, PADDED_E)
    log_sum = tl.where(empty, -INF, tl.log2(tl.where(empty, 1.0, row_sum)))
    if QUERY_START is not None and not PLACED:
        row_max, log_sum = take_off_bias(row_max, log_sum, gap_bias(gap, left, right))
    tl.store(ROW_MAX + rows + offsets, row_max, mask=present)
    tl.store(LOG_SUM + rows + offsets, log_sum, mask=present)


def forward(call: Call, out: Tensor, row_max: Tensor, log_sum: Tensor, visited: Tensor) -> None:
    """Fill out [B, H, T, E], row_max and log_sum [B, H, T] in bits, and visited [B, H, tiles, 2].

    It counts the blocks that each of T / FEWEST_ROWS tiles visits to the left and right of its
    own.
    """
    B, H, _, T, S, D, _ = call.lengths
    if B * H * T == 0:
        return
    tile = call.sizes.forward
    certify = call.tolerance > 0 and S > FEWEST_BLOCKS * tile.keys
    measured = bounds(call, tile.keys) if certify else Bounds(None, None)
    num_tiles = triton.cdiv(T, tile.rows)
    forward_kernel[num_tiles * B * H,](
        **arguments(call), **dropout_arguments(call), CENTER=measured.center, REACH=measured.reach,
        TAILS=tails(call, tile.keys) if certify and call.positions is not None else None, OUT=out,
        ROW_MAX=row_max, LOG_SUM=log_sum, VISITED=visited, B=B, num_tiles=num_tiles,
        visited_tiles=visited.shape[2], num_blocks=triton.cdiv(S, tile.keys),
        log_share=log_share(call.tolerance, call.right is not None), slack=slack_of(D),
        **tile.options(),
    )  # fmt: skip
