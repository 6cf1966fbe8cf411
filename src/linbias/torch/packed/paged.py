"""Attention to caches in pages, as engines that serve models keep them."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from linbias import _request
from linbias._request import Described, Rule, axes, keywords
from linbias.torch.call import Slopes, describe, described, signature
from linbias.torch.operators.direct import unobserved
from linbias.torch.operators.operator import without_autocast
from linbias.torch.operators.values import known_values
from linbias.torch.packed import offsets, placing
from linbias.torch.packed.offsets import Pages
from linbias.torch.packed.placing import Placed
from linbias.torch.packed.sequences import Packed
from linbias.torch.packed.varlen import Shared, attention_varlen, take_slopes
from linbias.torch.shard import refuse_shard

_RULES = {
    "q": Rule(axes("total_q H D"), "floats"),
    "k_pages": Rule(axes("num_pages page_size G D"), "floats"),
    "v_pages": Rule(axes("num_pages page_size G E"), "floats"),
    "seq_lens": Rule(axes("B"), "integers"),
    "block_table": Rule(axes("B max_pages"), "integers"),
    "page_norms": Rule(axes("num_pages G"), "floats"),
    "k": Rule(axes("n G D"), "floats"),
    "v": Rule(axes("n G E"), "floats"),
    "slots": Rule(axes("n"), "integers"),
}


@keywords.show_keywords(Shared)
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slopes: Slopes | None = None,
    *,
    cu_seqlens_q: Tensor,
    page_norms: Tensor | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
    **options: Unpack[Shared],
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `attention` of new tokens on caches whose keys and values lie in pages.

    Key s of sequence b is row s % page_size of page block_table[b, s // page_size]. Its queries
    are the rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] of q, and the last one stands at the last
    of its seq_lens[b] keys: whole prompts, parts of them, one new token and several drafts go into
    one call, mixed. New keys are in the pages already (`write_pages`). Sequences may have pages in
    common. Within a sequence everything is as for `attention`; nothing is differentiated.

    The compiled core and the Triton kernels follow the table and copy nothing; with page_norms
    they do not touch pages that no query reaches. Other implementations gather the pages first.

    Args:
        q: [total_q, H, D].
        k_pages: [num_pages, page_size, G, D], of any strides; q's dtype and device.
        v_pages: [num_pages, page_size, G, E], likewise.
        block_table: [B, max_pages], integers: the pages of each sequence. What lies behind its
            last page is not looked at.
        seq_lens: [B], integers: keys of each sequence, new ones included, at most max_pages *
            page_size.
        cu_seqlens_q: [B + 1], integers from 0 to total_q that do not fall.
        page_norms: [num_pages, G]: at least the norm of each key of a page, and NaN where a key or
            value is not finite; `write_pages` keeps it. None: all keys are read for it.
        key_range, query_start: As for `attention`, counted from the first key of each sequence.
        query_range: [total_q, 2], likewise.
        All others: As for `attention`.

    Returns:
        [total_q, H, E]; with return_lse also lse [total_q, H].

    Raises:
        TypeError, ValueError: As `attention`, or a table or a length points outside the pages
            (looked for where the tensors lie on the CPU).
        NotImplementedError: As `attention`, or a gradient is asked for.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 10, 16, 2, 8)
        >>> table, lengths = torch.tensor([[7, 2], [9, 0]]), torch.tensor([20, 3])
        >>> q, offsets = torch.randn(4, 2, 8), torch.tensor([0, 1, 4])
        >>> attention_paged(q, k_pages, v_pages, table, lengths, cu_seqlens_q=offsets).shape
        torch.Size([4, 2, 8])

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, for the pages.
    """
    given = q, k_pages, v_pages, block_table, seq_lens, slopes, cu_seqlens_q, page_norms
    call, placed, pages = check("attention_paged", given, implementation, options)
    with without_autocast(q.device):
        results = offsets.run(call, placed, pages, return_lse)
        out, lse = _gathered(call, placed.lengths_k, pages) if results is None else results
    return (out, lse) if return_lse else out


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    page_norms: Tensor | None = None,
) -> None:
    """Write new keys and values into pages, in place, and keep the norms of these pages.

    The norm of a page starts again where its first row is written: engines hand pages on.

    Args:
        k, v: [n, G, D] and [n, G, E], in the dtype of the pages.
        k_pages, v_pages: As for `attention_paged`.
        slots: [n], integers: page * page_size + row, where each token goes; negative: nowhere.
        page_norms: [num_pages, G], float32 (float64 for float64 pages), or None.

    Raises:
        TypeError, ValueError: A dtype or shape breaks a rule above, or a slot lies outside the
            pages.

    Example:
        >>> (k_pages, v_pages), norms = torch.zeros(2, 3, 4, 1, 2), torch.zeros(3, 1)
        >>> k = v = torch.tensor([[[3.0, 4.0]]])
        >>> write_pages(k, v, k_pages, v_pages, torch.tensor([9]), norms)
        >>> k_pages[2, 1], norms[2]
        (tensor([[3., 4.]]), tensor([5.0000]))
    """
    arrays = k, v, k_pages, v_pages, page_norms
    writer("write_pages", slots, *arrays)(*arrays)


Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]


