"""What the masks of `torch.nn.MultiheadAttention` hide, said as `attention` takes it.

Causal masks and padding at the ends of rows are recognised by their values, which each call reads,
because a tensor does not tell of all its changes. A compiler takes masks as they are, and padding
to lie at the ends of rows, which its program checks; a transform takes both for masks.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from linbias._request import has_shape
from linbias.torch.call import describe
from linbias.torch.operators import transforms
from linbias.torch.operators.values import may_read, readable

_NAME = "MultiheadAttention"


class Sizes(NamedTuple):
    """Of a call: batch rows, heads, queries, keys."""

    B: int
    H: int
    T: int
    S: int


class Seen(NamedTuple):
    """Which keys the queries see."""

    causal: bool = False  # those up to their own position
    key_range: Tensor | None = None  # [B, 2]
    ends_early: bool = False  # the last key of some row is padding
    mask: Tensor | None = None  # [B or 1, H or 1, T or 1, S]: True takes part, or numbers to add

    def options(self, sizes: Sizes, heads: slice | None) -> dict[str, Tensor | None]:
        """Keywords of `attention`, for some of the heads."""
        if self.key_range is None:
            return {"mask": of_heads(self.mask, heads)}
        # A range by itself would move the queries to its end.
        start = self.key_range.new_full((sizes.B,), sizes.S - sizes.T)
        own = {"key_range": self.key_range, "query_start": start}
        return {"mask": of_heads(self.mask, heads), **own}


def of_heads(x: Tensor | None, heads: slice | None) -> Tensor | None:
    """Of [B, ...] or [B, 1 or H, ...] of three axes and more, that of some heads."""
    if x is None or heads is None or x.dim() < 3 or x.shape[1] == 1:
        return x
    return x[:, heads]


def read(
    sizes: Sizes,
    attn_mask: Tensor | None,
    is_causal: bool,
    padding: Tensor | None,
    mask: Tensor | None,
    variant: str,
) -> Seen:
    """What the masks of a call of `MultiheadAttention` hide together."""
    _check(sizes, attn_mask, padding, mask)
    seen = Seen(causal=is_causal)
    if attn_mask is not None and not (is_causal and sizes.T == sizes.S):
        # Where there are as many queries as keys, is_causal says what the mask is, as in PyTorch.
        seen = _read_attn_mask(sizes, attn_mask)
    elif mask is not None:
        seen = _read_mask(sizes, mask, is_causal)
    if padding is not None:
        seen = _read_padding(seen, padding)
    if seen.ends_early and sizes.T != sizes.S and variant != "none":
        raise ValueError(
            "MultiheadAttention: padding on the right needs as many queries as keys"
            f" (T = {sizes.T}, S = {sizes.S}): where do the queries stand?"
        )
    return seen


def _check(
    sizes: Sizes, attn_mask: Tensor | None, padding: Tensor | None, mask: Tensor | None
) -> None:
    B, H, T, S = sizes
    if attn_mask is not None:
        if mask is not None:
            raise ValueError("MultiheadAttention: give either attn_mask or mask, not both")
        check_one(_NAME, "attn_mask", attn_mask, "[T, S] or [B * H, T, S]", (T, S), (B * H, T, S))
    if padding is not None:
        check_one(_NAME, "key_padding_mask", padding, "[B, S]", (B, S))
    if mask is None:
        return
    describe("mask", mask, _NAME)
    if (
        mask.dim() != 3
        or mask.shape[1] != S
        or mask.shape[0] not in (1, T)
        or mask.shape[2] not in (1, B)
    ):
        raise ValueError(
            f"MultiheadAttention: mask must be [T, S, B] = {[T, S, B]}, T and B may be 1,"
            f" got {list(mask.shape)}"
        )


def check_one(layer: str, name: str, mask: Tensor, words: str, *shapes: tuple[int, ...]) -> None:
    describe(name, mask, layer)  # which refuses what holds no values
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{layer}: {name} must hold bool, True for what is hidden, or numbers that"
            f" are added to the scores, got {mask.dtype}"
        )
    if not has_shape(mask, *shapes):
        wanted = " or ".join(f"{list(shape)}" for shape in shapes)
        raise ValueError(f"{layer}: {name} must be {words} = {wanted}, got {list(mask.shape)}")


def _read_attn_mask(sizes: Sizes, attn_mask: Tensor) -> Seen:
    if may_read(attn_mask) and not attn_mask.requires_grad:  # what is learned may be zero today
        kind = _kind(attn_mask)
        if kind != "other":
            return Seen(causal=kind == "later")
    attn_mask = attn_mask if attn_mask.dtype != torch.bool else ~attn_mask
    if attn_mask.dim() == 2:
        return Seen(mask=attn_mask[None, None])
    return Seen(mask=attn_mask.unflatten(0, (sizes.B, sizes.H)))


def _read_mask(sizes: Sizes, mask: Tensor, is_causal: bool) -> Seen:
    """A mask [T or 1, S, B or 1] that is not 0 for what takes part."""
    if mask.shape[0] == sizes.T and may_read(mask):
        kind = _kind((mask == 0).movedim(2, 0))
        if kind != "other":
            return Seen(causal=is_causal or kind == "later")
    return Seen(causal=is_causal, mask=mask.movedim(2, 0)[:, None] != 0)


def _read_padding(seen: Seen, padding: Tensor) -> Seen:
    """Hide padding [B, S], too: by a range of keys where it lies at ends, else a mask."""
    if readable(padding) is None and not transforms.active():
        ranges = _ranges(padding)
        torch._assert_async(
            _lie_together(padding, ranges).all(),
            "MultiheadAttention: key_padding_mask must leave the real keys of a row contiguous"
            " where the layer is compiled; give an attn_mask for others",
        )
        return seen._replace(key_range=ranges)
    rows = _rows(padding) if may_read(padding) else Rows(None, False, False)
    if rows.together:
        return seen._replace(key_range=rows.ranges, ends_early=rows.ends_early)
    own = padding if padding.dtype != torch.bool else ~padding
    return seen._replace(mask=_both(seen.mask, own[:, None, None]), ends_early=rows.ends_early)


def _kind(mask: Tensor) -> Literal["nothing", "later", "other"]:
    """What a mask [..., T, S] hides: nothing, the keys after each query, or others."""
    T, S = mask.shape[-2:]
    if not mask.numel():
        return "nothing"
    corner = mask[..., 0, -1]
    later = T > 1 and bool(is_hidden(corner).all())
    # Some rows at a time, which need one pattern and stay in the cache.
    step = 64 if mask.device.type == "cpu" else T
    hidden = torch.zeros(min(step, T), S + T, dtype=torch.bool, device=mask.device)
    if later:
        hidden = hidden.logical_not().triu(1 + S)
    pattern = hidden if mask.dtype == torch.bool else _added(~hidden).to(mask.dtype)
    for start in range(0, T, step):
        rows = mask[..., start : start + step, :]
        if not _equal(rows, pattern[: rows.shape[-2], T - start : T - start + S]):
            return "other"
    return "later" if later else "nothing"


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether a [..., T, S] is b [T, S] everywhere."""
    if a.device.type == "cpu" and a.dtype != torch.bfloat16:  # NumPy is faster at it
        return bool((a.detach().numpy() == b.numpy()).all())
    return torch.equal(a, b.expand_as(a))


