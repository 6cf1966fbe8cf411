"""The definition in code: the bias, attention and its gradients in NumPy, float64 inside.

Slow, plain, and the truth that every other implementation is tested against. Axis letters: B
batch, T queries, S keys, H query heads, G key/value heads, D key size, E value size.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Never, Unpack, overload

import numpy as np
import numpy.typing as npt

from linbias import _request
from linbias._arrays import Array as Array
from linbias._arrays import Float64 as Float64
from linbias._arrays import Inputs, Options, prepare, split_heads
from linbias._request import checks, keywords


def distances(T: int, S: int, query_start: int | None = None) -> npt.NDArray[np.int64]:
    """Signed distance from each query back to each key; the last query is at the last key.

        distances(2, 4)        distances(3, 2)        distances(2, 3, query_start=0)
        [[2, 1, 0, -1],        [[-1, -2],             [[0, -1, -2],
         [3, 2, 1,  0]]         [ 0, -1],              [1,  0, -1]]
                                [ 1,  0]]

    Args:
        T: Number of queries, at least 0.
        S: Number of keys, at least 0.
        query_start: Position of query 0; key s stands at position s. None means S - T.

    Returns:
        [T, S], int64: p - s with p = query_start + t. Positive: the key lies to the left of the
        query.

    Raises:
        ValueError: T or S is negative.

    Example:
        >>> distances(1, 3).tolist()
        [[2, 1, 0]]
    """
    if T < 0 or S < 0:
        raise ValueError(f"distances: T and S must be at least 0, got T={T}, S={S}")
    T, S = int(T), int(S)
    position = np.arange(T)[:, None] + (S - T if query_start is None else int(query_start))
    return position - np.arange(S)[None, :]


def bias(
    slopes: npt.ArrayLike,
    T: int,
    S: int,
    right_slopes: npt.ArrayLike | None = None,
    query_start: int | None = None,
    **unknown: Never,
) -> Float64:
    """Build the bias that linear-bias attention adds to its scores.

        bias[h, t, s] = -slopes[h]       * (p - s)    for s <= p        (p = t + S - T)
        bias[h, t, s] = -right_slopes[h] * (s - p)    for s >  p

    An infinite slope hides its side (-inf); the query's own position, at distance 0, is always 0.

    Args:
        slopes: [H] or [B, H], at least 0 or inf: slope towards keys before the query.
        T: Number of queries.
        S: Number of keys.
        right_slopes: Like slopes: slope towards keys after the query. None means symmetric (the
            same slopes); `np.inf` (any shape that broadcasts) gives the causal bias.
        query_start: As for `distances`.

    Returns:
        [H, T, S] (or [B, H, T, S]), float64.

    Raises:
        ValueError: A slope is negative or NaN, slopes is no [H] or [B, H], or T or S is negative.

    Example:
        >>> bias([0.5], 1, 3).tolist()
        [[[-1.0, -0.5, 0.0]]]
        >>> bias([0.5], 2, 2, right_slopes=[np.inf]).tolist()
        [[[0.0, -inf], [-0.5, 0.0]]]

    Source: Press, Smith and Lewis, ICLR 2022, section 3; two-sided forms: the discussion of
    encoder attention in the paper's repository.
    """
    if unknown:
        keywords.refuse_unknown("bias", unknown, bias)
    left = checks.real_array("bias", "slopes", slopes).astype(np.float64)
    right = left
    if right_slopes is not None:
        right = checks.real_array("bias", "right_slopes", right_slopes).astype(np.float64)
    if left.ndim not in (1, 2):
        meant = f"; linbias.slopes({left:g}) are those of {left:g} heads" if left.ndim == 0 else ""
        raise ValueError(
            f"bias: slopes must have shape [H] or [B, H], got {list(left.shape)}{meant}"
        )
    for name, values in (("slopes", left), ("right_slopes", right)):
        checks.check_slope_values("bias", name, values)
    left, right = np.broadcast_arrays(left, right)
    order = distances(T, S, query_start)
    return _bias(left, right, order, order)


def _bias(left: Float64, right: Float64, order: npt.NDArray[np.int64], distance: Array) -> Float64:
    """Slopes [..., H], and by how many keys and how far each key lies back -> [..., H, T, S]."""
    slope = np.where(order >= 0, left[..., None, None], right[..., None, None])
    hidden = np.isinf(slope)  # and inf * 0 would be NaN
    # 0 minus, to give 0, not -0. A query sees its own key; a hidden side begins beside it.
    bias = 0.0 - np.where(hidden, 0.0, slope) * np.abs(distance)
    return np.where(hidden & (order != 0), -np.inf, bias)


@overload
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = ...,
    *,
    num_heads: int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Float64]: ...
@overload
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = ...,
    *,
    num_heads: int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Array: ...
@keywords.show_keywords(Options)
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    *,
    num_heads: int | None = None,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Array | tuple[Array, Float64]:
    """Softmax attention whose scores fall linearly with distance (ALiBi).

    Key s stands at position s, and query t at p = query_start + t; by default the last query
    stands at the last key, p = t + S - T:

        score[t, s] = scale * (q[t] . k[s]) - slope       * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right_slope * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    With causal=True only keys s <= p take part. T=2, S=4 and T=4, S=2 (x = takes part):

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    A query that may see no key gives a row of zeros and lse = -inf. Query head h reads key/value
    head h // (H // G). Everything is computed in float64.

    With positions, key s stands at x[s] and query t at xq[t] = x[p]: the distances p - s and s - p
    become xq[t] - x[s] and x[s] - xq[t]. `linbias.torch.attention` says more of them.

    Args:
        q: [..., H, T, D], any real dtype; leading axes are batch axes (none, one or more).
        k: [..., G, S, D]. H must be a multiple of G.
        v: [..., G, S, E].
        slopes: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys.
            None means `slopes(H)`; zeros mean no bias.
        causal: Hide the keys after the query. With False and right_slopes=None the bias is
            symmetric.
        right_slopes: Like slopes: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        key_range: [..., 2] or [..., G, 2], integers: first and one past last key of each batch
            row, or of each of its key/value heads; keys outside are never used, whatever they
            hold.
        query_start: [...], integers: the position of query 0 of each batch row, before the keys or
            beyond them too. None: the last query stands at the last key of the range (where heads
            have their own, of that which ends last).
        mask: Broadcasts to [..., H, T, S]. Bool: True takes part; keys that it hides must still be
            finite. Floating point, below inf: added to the scores, -inf hides.
        positions: [..., S] or [..., H, S], or [S] for all batch rows: where keys stand, as for
            `linbias.torch.attention`.
        query_positions: [..., T], [..., H, T] or [T], likewise: where queries stand.
        window: (left, right), as for `linbias.torch.attention`.
        query_range: [..., T, 2] or [T, 2], likewise.
        num_heads: H, where the heads lie side by side in the last axis: q [..., T, H * D], k [...,
            S, G * D] and v [..., S, G * E].
        return_lse: Also return lse.

    Returns:
        [..., H, T, E], or [..., T, H * E] with num_heads, in the dtype of q (float64 for
        integers); with return_lse also lse [..., H, T], float64.

    Raises:
        TypeError, ValueError: A shape, dtype or value breaks a rule above.

    Example:
        >>> q = k = np.zeros((1, 3, 2))
        >>> v = np.array([[[1.0], [2.0], [4.0]]])
        >>> attention(q, k, v, [0.0]).ravel().round(4).tolist()
        [1.0, 1.5, 2.3333]
        >>> attention(q, k, v, [np.inf]).ravel().tolist()
        [1.0, 2.0, 4.0]
        >>> attention(q, k, v, [0.0], window=(1, 0)).ravel().tolist()
        [1.0, 1.5, 3.0]
        >>> attention(q[0], k[0], v[0].repeat(2, 1), [np.inf, 0.0], num_heads=2).round(4).tolist()
        [[1.0, 1.0], [2.0, 1.5], [4.0, 2.3333]]

    Source: Press, Smith and Lewis, ICLR 2022, section 3.
    """
    if num_heads is not None:
        q, k, v = split_heads("attention", num_heads, q, k, v)
    inputs = prepare("attention", q, k, v, slopes, **options)
    steps = compute(inputs)
    out = inputs.restore(steps.output).astype(inputs.dtype)
    if num_heads is not None:
        out = out.swapaxes(-2, -3)
        out = out.reshape(*out.shape[:-2], math.prod(out.shape[-2:]))
    return (out, inputs.restore(steps.lse)) if return_lse else out


@keywords.show_keywords(Options)
def attention_weights(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    **options: Unpack[Options],
) -> Float64:
    """Compute the weights that `attention` gives to each key: softmax(score), to look at.

    Args:
        q, k, slopes, options: As for `attention`.

    Returns:
        [..., H, T, S], float64. A query that sees no key has zeros.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> attention_weights(np.zeros((1, 2, 1)), np.zeros((1, 2, 1)), [0.0]).tolist()
        [[[1.0, 0.0], [0.5, 0.5]]]
    """
    inputs = prepare("attention_weights", q, k, k, slopes, **options)
    return inputs.restore(compute(inputs).weights)


class Gradients(NamedTuple):
    """Gradients in the shapes of the arguments, float64; None where there was no such argument."""

    dq: Float64
    dk: Float64
    dv: Float64
    dslopes: Float64
    dright_slopes: Float64 | None  # None: causal
    dpositions: Float64 | None = None
    dquery_positions: Float64 | None = None


@keywords.show_keywords(Options)
def attention_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    *,
    dlse: npt.ArrayLike | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Differentiate `attention`, written out by hand as the kernels do it.

    With the weights P = softmax(score) and dP = dout v^T:

        dscore = P * (dP - sum(dout * out) + dlse)
        dq = scale * dscore k      dk = scale * dscore^T q      dv = P^T dout
        dslopes       = -sum dscore * (p - s) over s < p
        dright_slopes = -sum dscore * (s - p) over s > p

    With positions these have their distances, and a key pulls at the two places that its distance
    lies between:

        dx[s] = sum pull,   dxq[t] = -sum pull
        pull = slope * dscore for s <= p, -right_slope * dscore for s > p

    where dxq[t] is part of dx at the key of query t, unless query_positions are given. The
    gradient of an infinite slope is 0. With causal=False and right_slopes=None, the one slope of
    both sides has the gradient dslopes + dright_slopes.

    Args:
        dout: [..., H, T, E], gradient of the loss with respect to the output.
        q, k, v, slopes, options: As for `attention`.
        dlse: [..., H, T], gradient with respect to lse; None means zeros.

    Returns:
        dq, dk, dv, dslopes, dright_slopes, dpositions, dquery_positions.

    Raises:
        TypeError, ValueError: As `attention`; or dout or dlse has another shape than the output or
            lse.

    Example:
        >>> q = k = v = np.ones((1, 2, 1))
        >>> attention_backward(np.ones((1, 2, 1)), q, k, v, [0.0]).dv.ravel().tolist()
        [1.5, 0.5]
    """
    inputs = prepare("attention_backward", q, k, v, slopes, **options)
    rows = (*inputs.batch, *inputs.q.shape[1:3])
    given = {"dout": (dout, (*rows, inputs.v.shape[3]))}
    if dlse is not None:
        given["dlse"] = (dlse, rows)
    for name, (values, shape) in given.items():
        own = checks.real_array("attention_backward", name, values).shape
        if own != shape:
            raise ValueError(
                f"attention_backward: {name} must have shape {list(shape)}, got {list(own)}"
            )
    steps = compute(inputs)
    dout = np.asarray(dout, np.float64).reshape(steps.output.shape)
    dlse = 0.0 if dlse is None else np.asarray(dlse, np.float64).reshape(steps.lse.shape)
    # A weight can only grow at the cost of the others in its row, so what counts is by how much
    # dout . v of a key exceeds the row's mean, which is dout . out.
    delta = (dout * steps.output).sum(-1) - dlse
    dweight = dout @ inputs.per_query_head(inputs.v).swapaxes(-1, -2)
    dscore = steps.weights * (dweight - delta[..., None])
    # A slope enters the score of every pair on its side, times the distance.
    dslope = 0.0 - dscore * np.abs(inputs.distance)
    sides = inputs.order >= 0, inputs.order < 0
    dleft, dright = (
        inputs.sum_slope(np.where(side, dslope, 0.0), slope)
        for side, slope in zip(sides, (inputs.left, inputs.right), strict=True)
    )
    dpositions, dquery_positions = _position_gradients(inputs, dscore, options)
    return Gradients(
        dq=inputs.restore(inputs.scale * dscore @ inputs.per_query_head(inputs.k)),
        dk=inputs.restore(inputs.per_key_head(inputs.scale * dscore.swapaxes(-1, -2) @ inputs.q)),
        dv=inputs.restore(inputs.per_key_head(steps.weights.swapaxes(-1, -2) @ dout)),
        dslopes=dleft,
        dright_slopes=None if options.get("causal", True) else dright,
        dpositions=dpositions,
        dquery_positions=dquery_positions,
    )


