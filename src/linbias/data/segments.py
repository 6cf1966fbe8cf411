"""The training sequences of a run, as data sets of PyTorch: whole, with masked tokens, or without
spans of tokens, which a model is to write that reads the rest:

    text     to be or not to be
    read     ^ to <0> not to <1>        (^ begins a text, <0> and <1> are sentinels)
    said     <0> be or <1> be $         ($ ends it)
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from linbias.data.tokenizers import TokenIds, Tokenizer

# Masked tokens are never left as they were or replaced by others, as in the first such training:
# it brings nothing (Wettig, Gao, Zhong and Chen, arXiv 2202.08005).
MASK_SHARE = 0.15
# The span corruption of T5 (Raffel et al., arXiv 1910.10683, section 3.1.4), made for texts longer
# than those of training in two ways. T5 numbers the sentinels of every sequence from 0: here those
# of a sequence begin anywhere on their circle, so that all are trained. T5 takes as many spans out
# of every sequence, from which a decoder learns to count (docs/LOG.md): here their number varies.
SPAN_SHARE, MEAN_SPAN, LONGEST_SPAN = 0.15, 3, 10


class Segments(Dataset[dict[str, Tensor]]):
    """The segments that a run trains on; the seed gives each pass over the text its order."""

    def __init__(self, ids: TokenIds, *, length: int, num_segments: int, seed: int) -> None:
        self.ids, self.length, self.num_segments, self.seed = ids, length, num_segments, seed
        self.per_pass = (len(ids) - 1) // length

    def __len__(self) -> int:
        return self.num_segments

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        in_passes = [divmod(index, self.per_pass) for index in indices]
        order = [_shuffle(self.seed, number, self.per_pass)[index] for number, index in in_passes]
        starts = np.array(order)[:, None] * self.length
        tokens = self.ids[starts + np.arange(self.length + 1)].astype(np.int64)
        segments = torch.from_numpy(tokens)
        return {"input_ids": segments[:, :-1], "labels": segments[:, 1:]}


class HidingSegments(Segments):
    """Segments of which some text is hidden: a token that begins each, and length - 1 others."""

    def __init__(
        self, ids: TokenIds, *, length: int, num_segments: int, seed: int, tokens: Any
    ) -> None:
        super().__init__(ids, length=length - 1, num_segments=num_segments, seed=seed)
        self.tokens = tokens


class InShards(Dataset[dict[str, Any]]):
    """A data set for processes of which each `shards` in a row read one sequence together: batch j
    of the data loaders is shard j % shards, along the tokens, of batch j // shards.
    """

    def __init__(self, whole: Any, shards: int, batch_size: int) -> None:
        self.whole, self.shards, self.batch_size = whole, shards, batch_size

    def __len__(self) -> int:
        return len(self.whole) * self.shards

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        batches = {index // self.batch_size for index in indices}
        assert len(batches) == 1, "a data loader asks for one batch at a time"
        batch, shard = divmod(batches.pop(), self.shards)
        rows = [batch * self.batch_size + index % self.batch_size for index in indices]
        return {
            name: x.tensor_split(self.shards, 1)[shard] if isinstance(x, Tensor) else x
            for name, x in self.whole.__getitems__(rows).items()
        }


@lru_cache(maxsize=2)  # a batch may end one pass and begin the next
def _shuffle(seed: int, pass_number: int, size: int) -> NDArray[np.integer[Any]]:
    return np.random.default_rng((seed, pass_number)).permutation(size)


class MaskTokens(NamedTuple):
    """The ids that a masked sequence needs beside those of its text."""

    begin: int  # begins every sequence
    mask: int  # stands for a masked token

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Those of a tokenizer; a `ValueError` says that it has none."""
        begin, mask = tokenizer.special_ids.get("bos_token_id"), tokenizer.mask_id
        if begin is None or mask is None:
            raise ValueError(
                "MaskTokens: tokenizer must have a token that begins a text and one that stands "
                f"for a masked one, got {begin} and {mask}"
            )
        return cls(begin, mask)


class MaskedSegments(HidingSegments):
    """Segments of a run with as many masked tokens in each, drawn by seed and number."""

    tokens: MaskTokens

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """As of `Segments`; `labels` are -100 where nothing is predicted."""
        text = super().__getitems__(indices)["input_ids"].numpy()
        chosen = np.stack([self._chosen(index) for index in indices])
        return masked_rows(text, chosen, self.tokens)

    def _chosen(self, index: int) -> NDArray[np.bool_]:
        count = max(1, round(MASK_SHARE * self.length))
        chosen = np.zeros(self.length, bool)
        order = np.random.default_rng((self.seed, 1, index)).permutation(self.length)
        chosen[order[:count]] = True
        return chosen


def masked_rows(
    text: NDArray[Any], chosen: NDArray[np.bool_], tokens: MaskTokens
) -> dict[str, Tensor]:
    """What is read and said of a text [rows, width] whose `chosen` tokens are masked, int64."""
    read, labels = np.full((2, len(text), text.shape[1] + 1), -100, np.int64)
    read[:, 0], read[:, 1:] = tokens.begin, np.where(chosen, tokens.mask, text)
    labels[:, 1:][chosen] = text[chosen]
    return {"input_ids": torch.from_numpy(read), "labels": torch.from_numpy(labels)}


class SpanTokens(NamedTuple):
    """The ids that a sequence needs beside those of its text."""

    begin: int  # begins what is read, also by the decoder
    end: int  # ends what is written
    sentinels: range  # stand for spans, in order

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
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
    """Takes spans out of a text [n]; numbers, and sentinels on a circle, count from the first."""
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
