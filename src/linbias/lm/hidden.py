"""How well a model tells tokens that are hidden from it when it reads `length` at a time.

Which ones are masked is decided once for the whole text: all lengths score the same. Without a
stride, those at the end of a block are told from one side.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from transformers import PreTrainedModel

from linbias._run.processes import max_over_all, num_processes, rank, sum_over_all
from linbias.data.segments import MASK_SHARE, MaskTokens, masked_rows
from linbias.lm.evaluation import MAX_LOGITS, check_call, computing
from linbias.lm.windows import Likelihood, check_tokens


@dataclass(frozen=True)
class HiddenEvaluation(Likelihood):
    """What `evaluate_hidden` measured; fields that `Evaluation` has too mean the same."""

    length: int
    stride: int | None
    num_tokens: int  # of the text
    num_scored: int  # hidden ones
    nll: float  # nats per hidden token
    accuracy: float  # share of the hidden tokens that the model held for the likeliest
    tokens_per_second: float
    peak_memory_bytes: int

    @property
    def bits_per_hidden_token(self) -> float:
        return self.nll / math.log(2.0)

    def describe(self) -> str:
        return f"masked and scored {self.num_scored:,} of {self.num_tokens:,} tokens"


class Block(NamedTuple):
    """The model reads tokens [start, stop) of the text; those of [first, end) are scored."""

    start: int
    stop: int
    first: int
    end: int


def masked_blocks(num_tokens: int, width: int, stride: int | None = None) -> Iterator[Block]:
    """The blocks that score each token once; the last one reaches back so as to be whole."""
    stride = stride or width
    behind = width - stride - (width - stride) // 2
    scored = start = 0
    while scored < num_tokens:
        stop = min(start + width, num_tokens)
        end = num_tokens if stop == num_tokens else stop - behind
        yield Block(max(0, stop - width), stop, scored, end)
        scored, start = end, start + stride


def masked_positions(num_tokens: int) -> NDArray[np.bool_]:
    """Which tokens of a text are masked: of a longer one, first those of a shorter one."""
    return np.random.default_rng(0).random(num_tokens) < MASK_SHARE


def evaluate_hidden(
    model: PreTrainedModel,
    ids: NDArray[Any],
    *,
    length: int,
    tokens: MaskTokens,
    stride: int | None = None,
    batch_tokens: int = 16384,
    limit_tokens: int | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HiddenEvaluation:
    """Scores a masked model on a text, as `evaluate` does a causal one."""
    ids = np.asarray(ids)
    check_tokens("evaluate", ids, model.config.vocab_size, at_least=1)
    if length < 2:
        raise ValueError(f"evaluate: length must be at least 2, got {length}")
    if stride is not None and not 1 <= stride < length:
        raise ValueError(
            f"evaluate: stride must lie in [1, length - 1 = {length - 1}], got {stride}"
        )
    check_call(model, length, batch_tokens, limit_tokens)
    ids = ids[:limit_tokens]
    num_tokens = len(ids)
    width = min(length - 1, num_tokens)
    moved = width if stride is None else min(stride, width)
    masked = masked_positions(num_tokens)
    num_scored = int(masked.sum())
    if not num_scored:
        raise ValueError(
            f"evaluate: text must be long enough to mask a token, got {num_tokens} tokens"
        )
    rows = max(1, min(batch_tokens, MAX_LOGITS // model.config.vocab_size) // (width + 1))
    sums, num_done, start_time = np.zeros(2), 0, time.perf_counter()
    with computing(model, device, width + 1) as memory:
        every_block = masked_blocks(num_tokens, width, moved)
        batches = iter(lambda: list(islice(every_block, rows)), [])
        for batch in islice(batches, rank(), None, num_processes()):
            sums += _score(model, ids, masked, tokens, batch)
            num_done += batch[-1].end - batch[0].first
            if progress is not None:
                progress(min(num_done * num_processes(), num_tokens), num_tokens)
    loss_sum, num_right = sum_over_all(sums, model.device)
    return HiddenEvaluation(
        length=length,
        stride=stride,
        num_tokens=num_tokens,
        num_scored=num_scored,
        nll=float(loss_sum) / num_scored,
        accuracy=float(num_right) / num_scored,
        tokens_per_second=num_tokens / (time.perf_counter() - start_time),
        peak_memory_bytes=max_over_all(memory.peak_bytes, model.device),
    )


def _score(
    model: PreTrainedModel,
    ids: NDArray[Any],
    masked: NDArray[np.bool_],
    tokens: MaskTokens,
    batch: list[Block],
) -> NDArray[np.float64]:
    """The summed nll of the masked tokens that the blocks score, and how many were right."""
    places = np.stack([np.arange(block.start, block.stop) for block in batch])
    first, end = (np.array([[getattr(b, name)] for b in batch]) for name in ("first", "end"))
    scored = masked[places] & (places >= first) & (places < end)
    read = masked_rows(ids[places], masked[places], tokens)["input_ids"].to(model.device)
    logits = model(input_ids=read).logits[:, 1:][torch.from_numpy(scored).to(model.device)]
    targets = torch.from_numpy(ids[places][scored].astype(np.int64)).to(model.device)
    losses = F.cross_entropy(logits.float(), targets, reduction="none").double().sum()
    return np.array([float(losses), float((logits.argmax(-1) == targets).sum())])
