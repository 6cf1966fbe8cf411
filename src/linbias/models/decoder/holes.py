"""Rows with holes: their tokens attend as if they stood together.

A hole is what a mask hides between the tokens of a row. In order, tokens come first, so that every
row is one unbroken run; what they gather goes back to their places:

    attention_mask    1 1 0 0 1 1
    in order          0 1 4 5 2 3     places of the row

Whether a hole takes up distance is the bias's to say (`counts_hidden`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Holes(NamedTuple):
    """The order of rows, some of which may have holes; others may be padded on either side."""

    keys: Tensor  # [B, S], the places of a row, those of tokens first
    queries: Tensor  # [B, T], likewise of the new tokens
    is_new: Tensor  # [B, T], which of these are tokens

    @classmethod
    def of(cls, is_token: Tensor, is_new: Tensor) -> "Holes":
        """Those of rows [B, S], and of the new tokens [B, T] among them."""
        return cls(tokens_first(is_token), tokens_first(is_new), is_new)

    def last_queries(self, count: int) -> "Holes":
        is_new = self.is_new[:, self.is_new.shape[1] - count :]
        return Holes(self.keys, tokens_first(is_new), is_new)

    def to(self, device: torch.device | str | int) -> "Holes":
        return Holes(*(x.to(device) for x in self))

    def put_back(self, gathered: Tensor) -> Tensor:
        """[B, H, T, size] of queries in order, each in its place again."""
        return take(gathered, self.queries.argsort())

    def put_weights_back(self, weights: Tensor, num_keys: int) -> Tensor:
        """[B, H, T, num_keys] of weights in order; a cache may have more room than tokens."""
        return self.put_keys_back(take(weights, self.queries.argsort()), num_keys)

    def put_keys_back(self, weights: Tensor, num_keys: int) -> Tensor:
        """As `put_weights_back`, for queries that are in their places."""
        whole = take(weights.transpose(2, 3), self.keys.argsort()).transpose(2, 3)
        return pad(whole, (0, num_keys - whole.shape[3]))


def tokens_first(is_token: Tensor) -> Tensor:
    """The places [B, S] of tokens, then those of the others, both in the order of the row."""
    return (~is_token).int().argsort(dim=-1, stable=True)


def take(x: Tensor, order: Tensor) -> Tensor:
    """[B, heads, n, size]: the places `order` [B, n] of each row of x [B, heads, S, size]."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x.transpose(1, 2)[rows, order].transpose(1, 2)
