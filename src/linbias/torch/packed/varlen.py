"""`attention_varlen`: packed sequences, by their offsets in one call of the compiled core or of
Triton's kernels, and for other implementations in batches of about the same length.
"""

from collections import defaultdict
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from linbias import _request
from linbias._request import Rule, axes, checks, keywords
from linbias.torch import standing
from linbias.torch.call import (
    Slopes,
    as_slopes,
    autocast,
    describe,
    prepare,
    run,
    widen,
)
from linbias.torch.dropout import draw_seed
from linbias.torch.operators.values import readable
from linbias.torch.packed import offsets, placing
from linbias.torch.packed import sequences as packed
from linbias.torch.packed.placing import Placed
from linbias.torch.shard import refuse_shard
from linbias.torch.standing import Positions

# Lengths up to the same multiple of it share a batch: padding costs half of it on average, and a
# batch of its own as much as a sequence of about 100 tokens. With positions nothing is padded: it
# would have to stand somewhere.
_GRAIN = 64


class Shared(TypedDict, total=False):
    """The keywords of `attention` that packed sequences and caches in pages have too."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    key_range: Tensor | None
    query_start: Tensor | None
    window: tuple[int, int] | None
    query_range: Tensor | None
    tolerance: float | None


class Options(Shared, total=False):
    """Those that packed sequences alone have too."""

    positions: Positions | None
    query_positions: Positions | None
    dropout: float


@keywords.show_keywords(Options)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `attention` on B sequences packed end to end; none sees another.

    Sequence b owns the rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] of q and out, and likewise of k
    and v; within it everything is as for `attention`. It may be empty. Under `torch.compile` and
    `torch.export` all of it is one operator, whose backward pass runs forward once more.

    Args:
        q: [total_q, H, D].
        k: [total_k, G, D].
        v: [total_k, G, E].
        cu_seqlens_q: [B + 1], integers from 0 to total_q that do not fall.
        cu_seqlens_k: [B + 1], likewise for k and v.
        key_range, query_start: As for `attention`, counted from the first key of each sequence.
        query_range: [total_q, 2], likewise.
        positions: [total_k] or [total_k, H], otherwise as for `attention`: where keys stand. Only
            differences within a sequence count. Sequences of one length share a call.
        query_positions: [total_q] or [total_q, H], likewise: where queries stand.
        All others: As for `attention`.

    Returns:
        [total_q, H, E]; with return_lse also lse [total_q, H].

    Raises:
        TypeError, ValueError, NotImplementedError: As `attention`, or for wrong lengths.

    Example:
        >>> q = k = v = torch.ones(5, 2, 4)
        >>> lengths = torch.tensor([0, 2, 5])
        >>> attention_varlen(q, k, v, lengths, lengths).shape
        torch.Size([5, 2, 4])
    """
    if not options.keys() <= Options.__annotations__.keys():
        keywords.refuse_unknown("attention_varlen", options, attention_varlen)
    refuse_shard("attention_varlen")
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape = describe(name, array, "attention_varlen").shape
        if len(shape) != 3:
            raise ValueError(
                f"attention_varlen: {name} must have 3 axes, total, heads, size, got {list(shape)}"
            )
    given: dict[str, Any] = {**options}
    _as_places(given, q, k)
    left, right = take_slopes("attention_varlen", q, slopes, given)
    call = packed.Packed(
        q=q,
        k=k,
        v=v,
        left=left,
        right=right,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        implementation=implementation,
        **{"positions": None, "query_positions": None, **given},
    )
    if any(isinstance(x, Tensor) and readable(x) is None for x in (cu_seqlens_q, cu_seqlens_k)):
        q, k, v = autocast(q, k, v)
        seed = draw_seed(q.device) if call.dropout else None
        out, lse = _operator(*call._replace(q=q, k=k, v=v, seed=seed))
    else:
        out, lse = _run(call)
    return (out, lse) if return_lse else out


def take_slopes(
    function: str, q: Tensor, slopes: Slopes | None, options: dict[str, Any]
) -> list[Tensor | None]:
    """Those of both sides, wide; integers among the options become int64."""
    widen(options)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sides = {"slopes": slopes, "right_slopes": options.pop("right_slopes", None)}
    return [
        None if x is None else as_slopes(function, name, x, wide, q.device)
        for name, x in sides.items()
    ]


def _run(call: packed.Packed) -> packed.Results:
    function = "attention_varlen"
    starts_q = placing.offsets(function, "cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    starts_k = placing.offsets(function, "cu_seqlens_k", call.cu_seqlens_k, call.k.shape[0])
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"attention_varlen: cu_seqlens_q counts {len(starts_q) - 1} sequences"
            f" but cu_seqlens_k {len(starts_k) - 1}"
        )
    placed = placing.place(function, call, starts_q, starts_k.diff())
    if (results := offsets.run(call, placed)) is not None:
        return packed.Results(*results)
    return _in_batches(call, placed, starts_q.tolist(), starts_k.tolist())