def writer(
    function: str,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_norms: Tensor | None,
) -> Write:
    """Check arrays for `write_pages`; returns what writes them, and others of the same form."""
    arrays = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, "slots": slots}
    _check_arrays(function, **arrays, page_norms=page_norms)
    num_slots, known = k_pages.shape[:2].numel(), known_values(slots)
    if known is not None and known.max(initial=-1) >= num_slots:
        raise ValueError(
            f"{function}: slots must be below {num_slots}, the rows of all pages, got"
            f" {known.max()}"
        )
    by_core = known is not None and offsets.takes_as_they_lie(k, v, k_pages, v_pages, page_norms)
    return offsets.Writer(slots, k, v, k_pages, v_pages) if by_core else _Writer(slots)


class _Writer:
    """Writes to slots by PyTorch's operations."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots.long()

    def __call__(
        self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_norms: Tensor | None
    ) -> None:
        written = self._slots >= 0
        slots, k, v = self._slots[written], k[written], v[written]
        page, row = slots // k_pages.shape[1], slots % k_pages.shape[1]
        k_pages[page, row], v_pages[page, row] = k, v
        if page_norms is not None:
            norms = norms_of(k, v, page_norms.dtype)
            page_norms[page[row == 0]] = 0
            page_norms.scatter_reduce_(0, page[:, None].expand_as(norms), norms, "amax")


def norms_of(k: Tensor, v: Tensor, wide: torch.dtype) -> Tensor:
    """[n, G]: at least the norms of keys [n, G, D]; NaN where one or its value is not finite."""
    # Rounded up, and by what may vanish of small squares; 0 * x is NaN where x is not finite.
    up, least = 1 + 4 * (k.shape[2] + 8) * torch.finfo(wide).eps, torch.finfo(wide).tiny ** 0.5
    norms = k.to(wide).norm(dim=-1) * up + k.shape[2] * least
    return norms + (v * 0).sum(-1).to(wide)


Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Slopes | None, Tensor, Tensor | None]


def check(
    function: str, given: Arguments, implementation: str, options: Shared
) -> tuple[Packed, Placed, Pages]:
    """What the arguments ask for, and where queries and keys lie."""
    q, k_pages, v_pages, block_table, seq_lens, slopes, cu_seqlens_q, page_norms = given
    if not options.keys() <= Shared.__annotations__.keys():
        keywords.refuse_unknown(function, options, attention_paged)
    refuse_shard(function)
    _check_arrays(
        function,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        seq_lens=seq_lens,
        block_table=block_table,
        page_norms=page_norms,
    )
    starts = placing.offsets(function, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    if len(starts) - 1 != len(seq_lens):
        raise ValueError(
            f"{function}: cu_seqlens_q counts {len(starts) - 1} sequences but seq_lens"
            f" {len(seq_lens)}"
        )
    if torch.is_grad_enabled():
        arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "slopes": slopes}
        for name, x in (*arrays.items(), ("right_slopes", options.get("right_slopes"))):
            if isinstance(x, Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{function}: {name} must not require a gradient, which caches in pages do not"
                    " have; call it under torch.no_grad(), or attention_varlen"
                )
    asked: dict[str, Any] = {**options}
    left, right = take_slopes(function, q, slopes, asked)
    call = Packed(
        q=q,
        k=k_pages,
        v=v_pages,
        left=left,
        right=right,
        positions=None,
        query_positions=None,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q,
        implementation=implementation,
        **asked,
    )
    check_table(function, block_table, seq_lens, k_pages)
    placed = placing.place(function, call, starts, seq_lens.cpu().long())
    return call, placed, Pages(block_table, seq_lens, page_norms)


def _check_arrays(function: str, **arrays: Tensor | None) -> None:
    """Sizes that share a letter agree; numbers have the dtype and device of the first array."""
    try:
        signatures = [None if x is None else signature(x) for x in arrays.values()]
        _check_signatures(function, tuple(arrays), *signatures)
    except TypeError:
        described = {n: describe(n, x, function) for n, x in arrays.items() if x is not None}
        _check_described(function, described)


@functools.lru_cache(maxsize=256)
def _check_signatures(function: str, names: tuple[str, ...], *signatures: Any) -> None:
    """As `_check_described`; most calls are as one before."""
    given = zip(names, signatures, strict=True)
    _check_described(function, {n: described(*x) for n, x in given if x is not None})


def _check_described(function: str, arrays: dict[str, Described]) -> None:
    sizes: dict[str, int | str] = {}
    like, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        rule = _RULES[name]
        letters = rule.axes[0]
        if len(array.shape) == len(letters):
            for letter, size in zip(letters, array.shape, strict=True):
                sizes.setdefault(str(letter), size)
        known = {str(letter): sizes.get(str(letter), str(letter)) for letter in letters}
        device = first.device if rule.holds == "floats" else None
        _request.check_array(function, name, array, rule, known, device)
        if rule.holds == "floats" and name != "page_norms" and array.dtype != first.dtype:
            raise TypeError(f"{function}: {name} is {array.dtype} but {like} is {first.dtype}")


def check_table(function: str, table: Tensor, seq_lens: Tensor, k_pages: Tensor) -> None:
    """Lengths fit the table, and what it says of them is a page; where its values are known."""
    num_pages, page_size = k_pages.shape[:2]
    if page_size == 0:
        raise ValueError(f"{function}: pages must have at least 1 row, got pages of 0")
    if not (table.is_cpu and seq_lens.is_cpu and unobserved(table, seq_lens)):
        return
    lengths, pages = seq_lens.numpy().astype(np.int64), table.numpy()
    most = pages.shape[1] * page_size
    longest = int(lengths.max(initial=0))
    for b in np.flatnonzero((lengths < 0) | (lengths > most))[:1]:
        raise ValueError(
            f"{function}: seq_lens must be in [0, {most}], the rows of the {pages.shape[1]} pages"
            f" of a sequence, got {lengths[b]} of sequence {b}"
        )
    pages = pages[:, : -(-longest // page_size)]
    if pages.min(initial=0) >= 0 and pages.max(initial=0) < num_pages:
        return
    used = np.arange(pages.shape[1]) * page_size < lengths[:, None]
    for b, i in np.argwhere(used & ((pages < 0) | (pages >= num_pages)))[:1]:
        raise ValueError(
            f"{function}: block_table must be in [0, {num_pages}), the pages that there are, got"
            f" {pages[b, i]} for page {i} of sequence {b}"
        )


def _gathered(call: Packed, lengths: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
    """The keys of all sequences out of their pages, and packed attention to them."""
    ends, size = placing.ends(lengths), call.k.shape[1]
    own = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(lengths)
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    own, sequence = own.to(call.q.device), sequence.to(call.q.device)
    page = pages.block_table.to(call.q.device)[sequence, own // size].long()
    k, v = (x[page, own % size] for x in (call.k, call.v))
    out, lse = attention_varlen(
        call.q,
        k,
        v,
        call.cu_seqlens_q,
        ends,
        call.left,
        implementation=call.implementation,
        return_lse=True,
        causal=call.causal,
        right_slopes=call.right,
        scale=call.scale,
        key_range=call.key_range,
        query_start=call.query_start,
        window=call.window,
        query_range=call.query_range,
        tolerance=call.tolerance,
    )
    return out, lse
