"""How well a sequence-to-sequence model writes spans that were taken out of a text when it reads `length` tokens of it at a time.

Which spans are taken out, and which sentinel stands for each, is decided once for all of the text, before it is cut:
at every length, and for every model of the same tokenizer, the same tokens are scored, each exactly once. How much of
the text is read at a time differs, and with it how many spans are to be written one after another.

    text             t(s s)t t t t(s)t t t(s s s)t t
    blocks of 6      t(s s)t t t|t(s)t t t|.(s s s)t t       (. read, the others scored)
    stride 3         t(s s). . .
                           t t t .(.)
                                 t(s)t . .      ...

No block is cut inside a span. What is scored is the tokens of the spans, given those before them. Sentinels and the
end are written too, and not scored: how many there are depends on the cuts. A span at the end of a block is read from
one side alone, and longer blocks have fewer ends; with a stride, only the spans that begin in the middle `stride`
tokens of a block are scored. The token that begins a sequence comes before every block and counts in its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from transformers import PreTrainedModel

from linbias.data.spans import (
    LONGEST_SPAN,
    Spans,
    SpanTokens,
    draw_spans,
    span_batch,
    span_row,
)
from linbias.lm.masked import Block, MaskedEvaluation, check_call, score_blocks


@dataclass(frozen=True)
class SpanEvaluation(MaskedEvaluation):
    """What `evaluate_spans` measured: as `MaskedEvaluation`, where `num_scored` counts the tokens of spans.

    Attributes:
        num_spans: Spans that were taken out, all of which were scored.
    """

    num_spans: int


def spans_of_text(num_tokens: int) -> Spans:
    """The spans that are taken out of a text, to be scored."""
    return draw_spans(num_tokens, seed=(0,))


def span_blocks(num_tokens: int, width: int, stride: int, spans: Spans) -> Iterator[Block]:
    """The blocks that score each span once: up to `width` tokens, of which up to `stride` in the middle are scored.

    Example:
        >>> spans = Spans(np.array([3]), np.array([6]))
        >>> [tuple(block) for block in span_blocks(9, width=4, stride=4, spans=spans)]
        [(0, 3, 0, 3), (3, 7, 3, 7), (6, 9, 7, 9)]
    """
    scored = 0
    while scored < num_tokens:
        end = spans.cut_before(min(scored + stride, num_tokens))
        ahead = (width - (end - scored)) // 2
        start = max(0, min(scored - ahead, num_tokens - width))
        stop = min(start + width, num_tokens)
        yield Block(spans.cut_after(start), spans.cut_before(stop), scored, end)
        scored = end


def evaluate_spans(
    model: PreTrainedModel,
    ids: NDArray[Any],
    *,
    length: int,
    tokens: SpanTokens,
    stride: int | None = None,
    batch_tokens: int = 16384,
    limit_tokens: int | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SpanEvaluation:
    """Scores a sequence-to-sequence model on a text, `length` tokens at a time.

        nll = mean over the tokens i of spans of -log p(ids[i] | what is read of its block, what was said before i)

    Of several processes, as for `evaluate_masked`.

    Args:
        model: A Transformers sequence-to-sequence model.
        ids: [N], integers, N >= 1: the text as the model's tokens.
        length: Tokens of the text read at a time, before spans are taken out, and the one that begins a sequence;
            11 or more, so that the longest span fits.
        tokens: The ids that begin and end a sequence, and the sentinels.
        stride: None for blocks without overlap, else 10 <= stride < length.
        batch_tokens: Tokens read in one forward pass (at least one block).
        limit_tokens: Read at most this many tokens, from the start of the text.
        device: Where to compute; None leaves the model where it is.
        precision: As for `evaluate`.
        progress: Called with (tokens of the text done, all of them) after each batch.

    Returns:
        The SpanEvaluation.

    Raises:
        ValueError: An argument breaks a rule above, an id is beyond the vocabulary, no span fits the text, or
            `length` is beyond the model's table of positions, or what it can read.

    Example:
        >>> from linbias.models import LinbiasForConditionalGeneration, LinbiasSeq2SeqConfig
        >>> config = LinbiasSeq2SeqConfig(vocab_size=356, hidden_size=8, num_attention_heads=2)
        >>> ids = np.frombuffer(b"to be or not to be, that is", np.uint8)
        >>> tokens = SpanTokens(begin=2, end=3, sentinels=range(256, 356))
        >>> result = evaluate_spans(LinbiasForConditionalGeneration(config), ids, length=16, tokens=tokens)
        >>> result.num_spans, 5.0 < result.nll < 7.0
        (1, True)
    """
    ids = np.asarray(ids)
    _check(model, ids, length, stride, batch_tokens, limit_tokens)
    ids = ids[:limit_tokens]
    num_tokens, spans = len(ids), spans_of_text(len(ids))
    if not len(spans.starts):
        raise ValueError(
            f"evaluate: text must be long enough to take a span out of it, got {num_tokens} tokens"
        )
    if device is not None:
        model.to(device)
    width = min(length - 1, num_tokens)
    result = score_blocks(
        model,
        span_blocks(num_tokens, width, width if stride is None else min(stride, width), spans),
        lambda batch: _score(model, ids, spans, batch, tokens),
        num_tokens=num_tokens,
        width=width,
        batch_tokens=batch_tokens,
        precision=precision,
        progress=progress,
    )
    loss_sum, num_right = result.sums
    num_scored = int((spans.stops - spans.starts).sum())
    return SpanEvaluation(
        length=length,
        stride=stride,
        num_tokens=num_tokens,
        num_scored=num_scored,
        nll=float(loss_sum) / num_scored,
        accuracy=float(num_right) / num_scored,
        tokens_per_second=num_tokens / result.seconds,
        peak_memory_bytes=result.peak_memory_bytes,
        num_spans=len(spans.starts),
    )


def _score(
    model: PreTrainedModel,
    ids: NDArray[Any],
    spans: Spans,
    batch: list[Block],
    tokens: SpanTokens,
) -> NDArray[np.float64]:
    """The summed nll of the tokens of spans that the blocks score, and how many of them were right."""
    rows, scored = [], []
    for block in batch:
        inside, wanted = (
            slice(*np.searchsorted(spans.starts, ends))
            for ends in ((block.start, block.stop), (block.first, block.end))
        )
        if wanted.start == wanted.stop:
            continue
        taken = Spans(*(places[inside] - block.start for places in spans))
        text = ids[block.start : block.stop]
        rows.append(span_row(text, taken, int(inside.start), tokens))
        scored.append((rows[-1].numbers >= wanted.start) & (rows[-1].numbers < wanted.stop))
    if not rows:
        return np.zeros(2)
    read = {name: value.to(model.device) for name, value in span_batch(rows, tokens).items()}
    labels = read.pop("labels")
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    for line, places in zip(chosen, scored, strict=True):
        line[: len(places)] = torch.from_numpy(places)
    logits = model(**read, use_cache=False).logits[chosen].float()
    losses = F.cross_entropy(logits, labels[chosen], reduction="none").double().sum()
    return np.array([float(losses), float((logits.argmax(-1) == labels[chosen]).sum())])


def _check(
    model: PreTrainedModel,
    ids: NDArray[Any],
    length: int,
    stride: int | None,
    batch_tokens: int,
    limit_tokens: int | None,
) -> None:
    if length <= LONGEST_SPAN:
        raise ValueError(
            f"evaluate: length must be at least {LONGEST_SPAN + 1}, to hold the longest span, got {length}"
        )
    if stride is not None and not LONGEST_SPAN <= stride < length:
        raise ValueError(
            f"evaluate: stride must lie in [{LONGEST_SPAN}, length - 1 = {length - 1}], got {stride}"
        )
    check_call(model, ids, length, stride, batch_tokens, limit_tokens)
