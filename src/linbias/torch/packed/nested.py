"""Nested tensors of the jagged layout: packed sequences under another name."""

from typing import Any

import torch
from torch import Tensor

from linbias.torch.operators.values import may_read
from linbias.torch.packed.varlen import attention_varlen


def is_nested(*arrays: Any) -> bool:
    for x in arrays:  # every call comes by here: a generator would take three times as long
        if isinstance(x, Tensor) and x.is_nested:
            return True
    return False


def attention(
    q: Tensor, k: Tensor, v: Tensor, *arguments: Any, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `attention` on nested tensors [B, H, lengths, D], each sequence by itself."""
    packed = [_packed(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    (rows, starts), (keys, key_starts), (values, value_starts) = packed
    if _differ(key_starts, value_starts):
        raise ValueError("attention: k and v are nested tensors whose sequences differ in length")
    for name, offsets in (("positions", key_starts), ("query_positions", starts)):
        if options.get(name) is not None:
            options[name] = _packed_places(name, options[name], offsets)
    if options.get("query_range") is not None:
        options["query_range"] = _packed_ranges(options["query_range"], starts)
    for name in ("mask", "key_bound"):
        if options.pop(name, None) is not None:
            raise ValueError(f"attention: {name} cannot be given with nested tensors")
    results = attention_varlen(
        rows, keys, values, starts, key_starts, *arguments, return_lse=True, **options
    )
    out, lse = (
        torch.nested.nested_tensor_from_jagged(x, offsets=starts).transpose(1, 2) for x in results
    )
    return (out, lse) if return_lse else out


def _differ(offsets: Tensor, others: Tensor) -> bool:
    return offsets is not others and may_read(offsets) and not torch.equal(offsets, others)


def _packed_places(name: str, x: Any, starts: Tensor) -> Tensor:
    """Nested positions [B, lengths] or [B, H, lengths] end to end: [total] or [total, H]."""
    if (
        not is_nested(x)
        or x.layout != torch.jagged
        or x.dim() not in (2, 3)
        or x._ragged_idx != x.dim() - 1
        or x.lengths() is not None
    ):
        raise TypeError(
            f"attention: {name} of nested tensors must be a contiguous jagged tensor [B, lengths]"
            " or [B, H, lengths]"
        )
    by_rows = x.transpose(1, 2) if x.dim() == 3 else x
    if _differ(by_rows.offsets(), starts):
        raise ValueError(f"attention: {name} is a nested tensor whose sequences differ in length")
    return by_rows.values()


def _packed_ranges(ranges: Any, starts: Tensor) -> Tensor:
    """Nested ranges [B, lengths, 2] end to end, [total, 2]."""
    if not is_nested(ranges) or ranges.layout != torch.jagged or ranges.dim() != 3:
        raise TypeError(
            "attention: query_range of nested tensors must be a jagged tensor [B, lengths, 2]"
        )
    if _differ(ranges.offsets(), starts):
        raise ValueError(
            "attention: query_range is a nested tensor whose sequences differ in length"
        )
    return ranges.values()


def as_jagged(*arrays: Tensor) -> tuple[Tensor, ...]:
    """Nested tensors of the older layout in the jagged one; the same tensor stays the same."""
    made: dict[int, Tensor] = {}
    for x in arrays:
        if id(x) not in made:
            made[id(x)] = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
    return tuple(made[id(x)] for x in arrays)


def _packed(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of all sequences end to end [total, heads, size], and where each begins."""
    way = (
        "torch.nested.nested_tensor([...], layout=torch.jagged).transpose(1, 2),"
        " or attention_varlen"
    )
    if not is_nested(x):
        raise TypeError(
            f"attention: q, k and v must all be nested tensors, {name} is not: use {way}"
        )
    ours: Any = x  # as a jagged tensor
    if (
        x.layout != torch.jagged
        or x.dim() != 4
        or ours._ragged_idx != 2
        or ours.lengths() is not None
    ):
        raise TypeError(
            f"attention: {name} must be a contiguous jagged tensor [B, H, lengths, D]: use {way}"
        )
    by_rows = x.transpose(1, 2)
    return by_rows.values(), by_rows.offsets()  # type: ignore[attr-defined]
