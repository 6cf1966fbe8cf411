"""Sequences from which spans of tokens are taken out, to be written by a model that reads the rest.

    text     to be or not to be
    read     ^ to <0> not to <1>        (^ begins a text, <0> and <1> stand for spans)
    said     <0> be or <1> be $         ($ ends it)

15 % of the tokens are taken out, in spans of 3 on average: the span corruption of T5 (Raffel et al., arXiv
1910.10683, section 3.1.4), made for texts longer than those of training in two places:

- T5 numbers the sentinels of every sequence from 0, so that those of longer texts are never trained. Here those of a
  sequence begin anywhere among them and count on around the circle: all are trained whatever the length, each with
  the one that follows it.
- T5 takes as many tokens and spans out of every sequence. A decoder then learns to count, and ends after so many
  tokens of a longer text too (docs/LOG.md has the numbers). Here the lengths of spans and of the text between them
  are geometric, and their number varies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias.data.segments import HidingSegments
from linbias.data.tokenizers import Tokenizer

SPAN_SHARE, MEAN_SPAN, LONGEST_SPAN = 0.15, 3, 10


class SpanTokens(NamedTuple):
    """The ids that a sequence needs beside those of its text.

    Attributes:
        begin: Begins what is read; what the decoder reads begins with it too.
        end: Ends what is written.
        sentinels: Stand for spans, in order.
    """

    begin: int
    end: int
    sentinels: range

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpanTokens:
        """Those of a tokenizer; a `ValueError` says that it has none."""
        begin, end = (tokenizer.special_ids.get(f"{role}_token_id") for role in ("bos", "eos"))
        sentinels = tokenizer.sentinel_ids
        if begin is None or end is None or not sentinels:
            raise ValueError(
                "SpanTokens: tokenizer must have tokens that begin and end a text, and sentinels, "
                f"got {begin}, {end} and {len(sentinels)} sentinels"
            )
        return cls(begin, end, sentinels)


class Spans(NamedTuple):
    """Where the spans of a text start, and one past where they stop: [spans] each, in order, never touching."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def cut_before(self, place: int) -> int:
        """Where a text can be cut at `place`, or before the span that it would cut.

        Example:
            >>> spans = Spans(np.array([2, 7]), np.array([5, 9]))
            >>> [spans.cut_before(place) for place in (2, 3, 5, 8)]
            [2, 2, 5, 7]
        """
        span = int(np.searchsorted(self.starts, place)) - 1
        return int(self.starts[span]) if span >= 0 and self.stops[span] > place else place

    def cut_after(self, place: int) -> int:
        """Where a text can be cut at `place`, or after the span that it would cut."""
        span = int(np.searchsorted(self.starts, place)) - 1
        return int(self.stops[span]) if span >= 0 and self.stops[span] > place else place


def draw_spans(num_tokens: int, seed: tuple[int, ...]) -> Spans:
    """The spans that are taken out of a text: those of a longer one begin with those of a shorter one.

    Their lengths, 10 tokens at most, and those of the text between them are geometric.

    Example:
        >>> draw_spans(30, seed=(0,)).starts, draw_spans(50, seed=(0,)).starts
        (array([11]), array([11, 34, 38]))
    """
    most = num_tokens // 2 + 1
    between = MEAN_SPAN * (1 - SPAN_SHARE) / SPAN_SHARE
    gaps = np.random.default_rng((*seed, 0)).geometric(1 / between, most)
    sizes = np.random.default_rng((*seed, 1)).geometric(1 / MEAN_SPAN, most).clip(max=LONGEST_SPAN)
    gaps[:1] -= 1  # a span may begin the text
    stops = (gaps + sizes).cumsum()
    count = int((stops <= num_tokens).sum())
    return Spans((stops - sizes)[:count], stops[:count])


class SpanRow(NamedTuple):
    """A text from which spans were taken out.

    Attributes:
        read: [S], int64: what the encoder reads.
        said: [T], int64: what the decoder is to say.
        numbers: [T], the number of the span that each of `said` belongs to; -1 for sentinels and the end.
    """

    read: NDArray[np.int64]
    said: NDArray[np.int64]
    numbers: NDArray[np.int64]


