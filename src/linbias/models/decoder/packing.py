"""Packed rows: several texts end to end in one row, told apart by their position numbers.

Each text must be attended to alone, so texts of about the same length run as one batch, padded
behind:

    position_ids    0 1 2 0 1 0 1 2 3     rows 0-2, 3-4 and 5-8 of the flattened batch
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from linbias.models.decoder.holes import tokens_first
from linbias.torch.operators.values import readable

# Lengths up to the same multiple of it share a batch, which costs less than one for each.
_GRAIN = 64


class Group(NamedTuple):
    rows: Tensor  # [texts, longest], of the flattened batch; a shorter text repeats its last token
    lengths: Tensor  # [texts]

    def positions(self) -> Tensor | None:
        """[texts, longest], where tokens stand that a mask parts; None where it parts none."""
        apart = (self.rows.diff(dim=1) > 1).any()
        return self.rows if apart else None

    @property
    def is_token(self) -> Tensor:
        """[texts, longest]: False where a text repeats its last token."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.lengths[:, None]

    def key_range(self) -> Tensor | None:
        """[texts, 2], for `linbias.torch.attention`; None where all have the same length."""
        if (self.lengths == self.rows.shape[1]).all():
            return None
        return torch.stack([torch.zeros_like(self.lengths), self.lengths], dim=1)


class Packing(NamedTuple):
    groups: tuple[Group, ...]
    back: Tensor  # [B * T], where each row of the batch is among the tokens of the groups

    def to(self, device: torch.device | str | int) -> "Packing":
        groups = (Group(group.rows.to(device), group.lengths.to(device)) for group in self.groups)
        return Packing(tuple(groups), self.back.to(device))

    def take(self, x: Tensor, group: Group) -> Tensor:
        """[texts, heads, longest, size]: the texts of a group, of x [B, heads, T, size]."""
        return x.transpose(1, 2).flatten(0, 1)[group.rows].transpose(1, 2)

    def put_back(self, parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        """[B, heads, T, size]: what `take` took, with the first, third and last of these sizes."""
        B, _, T, _ = shape
        tokens = [
            part.transpose(1, 2)[group.is_token]
            for part, group in zip(parts, self.groups, strict=True)
        ]
        return torch.cat(tokens)[self.back].unflatten(0, (B, T)).transpose(1, 2)

    def put_weights_back(self, parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        """[B, H, T, T] of each group's weights; B, H and T are the first of the sizes."""
        B, H, T = shape[:3]
        whole = parts[0].new_zeros(B, H, T, T)
        for part, group in zip(parts, self.groups, strict=True):
            for weight, rows, length in zip(part, group.rows, group.lengths.tolist(), strict=True):
                text, row = rows[:length] % T, int(rows[0]) // T
                whole[row, :, text[:, None], text] = weight[:, :length, :length]
        return whole


# Where a text starts decides shapes, which no graph can hold.
@torch.compiler.disable
def find_packing(position_ids: Tensor, is_token: Tensor | None) -> Packing | None:
    """Tell the texts of each row of position_ids [B, T] apart; None where each row holds one.

    As in Transformers, a text starts where a number is not one more than the number before it;
    what is hidden between two tokens (False in is_token [B, T]) may have been counted or not.
    """
    if readable(position_ids) is None:
        raise ValueError(
            "linbias: position_ids must be None among fake tensors, whose values nobody can read"
        )
    B, T = position_ids.shape
    places = torch.arange(T, device=position_ids.device).expand(B, T)
    if is_token is not None:
        places = tokens_first(is_token)
        position_ids, is_token = position_ids.gather(1, places), is_token.gather(1, places)
    steps = position_ids.diff(dim=1)
    starts = torch.ones(B, T, dtype=torch.bool, device=position_ids.device)
    starts[:, 1:] = (steps != 1) & (steps != places.diff(dim=1))
    if is_token is not None:
        starts[:, 1:] &= is_token[:, 1:] & is_token[:, :-1]
    if not starts[:, 1:].any():
        return None
    if is_token is not None:
        starts[:, 1:] |= is_token[:, 1:] != is_token[:, :-1]
    (first,) = starts.flatten().nonzero(as_tuple=True)
    lengths = first.diff(append=first.new_tensor([B * T]))
    rows = (places + T * torch.arange(B, device=places.device)[:, None]).flatten()
    by_length = defaultdict(list)
    for text, length in enumerate(lengths.tolist()):
        by_length[-(-length // _GRAIN)].append(text)
    groups = tuple(_group(rows, first[texts], lengths[texts]) for texts in by_length.values())
    order = torch.cat([group.rows[group.is_token] for group in groups])
    return Packing(groups, order.argsort())


def _group(rows: Tensor, first: Tensor, lengths: Tensor) -> Group:
    steps = torch.arange(int(lengths.max()), device=first.device)
    return Group(rows[first[:, None] + steps.minimum(lengths[:, None] - 1)], lengths)