class Rows(NamedTuple):
    """The real keys of batch rows."""

    ranges: Tensor | None  # [B, 2]; None: nothing is hidden
    together: bool  # no padding lies between them
    ends_early: bool


def _rows(padding: Tensor) -> Rows:
    if not padding.numel():
        return Rows(None, True, False)
    ranges = _ranges(padding)
    together = bool(_lie_together(padding, ranges).all())
    ends_early = bool(is_hidden(padding[:, -1:]).any())
    if together and bool((ranges == ranges.new_tensor([0, padding.shape[1]])).all()):
        return Rows(None, together, ends_early)
    return Rows(ranges, together, ends_early)


def _ranges(padding: Tensor) -> Tensor:
    """[B, 2]: where the real keys of each row begin and, if they lie together, end."""
    real = ~is_hidden(padding)
    first = real.int().argmax(1)
    return torch.stack([first, first + real.sum(1)], dim=1)


def _lie_together(padding: Tensor, ranges: Tensor) -> Tensor:
    """[B, S]: whether the ranges say of each key what the padding says."""
    keys = torch.arange(padding.shape[1], device=padding.device)
    hidden = is_hidden(padding)
    same = ~hidden == ((keys >= ranges[:, :1]) & (keys < ranges[:, 1:]))
    return same if padding.dtype == torch.bool else same & ((padding == 0) | hidden)


def is_hidden(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == -torch.inf


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    """Two masks as one: True takes part, or added to the scores."""
    if first is None:
        return second
    if first.dtype == second.dtype == torch.bool:
        return first & second
    return _added(first) + _added(second)


def _added(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
