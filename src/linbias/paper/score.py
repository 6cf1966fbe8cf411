"""Scores a text as the original does, many windows at a time, and continues where a run was stopped.

The original cuts N ids into blocks of length - context_window. The inputs are the ids shifted right by
one, with </s> first, so every id is predicted once. A block's input is preceded by up to
context_window inputs of the blocks before it. Length 4 (. read, * scored):

    context_window 0                 context_window 2              context_window 3
    * * * *                          * *                           *
            * * * *                  . . * *                       . *
                    * *                  . . * *                   . . *
                                             . . * *               . . . *
                                                 . . * *             . . . *

The blocks whose context reaches the start of the text are scored in one pass: to a causal model that
is the same. All others but the last have one shape, and are scored `batch_tokens` at a time.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias._run.files import Record, check_writable, write_whole
from linbias._run.folders import list_differences
from linbias.lm.checkpoints import readable_model
from linbias.lm.memory import PeakMemory, available_bytes
from linbias.lm.windows import Window, check_tokens, equal_windows
from linbias.paper.checkpoint import check_dictionary, load
from linbias.paper.config import PaperConfig
from linbias.paper.dictionary import check_words
from linbias.paper.model import PaperForCausalLM
from linbias.paper.store import read_data

_SECONDS_BETWEEN_WRITES = 30.0


@dataclass(frozen=True)
class Scores:
    """What `score` measured.

    Attributes:
        log_probs: [N], float32: log p of each id in nats, in the order of the text.
        length: Most inputs that a prediction reads.
        context_window: Inputs among them that belong to the blocks before.
        tokens_per_second: Ids scored per second; 0 where a resumed run was complete.
        peak_memory_bytes: Highest memory of the process, or of the CUDA device, meanwhile.
        split: "train", "valid" or "test"; None for other text.
    """

    log_probs: NDArray[np.float32]
    length: int
    context_window: int
    tokens_per_second: float
    peak_memory_bytes: int
    split: str | None = None

    @property
    def num_tokens(self) -> int:
        """Ids that were scored: all."""
        return len(self.log_probs)

    @property
    def loss_base2(self) -> float:
        """Mean bits per id, summed in float64."""
        return float(-self.log_probs.mean(dtype=np.float64) / math.log(2.0))

    @property
    def perplexity(self) -> float:
        """2^loss_base2; infinite where that is beyond a float."""
        return math.inf if self.loss_base2 >= 1024.0 else 2.0**self.loss_base2

    def to_dict(self) -> Record:
        """All but the ids' own scores, as JSON values."""
        names = ("split", "length", "context_window", "num_tokens", "loss_base2", "perplexity")
        measured = ("line", "tokens_per_second", "peak_memory_bytes")
        return {name: getattr(self, name) for name in (*names, *measured)}

    @property
    def line(self) -> str:
        """The line that the original prints, to its last digit.

        The original adds up in float32, each block and then the blocks, in the order of its
        batches: with a context window, that of the text; without one, the short last block first
        and the others shuffled by seed 1. The fifth digit of the perplexity can depend on it.
        """
        blocks = torch.from_numpy(self.log_probs).split(self.length - self.context_window)
        order = np.arange(len(blocks))
        if self.context_window == 0:
            shuffled = np.random.RandomState(1).permutation(len(blocks))
            order = np.lexsort((shuffled, np.array([len(block) for block in blocks])))
        total = torch.zeros(())
        for index in order:
            total = total + blocks[index].sum()
        loss = -total / len(self.log_probs) / math.log(2)
        return f"Loss (base 2): {loss:.4f}, Perplexity: {2**loss:.2f}"


