"""Padding: from Transformers' `attention_mask` to the arguments of `linbias.torch.attention`.

A batch of texts of unequal length is filled up with padding tokens, before each text (for generation) or after
it (for training), and `attention_mask` tells them apart. Every key keeps its place in the padded row: the key
range hides the padding, and `query_start` says where in the row the new tokens stand. T = 5 tokens, none cached:

    attention_mask    key_range    query_start    positions
    1 1 1 1 1         [0, 5]       0              0 1 2 3 4
    0 0 1 1 1         [2, 5]       0              0 0 0 1 2
    1 1 1 0 0         [0, 3]       0              0 1 2 2 2
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Where the new tokens of a batch stand, and which keys are tokens rather than padding.

    Attributes:
        positions: [1 or B, T], int64: the number of each new token in its own text, for methods that add or
            rotate by position. Counting starts at 0 with the first token that is no padding, so that a padded
            row and the same row alone give the same result. Padding repeats the nearest token's number.
        key_range: [B, 2] or None, as `linbias.torch.attention` takes it; None where no key is padding.
        query_start: [B] or None, likewise.
    """

    positions: Tensor
    key_range: Tensor | None = None
    query_start: Tensor | None = None

    def last_queries(self, count: int) -> "Padding":
        """The same for the last `count` new tokens alone; the keys stay."""
        skipped = self.positions.shape[1] - count
        if skipped == 0:
            return self
        start = None if self.query_start is None else self.query_start + skipped
        return Padding(self.positions[:, skipped:], self.key_range, start)


def read_attention_mask(
    caller: str, attention_mask: Tensor | None, new_tokens: Tensor, num_cached: int
) -> Padding:
    """Turn an attention mask into positions, key_range and query_start.

    The tokens of each row must stand together: padding may come before them, after them, or both. A row of
    padding alone has an empty range. Where nothing is padded, key_range and query_start are None, which lets
    every method take its fast path.

    Under `torch.compile` and `torch.export` no values are read, so that the graph stays whole: ranges are then
    given even where nothing is padded, and a row with gaps is not noticed.

    Args:
        caller: Whom errors name.
        attention_mask: [B, S], S = num_cached + T, any dtype; 0 marks padding. None: no padding.
        new_tokens: [B, T, ...], ids or embeddings; only shape and device are used.
        num_cached: Number of earlier tokens, which a cache holds.

    Returns:
        The Padding of the batch.

    Raises:
        ValueError: The mask has another shape, or gaps; the message names the first row that has one.

    Example:
        >>> ids = torch.tensor([[7, 7, 5, 6]])
        >>> read_attention_mask("model", torch.tensor([[0, 0, 1, 1]]), ids, num_cached=0)
        Padding(positions=tensor([[0, 0, 0, 1]]), key_range=tensor([[2, 4]]), query_start=tensor([0]))
    """
    B, T = new_tokens.shape[:2]
    S = num_cached + T
    index = torch.arange(num_cached, S, device=new_tokens.device)[None]
    if attention_mask is None:
        return Padding(index)
    if attention_mask.shape != (B, S):
        raise ValueError(
            f"{caller}: attention_mask must have shape [B, S] = {[B, S]}, got {list(attention_mask.shape)}"
        )
    is_token = attention_mask != 0
    if not torch.compiler.is_compiling():
        if is_token.all():
            return Padding(index)
        _check_unbroken(caller, is_token)
    first = (is_token.cumsum(-1) == 0).sum(-1, keepdim=True)
    num_tokens = is_token.sum(-1, keepdim=True)
    positions = torch.minimum(index - first, num_tokens - 1).clamp(min=0)
    key_range = torch.cat([first, first + num_tokens], dim=-1)
    query_start = torch.full((B,), num_cached, device=new_tokens.device)
    return Padding(positions, key_range, query_start)


def _check_unbroken(caller: str, is_token: Tensor) -> None:
    starts = is_token.clone()
    starts[:, 1:] &= ~is_token[:, :-1]
    num_runs = starts.sum(-1)
    if (num_runs > 1).any():
        row = int((num_runs > 1).int().argmax())
        raise ValueError(
            f"{caller}: attention_mask must mark one unbroken run of tokens per row,"
            f" got {int(num_runs[row])} runs in row {row}"
        )
