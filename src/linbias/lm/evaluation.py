"""How well a language model predicts a text when it reads `length` tokens at a time.

Segments are the cheap mode of the paper: the first tokens of each have almost no context (appendix
B). A sliding window gives each at least length - stride + 1 tokens, and no cache could: its deep
states depend on tokens that have left the window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from transformers import PreTrainedModel

from linbias._run.files import Record
from linbias._run.processes import ALONE, Sharing, max_over_all, num_processes, sum_over_all
from linbias.lm.memory import PeakMemory
from linbias.lm.windows import Likelihood, Window, check_tokens, equal_windows, rows_of
from linbias.models.decoder.linbias import LinbiasForMaskedLM
from linbias.models.decoder.seq2seq import LinbiasForConditionalGeneration
from linbias.models.limits import able_to_read, position_limit
from linbias.torch.context_parallel import shard, use

_OTHERS = {
    LinbiasForMaskedLM: "sees later tokens (evaluate_hidden scores it)",
    LinbiasForConditionalGeneration: "reads one text to write another (its own loss scores it)",
}
# Float32 logits that are held at once at most, 64 MiB: more make nothing faster.
MAX_LOGITS = 2**24
_PLAIN = {"use_cache": False, "return_dict": True}


@dataclass(frozen=True)
class Evaluation(Likelihood):
    """What `evaluate` measured."""

    length: int  # tokens read at a time
    stride: int | None  # tokens by which the window moves; None for segments without overlap
    num_tokens: int  # predictions scored
    num_bytes: int | None  # of UTF-8, of the scored tokens; None where not known
    nll: float
    tokens_per_second: float  # of predictions and of wall time
    peak_memory_bytes: int  # of the process, or of the CUDA device; the highest of several
    loss_by_position: tuple[float | None, ...]  # [length], of predictions from 1, 2, ... tokens
    count_by_position: tuple[int, ...]  # [length], how many predictions that is the mean of

    def __repr__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", bits_per_byte={self.bits_per_byte:.4f}"
        return (
            f"Evaluation(length={self.length}, stride={self.stride}, "
            f"num_tokens={self.num_tokens}, nll={self.nll:.4f}, "
            f"perplexity={self.perplexity:.4f}{bits})"
        )

    @property
    def bits_per_byte(self) -> float | None:
        """Bits spent per byte of text, which does not depend on the tokenizer."""
        if self.num_bytes is None:
            return None
        return self.nll * self.num_tokens / (math.log(2.0) * self.num_bytes)

    def of_one_piece(self) -> Evaluation:
        """The same of a text that is shorter than `length`, by the length that was read."""
        read = self.num_tokens
        losses, counts = self.loss_by_position[:read], self.count_by_position[:read]
        return replace(self, length=read, loss_by_position=losses, count_by_position=counts)

    def to_dict(self) -> Record:
        return {**super().to_dict(), "bits_per_byte": self.bits_per_byte}

    @classmethod
    def from_dict(cls, record: Record) -> Evaluation:
        values = {f.name: record[f.name] for f in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)


def windows(num_predictions: int, length: int, stride: int | None = None) -> Iterator[Window]:
    """The windows that score each prediction once; sliding ones all read `length` tokens."""
    if stride is None:
        for start in range(0, num_predictions, length):
            stop = min(start + length, num_predictions)
            yield Window(start, stop, stop - start)
        return
    stop = min(length, num_predictions)
    yield Window(0, stop, stop)
    while stop < num_predictions:
        scored, stop = stop, min(stop + stride, num_predictions)
        yield Window(stop - length, stop, stop - scored)


def evaluate(
    model: PreTrainedModel,
    ids: NDArray[Any],
    *,
    length: int,
    stride: int | None = None,
    num_bytes: int | None = None,
    batch_tokens: int = 16384,
    limit_tokens: int | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    context_parallel: int = 1,
) -> Evaluation:
    """Scores a causal language model on a text, `length` tokens at a time.

        nll = mean over i of -log p(ids[i + 1] | ids[window start .. i])

    Every token after the first is scored exactly once, at every length and stride. The losses are
    float32, their sums float64. Processes of an initialised group of torch.distributed share the
    batches: all call this with the same arguments but for the device, and return the same result.

    Args:
        model: Any Transformers causal language model, of linbias or not.
        ids: [N], integers, N >= 2: the text as the model's tokens.
        length: Tokens read at a time; may be more than N.
        stride: None for segments without overlap, else 1 <= stride <= length.
        num_bytes: UTF-8 bytes of the text that `ids` encodes, for bits per byte; in proportion
            where fewer tokens are scored.
        batch_tokens: Tokens read in one forward pass (at least one window).
        limit_tokens: Score at most this many predictions, from the start of the text.
        device: Where to compute; None leaves the model where it is. (Its dtype is that of the
            weights: `load(folder, dtype="bfloat16")` gives them another.)
        progress: Called with (predictions scored, predictions to score) after each batch.
        context_parallel: Processes that share each window (`linbias.torch.context_parallel`);
            their number must be a multiple. The model's attention is linbias'.

    Returns:
        The Evaluation.

    Raises:
        ValueError: An argument breaks a rule above, an id is beyond the vocabulary, or `length` is
            beyond the model's table of positions, or what it can read.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=256, n_embd=8, n_layer=1, n_head=2)
        >>> text = b"to be or not to be"
        >>> ids = np.frombuffer(text, np.uint8)
        >>> result = evaluate(GPT2LMHeadModel(config), ids, length=8, num_bytes=len(text))
        >>> result.num_tokens, 7.0 < result.bits_per_byte < 9.0
        (17, True)

    Source: Press, Smith and Lewis, ICLR 2022, section 2.1 and appendix B.
    """
    ids = np.asarray(ids)
    for kind, advice in _OTHERS.items():
        if isinstance(model, kind):
            raise ValueError(f"evaluate: model must be causal, got one that {advice}")
    check_tokens("evaluate", ids, model.config.get_text_config().vocab_size, at_least=2)
    check_call(model, length, batch_tokens, limit_tokens)
    if stride is not None and not 1 <= stride <= length:
        raise ValueError(f"evaluate: stride must lie in [1, length = {length}], got {stride}")
    sharing = Sharing.by("evaluate", context_parallel)
    num_tokens = min(len(ids) - 1, limit_tokens or len(ids))
    loss_sum, count = np.zeros(length), np.zeros(length, np.int64)
    num_done, start_time = 0, time.perf_counter()
    with computing(model, device, min(length, num_tokens)) as memory:
        every_window = windows(num_tokens, length, stride)
        for losses, scored in losses_of(model, ids, every_window, batch_tokens, sharing):
            loss_sum[scored.start : scored.stop] += losses.double().sum(0).cpu().numpy()
            count[scored.start : scored.stop] += len(losses)
            num_done += losses.numel()
            if progress is not None:
                progress(min(num_done * num_processes(), num_tokens), num_tokens)
    loss_sum, count = sum_over_all(loss_sum, model.device), sum_over_all(count, model.device)
    seconds = time.perf_counter() - start_time
    return Evaluation(
        length=length,
        stride=stride,
        num_tokens=num_tokens,
        num_bytes=None if num_bytes is None else round(num_bytes * num_tokens / len(ids)),
        nll=float(loss_sum.sum() / num_tokens),
        tokens_per_second=num_tokens / seconds,
        peak_memory_bytes=max_over_all(memory.peak_bytes, model.device),
        loss_by_position=tuple(
            float(s / c) if c else None for s, c in zip(loss_sum, count, strict=True)
        ),
        count_by_position=tuple(count.tolist()),
    )


def losses_of(
    model: PreTrainedModel,
    ids: NDArray[Any],
    every_window: Iterable[Window],
    batch_tokens: int,
    sharing: Sharing = ALONE,
) -> Iterator[tuple[Tensor, range]]:
    """The nll [windows, predictions] of what windows of `ids` [N + 1] score, a batch of equal ones
    at a time, and where in them these predictions are; of this process's batches, and its part of
    their windows.
    """
    separate = _head_is_separate(model, ids[:8])
    if not separate:  # all logits of a batch are held at once
        vocab_size = model.config.get_text_config().vocab_size
        batch_tokens = min(batch_tokens, MAX_LOGITS // vocab_size)
    batches = equal_windows(every_window, batch_tokens)
    for batch in islice(batches, sharing.number, None, sharing.of):
        tokens = rows_of(ids, batch, model.device)
        inputs, targets = tokens[:, :-1], tokens[:, -batch[0].keep :]
        yield _own_losses(model, inputs, targets, separate, sharing.group)


def check_call(
    model: PreTrainedModel, length: int, batch_tokens: int, limit_tokens: int | None
) -> None:
    least_one = {"length": length, "batch_tokens": batch_tokens, "limit_tokens": limit_tokens}
    for name, value in least_one.items():
        if value is not None and value < 1:
            raise ValueError(f"evaluate: {name} must be at least 1, got {value}")
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(
            f"evaluate: length must be at most {limit}, the rows of the model's table of learned "
            f"positions; got {length}"
        )


@contextmanager
def computing(
    model: PreTrainedModel, device: torch.device | str | None, longest: int
) -> Iterator[PeakMemory]:
    """Within the block, a model computes for an evaluation, and its memory is measured."""
    if device is not None:
        model.to(device)
    was_training = model.training
    model.eval()
    try:
        with (
            PeakMemory(model.device) as memory,
            able_to_read(model, longest),
            torch.inference_mode(),
        ):
            yield memory
    finally:
        model.train(was_training)


def _head_is_separate(model: PreTrainedModel, ids: NDArray[Any]) -> bool:
    """Whether logits are head(hidden), to be scored in parts: some models scale or cap them."""
    if hasattr(model, "log_probs"):
        return True
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    inputs = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    hidden = model.base_model(input_ids=inputs, **_PLAIN).last_hidden_state
    logits = model(input_ids=inputs, **_PLAIN).logits
    return torch.equal(head(hidden).to(logits.dtype), logits)


def _own_losses(
    model: PreTrainedModel,
    inputs: Tensor,
    targets: Tensor,
    head_is_separate: bool,
    group: ProcessGroup | None,
) -> tuple[Tensor, range]:
    """The nll of the targets in this process's part of the windows, and where there they are."""
    width, (rows, keep) = inputs.shape[1], targets.shape
    first_scored = width - keep
    if group is None or width < group.size():  # too short to be cut
        if group is not None and group.rank():
            return targets.new_zeros(rows, 0), range(0)
        return _losses(model, inputs, targets, head_is_separate), range(first_scored, width)
    part = shard(torch.arange(width), 0, group)
    begin, end = int(part[0]), int(part[-1]) + 1
    scored = range(max(begin, first_scored), max(end, first_scored))
    own = targets[:, scored.start - first_scored : scored.stop - first_scored]
    with use(group):
        # Others read its keys, also where nothing of it is scored.
        read = own if len(scored) else torch.zeros_like(inputs[:, :1])
        losses = _losses(model, inputs[:, begin:end], read, head_is_separate)
    return losses[:, : len(scored)], scored


def _losses(
    model: PreTrainedModel, inputs: Tensor, targets: Tensor, head_is_separate: bool
) -> Tensor:
    """The nll [rows, keep] of `targets`, which follow the last `keep` of `inputs`."""
    if hasattr(model, "log_probs"):  # of the parts of the vocabulary that have targets alone
        return -model.log_probs(inputs, targets)
    rows, keep = targets.shape
    if not head_is_separate:
        logits = model(input_ids=inputs, **_PLAIN).logits[:, -keep:]
        return F.cross_entropy(logits.float().mT, targets, reduction="none")
    hidden = model.base_model(input_ids=inputs, **_PLAIN).last_hidden_state[:, -keep:]
    head: nn.Module = model.get_output_embeddings()
    part_rows = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    parts = zip(
        torch.split(hidden.reshape(rows * keep, -1), part_rows),
        torch.split(targets.reshape(-1), part_rows),
        strict=True,
    )
    losses = [F.cross_entropy(head(h).float(), t, reduction="none") for h, t in parts]
    return torch.cat(losses).view(rows, keep)