def span_row(
    text: NDArray[Any],
    spans: Spans,
    first_number: int,
    tokens: SpanTokens,
) -> SpanRow:
    """Take spans out of a text [n].

    The first span has a number, the others count on, and their sentinels around the circle.

    Example:
        >>> tokens = SpanTokens(begin=2, end=3, sentinels=range(90, 92))
        >>> row = span_row(np.arange(10, 16), Spans([1, 5], [3, 6]), 7, tokens)
        >>> row.read.tolist(), row.said.tolist(), row.numbers.tolist()
        ([2, 10, 91, 13, 14, 90], [91, 11, 12, 90, 15, 3], [-1, 7, 7, -1, 8, -1])
    """
    text = text.astype(np.int64)
    begins, number = np.zeros(len(text), bool), np.full(len(text), -1)
    sentinel = np.zeros_like(text)
    for span, (start, stop) in enumerate(zip(*spans, strict=True), first_number):
        begins[start] = True
        number[start:stop] = span
        sentinel[start] = tokens.sentinels[span % len(tokens.sentinels)]
    inside = number >= 0
    read = np.where(begins, sentinel, text)[~inside | begins]
    # Each token of the text may be said, after a sentinel if it begins a span.
    chosen = np.stack([begins, inside], axis=-1)
    said = np.stack([sentinel, text], axis=-1)[chosen]
    numbers = np.stack([np.full_like(number, -1), number], axis=-1)[chosen]
    return SpanRow(
        np.concatenate([[tokens.begin], read]),
        np.concatenate([said, [tokens.end]]),
        np.concatenate([numbers, [-1]]),
    )


def span_batch(rows: Sequence[SpanRow], tokens: SpanTokens) -> dict[str, Tensor]:
    """What a model reads and is to say, padded on the right.

    That is `input_ids` [B, S], `decoder_input_ids` and `labels` [B, T], int64, where -100 is not
    to be said; and `attention_mask` [B, S] where rows differ in length.

    Example:
        >>> tokens = SpanTokens(begin=2, end=3, sentinels=range(90, 92))
        >>> row = span_row(np.arange(10, 13), Spans([1], [2]), 0, tokens)
        >>> [value.tolist() for value in span_batch([row], tokens).values()]
        [[[2, 10, 90, 12]], [[2, 90, 11]], [[90, 11, 3]]]
    """
    read = _padded([row.read for row in rows], tokens.end)
    labels = _padded([row.said for row in rows], -100)
    fed = _padded([np.concatenate([[tokens.begin], row.said[:-1]]) for row in rows], tokens.end)
    batch = {"input_ids": read, "decoder_input_ids": fed, "labels": labels}
    lengths = torch.tensor([len(row.read) for row in rows])
    if (lengths < read.shape[1]).any():
        batch["attention_mask"] = (torch.arange(read.shape[1]) < lengths[:, None]).long()
    return batch


class SpanSegments(HidingSegments):
    """The sequences of a whole run, as `Segments`, from which spans are taken out.

    A sequence is the token that begins a text, and `length` - 1, at least 1, tokens of the text.
    Which spans are taken out of it, and at which sentinel they begin, is a function of the seed
    and of the sequence's number in the run: another pass takes out others, and there is no state
    to save.

    Example:
        >>> tokens = SpanTokens(begin=2, end=3, sentinels=range(90, 99))
        >>> ids = np.arange(10, 80, dtype=np.uint8)
        >>> segments = SpanSegments(ids, length=41, num_segments=9, seed=0, tokens=tokens)
        >>> batch = segments.__getitems__([0, 1])
        >>> batch["input_ids"].shape, batch["labels"].shape
        (torch.Size([2, 41]), torch.Size([2, 3]))
    """

    tokens: SpanTokens

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """A batch as `span_batch` makes it."""
        texts = super().__getitems__(indices)["input_ids"].numpy()
        rows = []
        for text, index in zip(texts, indices, strict=True):
            seed = (self.seed, 1, index)
            number = int(np.random.default_rng((*seed, 2)).integers(len(self.tokens.sentinels)))
            rows.append(span_row(text, draw_spans(self.length, seed), number, self.tokens))
        return span_batch(rows, self.tokens)


def _padded(rows: Sequence[NDArray[np.int64]], value: int) -> Tensor:
    """Pad rows on the right to the longest: [rows, longest]."""
    padded = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)
