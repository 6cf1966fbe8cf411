"""Sequences from which spans of tokens are taken out, for a model to write that reads the rest.

text     to be or not to be
read     ^ to <0> not to <1>        (^ begins a text, <0> and <1> are sentinels)
said     <0> be or <1> be $         ($ ends it)
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

# The span corruption of T5 (Raffel et al., arXiv 1910.10683, section 3.1.4), made for texts longer
# than those of training in two ways. T5 numbers the sentinels of every sequence from 0: here those
# of a sequence begin anywhere on their circle, so that all are trained. T5 takes as many spans out
# of every sequence, from which a decoder learns to count (docs/LOG.md): here their number varies.
SPAN_SHARE, MEAN_SPAN, LONGEST_SPAN = 0.15, 3, 10


class SpanTokens(NamedTuple):
    """The ids that a sequence needs beside those of its text."""

    begin: int  # begins what is read, also by the decoder
    end: int  # ends what is written
    sentinels: range  # stand for spans, in order

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
    """Where the spans of a text start, and one past where they stop: in order, never touching."""

    starts: NDArray[np.int64]  # [spans]
    stops: NDArray[np.int64]  # [spans]

    def cut(self, at: int, *, after: bool = False) -> int:
        """Where a text can be cut: at a token, or before (after) the span that it would divide."""
        span = int(np.searchsorted(self.starts, at)) - 1
        if span < 0 or self.stops[span] <= at:
            return at
        return int((self.stops if after else self.starts)[span])


def draw_spans(num_tokens: int, seed: tuple[int, ...]) -> Spans:
    """The spans to take out of a text: those of a longer one begin with those of a shorter one."""
    most = num_tokens // 2 + 1
    between = MEAN_SPAN * (1 - SPAN_SHARE) / SPAN_SHARE
    gaps = np.random.default_rng((*seed, 0)).geometric(1 / between, most)
    sizes = np.random.default_rng((*seed, 1)).geometric(1 / MEAN_SPAN, most).clip(max=LONGEST_SPAN)
    gaps[:1] -= 1  # a span may begin the text
    stops = (gaps + sizes).cumsum()
    count = int((stops <= num_tokens).sum())
    return Spans((stops - sizes)[:count], stops[:count])


class SpanRow(NamedTuple):
    """A text from which spans were taken out."""

    read: NDArray[np.int64]  # [S], by the encoder
    said: NDArray[np.int64]  # [T], what the decoder is to say
    numbers: NDArray[np.int64]  # [T], of the span that each belongs to; -1 for other than text


def span_row(text: NDArray[Any], spans: Spans, first_number: int, tokens: SpanTokens) -> SpanRow:
    """Takes spans out of a text [n]; their numbers, and sentinels on a circle, count on from the
    first.
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
    """Rows padded on the right, int64; `attention_mask` is there where they differ in length."""
    read = _padded([row.read for row in rows], tokens.end)
    labels = _padded([row.said for row in rows], -100)
    fed = _padded([np.concatenate([[tokens.begin], row.said[:-1]]) for row in rows], tokens.end)
    batch = {"input_ids": read, "decoder_input_ids": fed, "labels": labels}
    lengths = torch.tensor([len(row.read) for row in rows])
    if (lengths < read.shape[1]).any():
        batch["attention_mask"] = (torch.arange(read.shape[1]) < lengths[:, None]).long()
    return batch


class SpanSegments(HidingSegments):
    """Segments of a run from which spans are taken out, drawn by seed and number."""

    tokens: SpanTokens

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        texts = super().__getitems__(indices)["input_ids"].numpy()
        rows = []
        for text, index in zip(texts, indices, strict=True):
            seed = (self.seed, 1, index)
            number = int(np.random.default_rng((*seed, 2)).integers(len(self.tokens.sentinels)))
            rows.append(span_row(text, draw_spans(self.length, seed), number, self.tokens))
        return span_batch(rows, self.tokens)


def _padded(rows: Sequence[NDArray[np.int64]], value: int) -> Tensor:
    padded = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(padded)