def windows(num_ids: int, length: int, context_window: int = 0) -> Iterator[Window]:
    """The windows that predict each of `num_ids` ids once, as drawn above.

    Example:
        >>> [tuple(window) for window in windows(7, length=4, context_window=2)]
        [(0, 4, 4), (2, 6, 2), (4, 7, 1)]
    """
    block = length - context_window
    stop = min(num_ids, block * (context_window // block + 1))
    yield Window(0, stop, stop)
    while stop < num_ids:
        scored, stop = stop, min(stop + block, num_ids)
        yield Window(scored - context_window, stop, stop - scored)


@torch.inference_mode()
def score(
    model: PaperForCausalLM,
    ids: NDArray[Any],
    *,
    length: int,
    context_window: int = 0,
    batch_tokens: int = 16384,
    resume: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores every id of a text, from its own block and context_window inputs before it.

    Args:
        model: On the CPU or a GPU, where it also computes.
        ids: [N], integers, N >= 1: all lines of a split, one after another.
        length: Inputs of a window, the block and its context; may be more than N.
        context_window: 0 for blocks without overlap; length - 1 predicts every id from the
            length - 1 inputs before its own.
        batch_tokens: Inputs read in one forward pass (at least one window). resume: A file from
        which a stopped run continues, written every half minute and at the end. progress: Called
        with (ids scored, N) after each batch.

    Raises:
        ValueError: An argument breaks a rule above, an id is beyond the vocabulary, a window does
            not fit in memory, or `resume` is of other settings, another model or another text.

    Example:
        >>> config = PaperConfig(vocab_size=50, hidden_size=32, cutoffs=(10,), num_hidden_layers=2)
        >>> ids = np.arange(20, 50)
        >>> score(PaperForCausalLM(config), ids, length=8, context_window=4).log_probs.shape
        (30,)

    Source: Press, Smith and Lewis, ICLR 2022, section 2 and appendix B; `eval_lm` of its
    repository.
    """
    ids = np.asarray(ids)
    _check(model, ids, length, context_window, batch_tokens)
    log_probs = np.empty(len(ids), np.float32)
    file = None
    if resume is not None:
        file = _ScoresFile(Path(resume), _settings(model, ids, length, context_window), log_probs)
    num_read = num_done = file.read() if file else 0
    was_training = model.training
    model.eval()

    start_time = time.perf_counter()
    try:
        with PeakMemory(model.device) as memory:
            missing = windows(len(ids), length, context_window)
            missing = dropwhile(lambda window: window.stop <= num_read, missing)
            for inputs, targets in _batches(model, ids, equal_windows(missing, batch_tokens)):
                scored = model.log_probs(inputs, targets).flatten().float().cpu().numpy()
                log_probs[num_done : num_done + len(scored)] = scored
                num_done += len(scored)
                if file and file.is_due():
                    file.write(num_done)
                if progress is not None:
                    progress(num_done, len(ids))
    finally:
        model.train(was_training)
        if file and num_done > num_read:
            file.write(num_done)
    seconds = time.perf_counter() - start_time
    return Scores(
        log_probs=log_probs,
        length=length,
        context_window=context_window,
        tokens_per_second=(num_done - num_read) / seconds,
        peak_memory_bytes=memory.peak_bytes,
    )


def load_for(
    path: str | Path, data: str | Path, *, position: str | None = None
) -> PaperForCausalLM:
    """Loads a model to evaluate on a folder of data, and checks that both have the same words.

    `path` and `position` are as for `load`; of a run that has not finished, the newest undamaged
    checkpoint is read.
    """
    path = readable_model("evaluate", path)
    model = load(path, position=position)
    if Path(path, "dict.txt").is_file():
        check_words(Path(path, "dict.txt"), Path(data, "dict.txt"), "evaluate")
    return model


def evaluate(
    model: PaperForCausalLM,
    data: str | Path,
    split: str,
    *,
    length: int | None = None,
    **options: Any,
) -> Scores:
    """Scores a split of a folder of data, on a GPU where there is one.

    `length` is as for `score`, and None is the length that the model was trained with; `options`
    are those of `score`.
    """
    dictionary, ids = read_data(data, split)
    check_dictionary(dictionary, model.config, Path(data, "dict.txt"), "evaluate")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    length = model.config.train_length if length is None else length
    return replace(score(model, ids.tokens, length=length, **options), split=split)


def _batches(
    model: PaperForCausalLM, ids: NDArray[Any], batches: Iterable[list[Window]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of equal windows: inputs [rows, width], and targets [rows, keep] of their ends."""
    numbers = np.concatenate([[model.config.eos_token_id], ids]).astype(np.int64)
    stream = torch.from_numpy(numbers).to(model.device)
    for batch in batches:
        first, last = batch[0], batch[-1]
        inputs = stream[first.start : last.stop].unfold(0, first.width, first.keep)
        targets = stream[first.stop - first.keep + 1 : last.stop + 1].view(-1, first.keep)
        yield inputs, targets


def _check(
    model: PaperForCausalLM, ids: NDArray[Any], length: int, context_window: int, batch_tokens: int
) -> None:
    """Refuses a call that breaks a rule, or whose passes would not fit in the free memory."""
    check_tokens("score", ids, model.config.vocab_size, at_least=1)
    for name, value in [("length", length), ("batch_tokens", batch_tokens)]:
        if value < 1:
            raise ValueError(f"score: {name} must be at least 1, got {value}")
    if not 0 <= context_window < length:
        raise ValueError(
            f"score: context_window must lie in [0, length = {length}), got {context_window}"
        )
    num_ids = len(ids)
    width, keep = min(length, num_ids), min(length - context_window, num_ids)
    rows = min(max(1, batch_tokens // width), 1 + num_ids // keep)
    needed = _pass_bytes(model, rows, width, keep)
    free = available_bytes(model.device)
    if needed > free:
        raise ValueError(
            f"score: length and batch_tokens must fit in memory, got {length} and {batch_tokens}: "
            f"a pass needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )


def _pass_bytes(model: PaperForCausalLM, rows: int, width: int, keep: int) -> int:
    """Roughly the highest memory of a forward pass over [rows, width], without the weights.

    Measured on 16,384 tokens: 5 to 14 times hidden_size numbers per token, with intermediate_size 1
    to 4 times hidden_size; on 3,000 tokens with "t5", 3 biases.
    """
    config = model.config
    numbers = rows * width * (8 * config.hidden_size + 2 * config.intermediate_size)
    squares = config.num_attention_heads * width * width
    if config.position == "t5":
        numbers += 3 * squares
    elif config.position == "alibi" and config.attention_implementation == "dense":
        numbers += 4 * rows * squares
    elif config.position != "alibi" and 1 < keep < width:
        numbers += 2 * keep * width  # the causal mask of the last block
    return numbers * model.dtype.itemsize


def _settings(
    model: PaperForCausalLM, ids: NDArray[Any], length: int, context_window: int
) -> Record:
    """What the scores depend on."""
    weights = hashlib.sha256()
    for name in PaperConfig.__annotations__:
        weights.update(f"{name}={getattr(model.config, name)!r}".encode())
    for tensor in model.state_dict().values():
        weights.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return {
        "length": length,
        "context_window": context_window,
        "num_ids": len(ids),
        "ids": hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest(),
        "model": weights.hexdigest(),
    }


class _ScoresFile:
    """A file that keeps the scores of a run, with the settings that they were made with."""

    def __init__(self, path: Path, settings: Record, log_probs: NDArray[np.float32]) -> None:
        check_writable(path.parent, "score")
        self.path, self.settings, self.log_probs = path, settings, log_probs
        self.last_write = time.perf_counter()

    def read(self) -> int:
        """Copies the scores of an earlier session; returns how many there are."""
        if not self.path.exists():
            return 0
        try:
            with self.path.open("rb") as file:
                content = np.load(file, allow_pickle=False)
                there, done = json.loads(str(content["settings"])), content["log_probs"]
        except (OSError, EOFError, ValueError, LookupError, zipfile.BadZipFile) as error:
            raise ValueError(f"score: resume must be a file of scores, got {self.path}") from error
        differences = list_differences(there, self.settings)
        if differences:
            raise ValueError(f"score: resume must be of this run, got {self.path} ({differences})")
        self.log_probs[: len(done)] = done
        return len(done)

    def is_due(self) -> bool:
        """Whether the last write was long enough ago."""
        return time.perf_counter() - self.last_write > _SECONDS_BETWEEN_WRITES

    def write(self, num_done: int) -> None:
        """Keeps the first `num_done` scores."""
        buffer = io.BytesIO()
        settings = json.dumps(self.settings)
        np.savez(buffer, settings=settings, log_probs=self.log_probs[:num_done])
        write_whole(self.path, buffer.getvalue())
        self.last_write = time.perf_counter()
