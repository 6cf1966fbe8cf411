"""`attention_varlen`: packed sequences, put into batches of about the same length."""

from collections import defaultdict

import torch
from torch import Tensor

from linbias.torch.functional import Slopes, as_slopes, attention, describe

# Lengths up to the same multiple of it share a batch. The padding costs half of it per sequence on average; a batch
# of its own costs a call, as much as a sequence of about 100 tokens.
_GRAIN = 64


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    left: Slopes | None = None,
    *,
    causal: bool = True,
    right: Slopes | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `attention` on B sequences packed end to end; none sees another.

    Sequence b owns the rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] of q and out, and likewise of k and v;
    within it everything is as for `attention` (its last query stands at its last key). A sequence may be empty.
    Sequences of about the same length run as one batch.

    Args:
        q: [total_q, H, D].
        k: [total_k, G, D].
        v: [total_k, G, E].
        cu_seqlens_q: [B + 1], integers that start at 0, do not fall, and end at total_q.
        cu_seqlens_k: [B + 1], likewise for k and v.
        left: [H] or [B, H], as for `attention`.
        causal, right, scale, dropout, tolerance, implementation, return_lse: As for `attention`.

    Returns:
        [total_q, H, E]; with return_lse also lse [total_q, H].

    Raises:
        TypeError, ValueError, NotImplementedError: As `attention`, or the lengths break a rule above.

    Example:
        >>> q = k = v = torch.ones(5, 2, 4)
        >>> lengths = torch.tensor([0, 2, 5])
        >>> attention_varlen(q, k, v, lengths, lengths).shape
        torch.Size([5, 2, 4])
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape = describe(name, array, "attention_varlen").shape
        if len(shape) != 3:
            raise ValueError(
                f"attention_varlen: {name} must have 3 axes, total, heads, size, got {list(shape)}"
            )
    starts_q = _offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    starts_k = _offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"attention_varlen: cu_seqlens_q counts {len(starts_q) - 1} sequences"
            f" but cu_seqlens_k {len(starts_k) - 1}"
        )
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    left, right = (None if s is None else as_slopes(s, wide, q.device) for s in (left, right))
    for name, slope in (("left", left), ("right", right)):
        if slope is not None and slope.dim() == 2 and len(slope) != len(starts_q) - 1:
            raise ValueError(
                f"attention_varlen: {name} has {len(slope)} rows for {len(starts_q) - 1} sequences"
            )
    outs, lses = [q.new_empty(0, q.shape[1], v.shape[2])], [q.new_empty(0, q.shape[1], dtype=wide)]
    order = [torch.empty(0, dtype=torch.int64)]
    for batch in _batches(starts_q, starts_k):
        rows, real, _ = _padded(starts_q, batch)
        keys, held, key_range = _padded(starts_k, batch)
        own = [s if s is None or s.dim() < 2 else s[batch] for s in (left, right)]
        out, lse = attention(
            _take(q, rows, real),
            _take(k, keys, held),
            _take(v, keys, held),
            own[0],
            causal=causal,
            right=own[1],
            scale=scale,
            key_range=None if held.all() else key_range.to(q.device),
            dropout=dropout,
            tolerance=tolerance,
            implementation=implementation,
            return_lse=True,
        )
        chosen = real.to(q.device)
        outs.append(out.transpose(1, 2)[chosen])
        lses.append(lse.transpose(1, 2)[chosen])
        order.append(rows[real])
    back = torch.cat(order).argsort().to(q.device)
    out = torch.cat(outs)[back]
    return (out, torch.cat(lses)[back]) if return_lse else out


def _batches(starts_q: list[int], starts_k: list[int]) -> list[list[int]]:
    """Group the sequences that have queries by their lengths, rounded up to the grain."""
    groups = defaultdict(list)
    for b in range(len(starts_q) - 1):
        lengths = [starts[b + 1] - starts[b] for starts in (starts_q, starts_k)]
        if lengths[0]:
            groups[tuple(-(-n // _GRAIN) for n in lengths)].append(b)
    return list(groups.values())


def _padded(starts: list[int], batch: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers [B, longest], ends aligned; which of them are real; and [B, 2], where those begin and end."""
    first, stop = (torch.tensor([starts[b + i] for b in batch])[:, None] for i in (0, 1))
    longest = int((stop - first).max())
    rows = stop - longest + torch.arange(longest)
    begin = longest - (stop - first)
    return rows, rows >= first, torch.cat([begin, torch.full_like(begin, longest)], dim=1)


def _take(x: Tensor, rows: Tensor, real: Tensor) -> Tensor:
    """Rows of x as [B, heads, longest, size], zeros where they are not real."""
    taken = x[rows.clamp(min=0).to(x.device)]
    if not real.all():  # not by a product: a neighbour's NaN must not come through
        taken = torch.where(real.to(x.device)[..., None, None], taken, 0)
    return taken.transpose(1, 2)


def _offsets(name: str, offsets: Tensor, total: int) -> list[int]:
    described = describe(name, offsets, "attention_varlen")
    if not described.dtype.startswith(("int", "uint")) or len(described.shape) != 1:
        raise ValueError(
            f"attention_varlen: {name} must be a row of integers, got {described.dtype} {described}"
        )
    starts: list[int] = offsets.tolist()
    if not starts or starts[0] != 0 or starts[-1] != total or starts != sorted(starts):
        raise ValueError(
            f"attention_varlen: {name} must start at 0, never fall and end at {total}, got {starts}"
        )
    return starts
