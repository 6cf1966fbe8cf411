"""How well a masked language model tells masked tokens of a text when it reads `length` tokens at a time.

Which tokens of the text are masked is decided once, for all of it, before it is cut: at every length, and for every
model of the same tokenizer, the same tokens are masked and scored, each exactly once. Only how much of the text
around them is read at a time differs.

    text             t t m t t t m t t t t m
    blocks of 4      t t m t|t t m t|t t t m
    stride 2         . . m t
                         . t t .                  (. read, the others scored)
                             . m t .  ...

Blocks (stride=None) are the cheap mode: a token at the end of one is told from one side alone, and longer blocks
have fewer ends. With a stride, only the middle `stride` tokens of a block are scored, so that each has at least
(length - 1 - stride) / 2 tokens on either side, but at the ends of the text. The token that begins a sequence comes
before every block and counts in its length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from transformers import PreTrainedModel

from linbias._run.files import Record
from linbias._run.processes import max_over_all, num_processes, rank, sum_over_all
from linbias.data.masked import MASK_SHARE, MaskTokens, masked_rows
from linbias.lm.evaluation import MAX_LOGITS, computing_in
from linbias.lm.memory import PeakMemory
from linbias.lm.windows import check_tokens
from linbias.models.limits import able_to_read, position_limit


@dataclass(frozen=True)
class MaskedEvaluation:
    """What `evaluate_masked` measured.

    Attributes:
        length: Tokens read at a time.
        stride: Tokens by which the blocks move; None for blocks without overlap.
        num_tokens: Tokens of the text.
        num_scored: Masked ones, all of which were scored.
        nll: Mean negative log likelihood, nats per masked token.
        accuracy: Share of the masked tokens that the model held for the likeliest.
        tokens_per_second: Tokens of the text per second of wall time.
        peak_memory_bytes: Highest memory of the process, or of the CUDA device, meanwhile; of several processes,
            the highest.
    """

    length: int
    stride: int | None
    num_tokens: int
    num_scored: int
    nll: float
    accuracy: float
    tokens_per_second: float
    peak_memory_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite where that is beyond a float."""
        return math.exp(self.nll) if self.nll < 709.0 else math.inf

    def to_dict(self) -> Record:
        """All fields and the property as JSON values."""
        return {**asdict(self), "perplexity": self.perplexity}

    @classmethod
    def from_dict(cls, record: Record) -> MaskedEvaluation:
        """The reverse of `to_dict`; entries that are no fields are ignored."""
        return cls(**{f.name: record[f.name] for f in fields(cls)})


class Block(NamedTuple):
    """The model reads tokens [start, stop) of the text; those of [first, end) are scored."""

    start: int
    stop: int
    first: int
    end: int


def blocks(num_tokens: int, width: int, stride: int | None = None) -> Iterator[Block]:
    """The blocks that score each token once, as drawn above; the last one reaches back so as to be whole.

    Example:
        >>> [tuple(block) for block in blocks(7, width=3)]
        [(0, 3, 0, 3), (3, 6, 3, 6), (4, 7, 6, 7)]
        >>> [tuple(block) for block in blocks(6, width=4, stride=2)]
        [(0, 4, 0, 3), (2, 6, 3, 6)]
    """
    stride = stride or width
    behind = width - stride - (width - stride) // 2
    scored = start = 0
    while scored < num_tokens:
        stop = min(start + width, num_tokens)
        end = num_tokens if stop == num_tokens else stop - behind
        yield Block(max(0, stop - width), stop, scored, end)
        scored, start = end, start + stride


def masked_positions(num_tokens: int) -> NDArray[np.bool_]:
    """Which tokens of a text are masked: [num_tokens]. Those of a longer text begin with those of a shorter one.

    Example:
        >>> masked_positions(5).tolist()
        [False, False, True, True, False]
    """
    return np.random.default_rng(0).random(num_tokens) < MASK_SHARE


