"""`attention` and `attention_weights`, the functions that a program calls."""

from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor

from linbias._request import keywords
from linbias.torch import any_order, standing
from linbias.torch.call import Slopes, prepare, run
from linbias.torch.impl import dense
from linbias.torch.operators.operator import without_autocast
from linbias.torch.packed import nested
from linbias.torch.shard import refuse_shard, shard_here
from linbias.torch.standing import Positions


class Weighing(TypedDict, total=False):
    """The keywords of `attention` that say what each key weighs."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: Tensor | None
    query_start: Tensor | None
    mask: Tensor | None
    positions: Positions | None
    query_positions: Positions | None
    window: tuple[int, int] | None
    query_range: Tensor | None


class Options(Weighing, total=False):
    """The keywords of `attention` that say what is computed."""

    key_bound: Tensor | None
    dropout: float
    tolerance: float | None


_OPTIONS = frozenset(Options.__annotations__)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = ...,
    *,
    implementation: str = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = ...,
    *,
    implementation: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@keywords.show_keywords(Options)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
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
    head h // (H // G). Scores, softmax and sums are float32 for 16-bit inputs and in q's dtype
    otherwise. Differentiable in q, k, v, slopes, right_slopes and positions, through out and lse;
    twice, and in forward mode, only by `dense`. Works under `torch.func.grad`, `vjp`, `jacrev` and
    `vmap`. Under autocast q, k and v are cast as for `scaled_dot_product_attention`. Nested
    tensors [B, H, lengths, D] of the jagged layout run by `attention_varlen`.

    With positions, key s stands at x[s] and query t at xq[t] = x[p]: the distances p - s and s - p
    become xq[t] - x[s] and x[s] - xq[t], for time stamps, or the sums of -log of forget gates
    (slopes 1). Which side a key is on, and what is hidden, goes by order alone, also among keys at
    one place. If causal=False without query_start, order is that of the positions: keys come in
    any order, and a query of its own position stands at the last key that is not beyond it. Arrays
    that are in order already keep theirs where positions tie, which matters where a slope is inf.

    Args:
        q: [B, H, T, D], float16, bfloat16, float32 or float64, any strides.
        k: [B, G, S, D], dtype and device of q. H must be a multiple of G.
        v: [B, G, S, E], likewise.
        slopes: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys. A
            tensor, or anything that makes one. None means `linbias.slopes(H)`; zeros mean no bias.
            Values are checked on the CPU and in eager mode.
        causal: Hide the keys after the query. With False and right_slopes=None the bias is
            symmetric.
        right_slopes: Like slopes: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        key_range: [B, 2] or [B, G, 2], integers: first and one past last key of each batch row, or
            of each of its key/value heads; keys outside are never used, whatever they hold. For
            left padding, [[num_padding, S], ...]; for a partly filled cache, [[0, num_filled],
            ...].
        query_start: [B], integers: the position of query 0 of each batch row, from -2^30 to 2^30.
            None: the last query stands at the last key of the range (where heads have their own,
            of that which ends last). For right padding with T = S, zeros.
        mask: Broadcasts to [B, H, T, S]. Bool: True takes part; keys that it hides must still be
            finite. Floating point, below inf: added to the scores, -inf hides; differentiable.
            Only `sdpa` and `dense` take one, and read all keys.
        positions: [S] for all batch rows, [B, S] or [B, H, S], where B may be 1: where keys stand.
            A tensor, or what NumPy makes an array of: float32 or float64 within 2^53 of 0,
            integers within 2^53 of each other, or datetime64 and timedelta64, which count in
            their own unit. Never falling within the range of keys, unless order is that of the
            positions; outside the range they may be anything. Differences are formed in float64.
            None: key s at s. Values are checked on the CPU and in eager mode; elsewhere keys must
            be sorted.
        query_positions: [T], [B, T] or [B, H, T], likewise: where queries stand; each between
            those of the keys before and after it, unless order is that of the positions, which
            `torch.compile` and `vmap` cannot see. None: at key p, 0 <= p < S, or the nearest to it
            within the range.
        window: (left, right), integers: a query at p sees only the keys p - left .. p + right, -1
            for no limit on that side. Counted in keys, also where these have positions.
        query_range: [T, 2] or [B, T, 2], integers: first and one past last key that each
            query sees, beside what else hides keys; 0 <= first <= end <= S. For chunks with
            context, documents, and with causal=False prefixes that see themselves both ways. Keys
            that a range hides must still be finite.
        key_bound: [B, G], floating point: at least the norm of every key in the range; all keys
            and values must be finite. Decoding then reads the near keys only, instead of every key
            for its norm. A promise, not checked; an implementation may do without it.
        dropout: Probability that a weight is dropped, in [0, 1 - 2^-32]; the others are divided by
            1 - dropout. lse is that without dropout. Drawn from PyTorch's generator, alike for all
            implementations but `sdpa`.
        tolerance: Largest share of a row's probability that far keys, never read, may hold
            together. None means 2^-53, 2^-24, 2^-14 and 2^-12 for float64, float32, float16 and
            bfloat16; 0 reads every key.
        implementation: "auto" takes the first that can run the call: `triton` (CUDA), `cpu` (the
            compiled core) and `blocked` (any device) are near to far, `sdpa` is PyTorch's
            attention with the bias as its mask, `dense` the whole score matrix. A name is obeyed
            or refused. `linbias doctor --call` says what "auto" takes, and why.
        return_lse: Also return lse.

    Returns:
        [B, H, T, E] in q's dtype; with return_lse also lse [B, H, T], float32 (float64 for float64
        inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument.
        ValueError: A shape, device or value breaks a rule above; the message names argument, rule
            and value.
        NotImplementedError: The implementation cannot run this call, or give this derivative; the
            message says why.

    Example:
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> attention(q, k, v).shape
        torch.Size([1, 2, 3, 4])

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    if not _OPTIONS.issuperset(options):
        keywords.refuse_unknown("attention", options, attention)
    if nested.is_nested(q, k, v):
        return nested.attention(
            q, k, v, slopes, implementation=implementation, return_lse=return_lse, **options
        )
    if (shared := shard_here()) is not None:
        return shared(
            q, k, v, slopes, implementation=implementation, return_lse=return_lse, **options
        )
    inputs, problem = prepare("attention", q, k, v, slopes, lse=return_lse, **options)
    return run(inputs, problem, implementation, return_lse)


@keywords.show_keywords(Weighing)
def attention_weights(
    q: Tensor, k: Tensor, slopes: Slopes | None = None, **options: Unpack[Weighing]
) -> Tensor:
    """Compute the weights that `attention` gives to each key: the whole matrix softmax(score).

    Differentiable in q, k, the slopes and positions.

    Args:
        q, k, slopes, causal, right_slopes, scale, key_range, query_start, mask, positions,
            query_positions, window, query_range: As for `attention`.

    Returns:
        [B, H, T, S], float32 (float64 for float64 inputs). A query that sees no key has zeros.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 4)
        >>> attention_weights(q, k, [0.0])
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
    """
    if not options.keys() <= Weighing.__annotations__.keys():
        keywords.refuse_unknown("attention_weights", options, attention_weights)
    refuse_shard("attention_weights")
    inputs, problem = prepare("attention_weights", q, k, k, slopes, **options)
    with without_autocast(inputs.q.device):
        places: list[Tensor] = []
        if problem.any_order:
            inputs, *places = any_order.sort(inputs, problem)
        if problem.query_positions or problem.any_order:
            inputs, _ = standing.stand_near(inputs)
        weights = dense.attention_weights(inputs)[0]
        for axis, place in enumerate(places, start=2):
            weights = any_order.as_given(weights, place, axis)
        return weights