def _position_gradients(
    inputs: Inputs, dscore: Float64, options: Options
) -> tuple[Float64 | None, Float64 | None]:
    """dscore [B, H, T, S] -> dpositions and dquery_positions; None where not given."""
    if inputs.positions is None or inputs.own_key is None:
        return None, None
    slope = np.where(
        inputs.order >= 0, inputs.left[..., None, None], -inputs.right[..., None, None]
    )
    pull = np.where(np.isinf(slope), 0.0, slope) * dscore
    of_keys, of_queries = pull.sum(-2), -pull.sum(-1)
    positions, query_positions = options.get("positions"), options.get("query_positions")
    if query_positions is None:
        own = inputs.own_key[..., None] == np.arange(inputs.k.shape[2])
        of_keys += (own * of_queries[..., None]).sum(-2)
    return (
        None if positions is None else inputs.sum_position(of_keys, positions),
        None if query_positions is None else inputs.sum_position(of_queries, query_positions),
    )


def merge(outs: Sequence[npt.ArrayLike], lses: Sequence[npt.ArrayLike]) -> tuple[Array, Float64]:
    """Merge attention over parts of the keys, as of a long sequence, into that over all.

        lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

    The parts are what `attention(..., return_lse=True)` gives for the same queries and disjoint
    sets of keys. A row that sees no key stays a row of zeros with lse = -inf.

    Args:
        outs: Arrays [..., T, E], one for each part.
        lses: Arrays [..., T], one for each part.

    Returns:
        out [..., T, E] in the dtype of outs[0], and lse [..., T], float64.

    Raises:
        ValueError: There is no part, or shapes differ.

    Example:
        >>> q, k, v = (np.ones((1, 1, 1)), np.ones((1, 4, 1)), np.arange(4.0).reshape(1, 4, 1))
        >>> parts = [attention(q, k, v, [0.5], key_range=part, query_start=3, return_lse=True)
        ...          for part in ([0, 2], [2, 4])]
        >>> np.allclose(merge(*zip(*parts))[0], attention(q, k, v, [0.5]))
        True
    """
    values = [checks.real_array("merge", "outs", out) for out in outs]
    logs = [checks.real_array("merge", "lses", lse) for lse in lses]
    _request.check_parts([out.shape for out in values], [lse.shape for lse in logs])
    parts = np.stack([lse.astype(np.float64) for lse in logs])
    highest = parts.max(0)
    highest = np.where(np.isneginf(highest), 0.0, highest)  # any finite number serves an empty row
    with np.errstate(divide="ignore"):
        lse = highest + np.log(np.exp(parts - highest).sum(0))
    share = np.exp(parts - np.where(np.isneginf(lse), 0.0, lse))[..., None]
    out = sum(s * out.astype(np.float64) for s, out in zip(share, values, strict=True))
    return np.asarray(out, values[0].dtype), lse