def evaluate_masked(
    model: PreTrainedModel,
    ids: NDArray[Any],
    *,
    length: int,
    tokens: MaskTokens,
    stride: int | None = None,
    batch_tokens: int = 16384,
    limit_tokens: int | None = None,
    device: torch.device | str | None = None,
    precision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MaskedEvaluation:
    """Scores a masked language model on a text, `length` tokens at a time.

        nll = mean over the masked i of -log p(ids[i] | the tokens of its block, masked ones hidden)

    Where a process group of torch.distributed is initialised, every process calls this with the same arguments
    but for the device: they share the batches, and all return the same result.

    Args:
        model: A Transformers masked language model.
        ids: [N], integers, N >= 1: the text as the model's tokens.
        length: Tokens read at a time, 2 or more, the one that begins a sequence among them.
        tokens: The ids that begin a sequence and stand for a masked token.
        stride: None for blocks without overlap, else 1 <= stride < length.
        batch_tokens: Tokens read in one forward pass (at least one block).
        limit_tokens: Read at most this many tokens, from the start of the text.
        device: Where to compute; None leaves the model where it is.
        precision: As for `evaluate`.
        progress: Called with (tokens of the text done, all of them) after each batch.

    Returns:
        The MaskedEvaluation.

    Raises:
        ValueError: An argument breaks a rule above, an id is beyond the vocabulary, no token is masked, or
            `length` is beyond the model's table of positions, or what it can read.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForMaskedLM
        >>> config = LinbiasConfig(hidden_size=8, num_attention_heads=2, encoder_position="symmetric")
        >>> ids = np.frombuffer(b"to be or not to be", np.uint8)
        >>> result = evaluate_masked(LinbiasForMaskedLM(config), ids, length=8, tokens=MaskTokens(2, 26))
        >>> result.num_scored, 5.0 < result.nll < 6.0
        (4, True)
    """
    ids = np.asarray(ids)
    check_call(model, ids, length, stride, batch_tokens, limit_tokens)
    ids = ids[:limit_tokens]
    num_tokens, masked = len(ids), masked_positions(len(ids))
    if not masked.any():
        raise ValueError(
            f"evaluate: text must be long enough to mask a token, got {num_tokens} tokens"
        )
    if device is not None:
        model.to(device)
    width = min(length - 1, num_tokens)
    result = score_blocks(
        model,
        blocks(num_tokens, width, None if stride is None else min(stride, width)),
        lambda batch: _score(model, ids, masked, batch, tokens),
        num_tokens=num_tokens,
        width=width,
        batch_tokens=batch_tokens,
        precision=precision,
        progress=progress,
    )
    loss_sum, num_right = result.sums
    num_scored = int(masked.sum())
    return MaskedEvaluation(
        length=length,
        stride=stride,
        num_tokens=num_tokens,
        num_scored=num_scored,
        nll=float(loss_sum) / num_scored,
        accuracy=float(num_right) / num_scored,
        tokens_per_second=num_tokens / result.seconds,
        peak_memory_bytes=result.peak_memory_bytes,
    )


class ScoredBlocks(NamedTuple):
    """What `score_blocks` found: the sums of what the scores of batches hold, over all processes."""

    sums: NDArray[np.float64]
    seconds: float
    peak_memory_bytes: int


def score_blocks(
    model: PreTrainedModel,
    every_block: Iterator[Block],
    score: Callable[[list[Block]], NDArray[np.float64]],
    *,
    num_tokens: int,
    width: int,
    batch_tokens: int,
    precision: str | None,
    progress: Callable[[int, int], None] | None,
) -> ScoredBlocks:
    """Scores the blocks of a text in batches, which the processes share.

    Args:
        model: In evaluation mode meanwhile.
        every_block: Of at most `width` tokens each.
        score: Given the blocks of a batch, returns an array of sums.
        num_tokens: Tokens of the text, for `progress`.
        batch_tokens, precision, progress: As for `evaluate_masked`.
    """
    was_training = model.training
    model.eval()
    rows = max(1, min(batch_tokens, MAX_LOGITS // model.config.vocab_size) // (width + 1))
    sums, num_done, start_time = np.zeros(2), 0, time.perf_counter()
    try:
        with (
            PeakMemory(model.device) as memory,
            computing_in(model, precision),
            able_to_read(model, width + 1),
            torch.inference_mode(),
        ):
            batches = iter(lambda: list(islice(every_block, rows)), [])
            for batch in islice(batches, rank(), None, num_processes()):
                sums += score(batch)
                num_done += batch[-1].end - batch[0].first
                if progress is not None:
                    progress(min(num_done * num_processes(), num_tokens), num_tokens)
    finally:
        model.train(was_training)
    return ScoredBlocks(
        sum_over_all(sums, model.device),
        time.perf_counter() - start_time,
        max_over_all(memory.peak_bytes, model.device),
    )


def _score(
    model: PreTrainedModel,
    ids: NDArray[Any],
    masked: NDArray[np.bool_],
    batch: list[Block],
    tokens: MaskTokens,
) -> NDArray[np.float64]:
    """The summed nll of the masked tokens that the blocks score, and how many of them were right."""
    places = np.stack([np.arange(block.start, block.stop) for block in batch])
    first, end = (np.array([[getattr(b, name)] for b in batch]) for name in ("first", "end"))
    scored = masked[places] & (places >= first) & (places < end)
    read = masked_rows(ids[places], masked[places], tokens)["input_ids"].to(model.device)
    logits = model(input_ids=read).logits[:, 1:][torch.from_numpy(scored).to(model.device)].float()
    targets = torch.from_numpy(ids[places][scored].astype(np.int64)).to(model.device)
    losses = F.cross_entropy(logits, targets, reduction="none").double().sum()
    return np.array([float(losses), float((logits.argmax(-1) == targets).sum())])


def check_call(
    model: PreTrainedModel,
    ids: NDArray[Any],
    length: int,
    stride: int | None,
    batch_tokens: int,
    limit_tokens: int | None,
) -> None:
    """Raises a ValueError where an argument of an evaluation in blocks breaks its rule."""
    check_tokens("evaluate", ids, model.config.vocab_size, at_least=1)
    for name, value, least in [
        ("length", length, 2),
        ("batch_tokens", batch_tokens, 1),
        ("limit_tokens", 1 if limit_tokens is None else limit_tokens, 1),
    ]:
        if value < least:
            raise ValueError(f"evaluate: {name} must be at least {least}, got {value}")
    if stride is not None and not 1 <= stride < length:
        raise ValueError(
            f"evaluate: stride must lie in [1, length - 1 = {length - 1}], got {stride}"
        )
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(
            f"evaluate: length must be at most {limit}, the rows of the model's table of learned "
            f"positions; got {length}"
        )