def _in_batches(
    call: packed.Packed, where: Placed, starts_q: list[int], starts_k: list[int]
) -> packed.Results:
    """Each batch of sequences of about the same length in a call of `attention`, padded."""
    q, k, v, left, right, x, xq = call[:7]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs, lses = [q.new_empty(0, q.shape[1], v.shape[2])], [q.new_empty(0, q.shape[1], dtype=wide)]
    order = [torch.empty(0, dtype=torch.int64)]
    lengths = where.offsets.diff().tolist(), where.lengths_k.tolist()
    batches = _batches(*lengths, _GRAIN if x is None else 1)
    given = where.ranges(k.shape[1]), where.starts()
    if not batches:
        # The empty result is a function of its arguments, too, with gradients of zeros.
        nothing = sum(y.sum() for y in (q, k, v, left, right) if y is not None)
        outs, lses = [outs[0] + nothing], [lses[0] + nothing]
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "lse": True}
    options |= {"dropout": call.dropout, "tolerance": call.tolerance, "window": call.window}
    for batch in batches:
        rows, real = _padded(starts_q, batch)
        keys, held = _padded(starts_k, batch)
        own = [s if s is None or s.dim() < 2 else s[batch] for s in (left, right)]
        # Sequences without padding and placement of their own need neither argument.
        plain = held.all() and real.all() and where.query_start is None
        ranges, starts = (None if plain else y[batch].to(q.device) for y in given)
        if x is not None and call.query_start is None:
            starts = None  # as the call has it: where not causal, queries look for their keys
        placed: dict[str, Any] = {
            "right_slopes": own[1],
            "key_range": ranges,
            "query_start": starts,
        }
        if x is not None:
            placed["positions"] = _take_places(x, keys)
        if xq is not None:
            placed["query_positions"] = _take_places(xq, rows)
        if call.query_range is not None:
            placed["query_range"] = _take(call.query_range[:, None], rows, real)[:, 0]
        queries = _take(q, rows, real)
        own_k, own_v = (_take(y, keys, held) for y in (k, v))
        inputs, problem = prepare("attention", queries, own_k, own_v, own[0], **placed, **options)
        out, lse = run(inputs, problem, call.implementation, True)
        chosen = real.to(q.device)
        outs.append(out.transpose(1, 2)[chosen])
        lses.append(lse.transpose(1, 2)[chosen])
        order.append(rows[real])
    back = torch.cat(order).argsort().to(q.device)
    return packed.Results(out=torch.cat(outs)[back], lse=torch.cat(lses)[back])


_operator = packed.define(_run)


def _batches(lengths_q: list[int], lengths_k: list[int], grain: int) -> list[list[int]]:
    """Group the sequences that have queries by their lengths, rounded up to the grain."""
    groups = defaultdict(list)
    for b, lengths in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if lengths[0]:
            groups[tuple(-(-n // grain) for n in lengths)].append(b)
    return list(groups.values())


def _padded(starts: list[int], batch: list[int]) -> tuple[Tensor, Tensor]:
    """Row numbers [B, longest], padded at the end, and which of them are real."""
    first, stop = (torch.tensor([starts[b + i] for b in batch])[:, None] for i in (0, 1))
    rows = first + torch.arange(int((stop - first).max()))
    return rows, rows < stop


def _take(x: Tensor, rows: Tensor, real: Tensor) -> Tensor:
    """Rows of x as [B, heads, longest, size], zeros where they are not real."""
    taken = x[rows.clamp(max=max(0, len(x) - 1)).to(x.device)]
    if not real.all():  # not by a product: a neighbour's NaN must not come through
        taken = torch.where(real.to(x.device)[..., None, None], taken, 0)
    return taken.transpose(1, 2)


def _as_places(options: dict[str, Any], q: Tensor, k: Tensor) -> None:
    """Make tensors of positions, and check them as far as they are those of all sequences."""
    function, H = "attention_varlen", q.shape[1]
    if options.get("query_positions") is not None and options.get("positions") is None:
        raise ValueError(
            f"{function}: query_positions lie among positions of keys; give positions too"
        )
    totals = {"positions": ("total_k", k.shape[0]), "query_positions": ("total_q", q.shape[0])}
    # What is no tensor yet is read along its last axis: that of the tokens, for a while.
    for name in totals:
        if not isinstance(x := options.get(name), Tensor) and x is not None:
            options[name] = checks.as_array(function, name, x).T
    turned = [name for name in totals if isinstance(options.get(name), np.ndarray)]
    standing.as_tensors(function, options, q.device)
    for name, (total, n) in totals.items():
        if (x := options.get(name)) is None:
            continue
        x = x.mT if name in turned and x.dim() == 2 else x
        described = describe(name, x, function)
        rule = Rule(axes(total, f"{total} H"), "positions")
        device = describe("q", q, function).device
        _request.check_array(function, name, described, rule, {total: n, "H": H}, device)
        options[name] = x if x.is_floating_point() else x.long()


def _take_places(x: Tensor, rows: Tensor) -> Tensor:
    """Positions [total] or [total, H] of rows without padding, as [B, n] or [B, H, n]."""
    taken = x[rows.to(x.device)]
    return taken if taken.dim() == 2 else taken.mT
