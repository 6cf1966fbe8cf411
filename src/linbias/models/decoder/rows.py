"""Rows: texts side by side, each one unbroken run of tokens, and where a batch holds them.

Padding, holes and several texts in a row are one thing: which tokens of a batch [B, S] attend to
each other, and in which order. Of one row of six places:

    attention_mask   0 0 1 1 1 1    span [2, 6]
    attention_mask   1 1 0 0 1 1    span [0, 4]            places 0 1 4 5 2 3
    position_ids     0 1 0 1 2 3    span [0, 2], [0, 4]    places 0 1 1 1, 2 3 4 5

Where tokens stand together nothing is moved. A hole is what a mask hides between the tokens of a
row; whether it takes up distance is the bias's to say (`counts_hidden`).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linbias.torch.operators.values import readable

# Packed texts whose lengths go up to the same multiple of it share a batch, which costs less than
# one for each.
_GRAIN = 64


class Rows(NamedTuple):
    """Which tokens stand in each row, and where a batch of B rows of S places holds them."""

    span: Tensor | None = None  # [N, 2]: the first and one past the last token; None: all are
    places: Tensor | None = None  # [N, n]: of the row that holds them; None: where they stand
    batch: Tensor | None = None  # [N, 1]: that row, of texts; None: each its own

    @classmethod
    def in_order(cls, is_token: Tensor) -> "Rows":
        """Those of a batch [B, S], tokens before what is none: one that may have holes."""
        return cls(_from_zero(is_token.sum(-1)), tokens_first(is_token))

    def is_token(self, x: Tensor, size: int) -> Tensor:
        """[N or 1, n], on the device of x: which places of a row hold a token."""
        index = torch.arange(
            size if self.places is None else self.places.shape[1], device=x.device
        )
        if self.span is None:
            return torch.ones_like(index, dtype=torch.bool)[None]
        return (index >= self.span[:, :1]) & (index < self.span[:, 1:])

    def last(self, count: int, size: int) -> "Rows":
        """Of the last `count` of `size` places alone, of rows that are no texts."""
        skipped = size - count
        if self.places is None:
            return Rows(None if self.span is None else self.span - skipped)
        kept = self.is_token(self.places, size) & (self.places >= skipped)
        places = self.places.gather(1, tokens_first(kept)[:, :count])
        return Rows(_from_zero(kept.sum(-1)), (places - skipped).clamp(min=0))

    def start_of(self, queries: "Rows") -> Tensor | None:
        """[N]: where query 0 of rows of new tokens, the last of these keys, stands among them."""
        if self.span is None or queries.span is None:
            return None
        return self.span[:, 1] - queries.span[:, 1]

    def places_apart(self) -> Tensor | None:
        """The places [N, n] as positions, where any row may have a hole."""
        places = self.places
        if places is None or (readable(places) is not None and (places.diff(dim=1) <= 1).all()):
            return None
        return places

    def take(self, x: Tensor) -> Tensor:
        """[N, heads, n, size]: the rows, of x [B, heads, S, size]."""
        if self.places is None:
            return x
        batch = (
            torch.arange(len(x), device=x.device)[:, None] if self.batch is None else self.batch
        )
        return x.transpose(1, 2)[batch, self.places].transpose(1, 2)

    def found_in(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Rows of the batch [N, 1] and places [N, n] of x [N, ...]; `size` where no token is."""
        batch, places = self.batch, self.places
        if batch is None:
            batch = torch.arange(len(x), device=x.device)[:, None]
        if places is None:
            places = torch.arange(size, device=x.device)
        return batch, torch.where(self.is_token(x, size), places, size)


def put_back(parts: list[Tensor], rows: Sequence[Rows], B: int, T: int) -> Tensor:
    """[B, heads, T, size]: parts [N, heads, n, size] of rows, each token's in its place again.

    Where there is no token it is zero, if anything is moved.
    """
    if rows[0].places is None:
        return parts[0]
    found = [row.found_in(part, T) for row, part in zip(rows, parts, strict=True)]
    batch = torch.cat([batch.expand_as(places).flatten() for batch, places in found])
    places = torch.cat([places.flatten() for _, places in found])
    values = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
    whole = values.new_zeros(B, T + 1, *values.shape[1:]).index_put((batch, places), values)
    return whole[:, :T].transpose(1, 2)


def put_weights_back(
    parts: list[Tensor], queries: Sequence[Rows], keys: Sequence[Rows], size: tuple[int, int, int]
) -> Tensor:
    """[B, H, T, S], of that size B, T, S: weights [N, H, n, m] of rows, zero between others."""
    if keys[0].places is None:
        return parts[0]
    B, T, S = size
    whole = parts[0].new_zeros(B, T + 1, S + 1, parts[0].shape[1])
    for part, to, of in zip(parts, queries, keys, strict=True):
        (batch, row), (_, column) = to.found_in(part, T), of.found_in(part, S)
        whole[batch[..., None], row[:, :, None], column[:, None]] = part.permute(0, 2, 3, 1)
    return whole[:, :T, :S].permute(0, 3, 1, 2)


def tokens_first(is_token: Tensor) -> Tensor:
    """The places [B, S] of tokens, then those of the others, both in the order of the row."""
    return (~is_token).int().argsort(dim=-1, stable=True)


def _from_zero(lengths: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(lengths), lengths], dim=-1)


# Where a text starts decides shapes, which no graph can hold.
@torch.compiler.disable
def find_texts(position_ids: Tensor, is_token: Tensor | None) -> tuple[Rows, ...] | None:
    """Tell the texts of each row of position_ids [B, T] apart; None where each row holds one.

    As in Transformers, a text starts where a number is not one more than the number before it;
    what is hidden between two tokens (False in is_token [B, T]) may have been counted or not.
    Texts of about the same length are rows of one batch, in which shorter ones repeat their last
    token.
    """
    if readable(position_ids) is None:
        raise ValueError(
            "linbias: position_ids must be None among fake tensors, whose values nobody can read"
        )
    (B, T), device = position_ids.shape, position_ids.device
    places = torch.arange(T, device=device).expand(B, T)
    if is_token is not None:
        places = tokens_first(is_token)
        position_ids, is_token = position_ids.gather(1, places), is_token.gather(1, places)
    steps = position_ids.diff(dim=1)
    starts = torch.ones(B, T, dtype=torch.bool, device=device)
    starts[:, 1:] = (steps != 1) & (steps != places.diff(dim=1))
    if is_token is not None:
        starts[:, 1:] &= is_token[:, 1:] & is_token[:, :-1]
    if not starts[:, 1:].any():
        return None
    if is_token is not None:
        starts[:, 1:] |= is_token[:, 1:] != is_token[:, :-1]
    (first,) = starts.flatten().nonzero(as_tuple=True)
    lengths = first.diff(append=first.new_tensor([B * T]))
    by_length = defaultdict(list)
    for text, length in enumerate(lengths.tolist()):
        by_length[-(-length // _GRAIN)].append(text)
    found = []
    for texts in by_length.values():
        of, start = lengths[texts], first[texts, None]
        longest = torch.arange(int(of.max()), device=device)
        index = start + longest.minimum(of[:, None] - 1)
        span = None if (of == len(longest)).all() else _from_zero(of)
        found.append(Rows(span, places.flatten()[index], start // T))
    return tuple(found)