class Steps(NamedTuple):
    """Every step of attention on the way, [B, H, T, S] unless said otherwise."""

    raw: Float64  # q . k
    scaled: Float64
    bias: Float64  # with the numbers of a mask; -inf: hidden
    scores: Float64
    weights: Float64
    lse: Float64  # [B, H, T]
    output: Float64  # [B, H, T, E]


def compute(inputs: Inputs) -> Steps:
    """Attention as the formulas say it."""
    # One number for each pair of a query and a key: how well what one asks for meets what the
    # other offers.
    raw = inputs.q @ inputs.per_query_head(inputs.k).swapaxes(-1, -2)
    scaled = inputs.scale * raw
    # The only step that linear biases add: -slope * distance, and -inf where a key is hidden,
    # whatever its product is.
    bias = _bias(inputs.left, inputs.right, inputs.order, inputs.distance) + inputs.added
    bias = np.where(inputs.hidden, -np.inf, np.broadcast_to(bias, raw.shape))
    scores = np.where(np.isneginf(bias), -np.inf, scaled + bias)
    # Softmax. Taking the row's maximum off first changes no ratio, and no exponential can
    # overflow. An empty row has no maximum; any finite pivot gives it weights and a sum of exactly
    # 0.
    row_max = scores.max(-1, keepdims=True, initial=-np.inf)
    pivot = np.where(np.isneginf(row_max), 0.0, row_max)
    unnormalised = np.exp(scores - pivot)
    row_sum = unnormalised.sum(-1, keepdims=True)
    weights = unnormalised / np.where(row_sum == 0, 1.0, row_sum)
    # The log of the sum, which merges results over parts of the keys, and the mean of the values
    # under the weights.
    with np.errstate(divide="ignore"):
        lse = (pivot + np.log(row_sum))[..., 0]
    output = weights @ inputs.per_query_head(inputs.v)
    return Steps(raw, scaled, bias, scores, weights, lse, output)
