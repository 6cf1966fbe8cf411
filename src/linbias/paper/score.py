"""Scores a text as the original does, many windows at a time.

The original cuts a text into blocks of length - context_window ids, and reads, before each block,
up to context_window inputs of those before it. The inputs are the ids after a first </s>.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linbias._run.files import Record
from linbias.lm.checkpoints import readable_model
from linbias.lm.evaluation import computing, losses_of
from linbias.lm.windows import Likelihood, Window, check_tokens
from linbias.paper.blocks import block_order
from linbias.paper.checkpoint import check_dictionary, load
from linbias.paper.dictionary import check_words
from linbias.paper.model import PaperForCausalLM
from linbias.paper.store import read_data


@dataclass(frozen=True)
class Scores(Likelihood):
    """What `score` measured: log_probs are those of all ids in nats, in the order of the text."""

    log_probs: NDArray[np.float32]
    length: int
    context_window: int
    tokens_per_second: float
    peak_memory_bytes: int
    split: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.log_probs)

    @property
    def nll(self) -> float:  # type: ignore[override]
        """Mean nats per id, summed in float64."""
        return float(-self.log_probs.mean(dtype=np.float64))

    @property
    def loss_base2(self) -> float:
        """Mean bits per id."""
        return self.nll / math.log(2.0)

    def to_dict(self) -> Record:
        """All but the ids' own scores, as JSON values."""
        names = ("split", "length", "context_window", "num_tokens", "loss_base2", "perplexity")
        measured = ("line", "tokens_per_second", "peak_memory_bytes")
        return {name: getattr(self, name) for name in (*names, *measured)}

    @property
    def line(self) -> str:
        """The line that the original prints, to its last digit: it adds up blocks in float32, in
        the order of the text or, without a context window, of its batches of seed 1.
        """
        blocks = torch.from_numpy(self.log_probs).split(self.length - self.context_window)
        order = np.arange(len(blocks))
        if self.context_window == 0:
            order = block_order(np.array([len(block) for block in blocks]), seed=1)
        total = torch.zeros(())
        for index in order:
            total = total + blocks[index].sum()
        loss = -total / len(self.log_probs) / math.log(2)
        return f"Loss (base 2): {loss:.4f}, Perplexity: {2**loss:.2f}"


def windows(num_ids: int, length: int, context_window: int = 0) -> Iterator[Window]:
    """The windows that predict each id once: the first is of all blocks whose context reaches the
    start of the text, which is the same to a causal model.
    """
    block = length - context_window
    stop = min(num_ids, block * (context_window // block + 1))
    yield Window(0, stop, stop)
    while stop < num_ids:
        scored, stop = stop, min(stop + block, num_ids)
        yield Window(scored - context_window, stop, stop - scored)


def score(
    model: PaperForCausalLM,
    ids: NDArray[Any],
    *,
    length: int,
    context_window: int = 0,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores every id of a text, from its own block and context_window inputs before it."""
    ids = np.asarray(ids)
    _check(model, ids, length, context_window, batch_tokens)
    log_probs, num_done = np.empty(len(ids), np.float32), 0
    start_time = time.perf_counter()
    with computing(model, device=None, longest=length) as memory:
        stream = np.concatenate([[model.config.eos_token_id], ids])
        every = windows(len(ids), length, context_window)
        for losses, _ in losses_of(model, stream, every, batch_tokens):
            scored = -losses.flatten().float().cpu().numpy()
            log_probs[num_done : num_done + len(scored)] = scored
            num_done += len(scored)
            if progress is not None:
                progress(num_done, len(ids))
    return Scores(
        log_probs=log_probs,
        length=length,
        context_window=context_window,
        tokens_per_second=num_done / (time.perf_counter() - start_time),
        peak_memory_bytes=memory.peak_bytes,
    )


def load_for(
    path: str | Path, data: str | Path, *, position: str | None = None
) -> PaperForCausalLM:
    """Loads a model, or a run's newest checkpoint, with the same words as a folder of data."""
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
    """Scores a split of a folder of data, on a GPU where there is one; length None: as trained."""
    dictionary, ids = read_data(data, split)
    check_dictionary(dictionary, model.config, Path(data, "dict.txt"), "evaluate")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    length = model.config.train_length if length is None else length
    return replace(score(model, ids, length=length, **options), split=split)


def _check(
    model: PaperForCausalLM, ids: NDArray[Any], length: int, context_window: int, batch_tokens: int
) -> None:
    check_tokens("score", ids, model.config.vocab_size, at_least=1)
    for name, value in [("length", length), ("batch_tokens", batch_tokens)]:
        if value < 1:
            raise ValueError(f"score: {name} must be at least 1, got {value}")
    if not 0 <= context_window < length:
        raise ValueError(
            f"score: context_window must lie in [0, length = {length}), got {context_window}"
        )
