"""Endless texts in constant memory: read and scored in one pass, or written token by token.

All that is kept is a `WindowCache`, and a text is read as if it were one segment.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from linbias._run.progress import Advance
from linbias.lm.memory import PeakMemory
from linbias.lm.text import read_text, stream_text
from linbias.lm.windows import Likelihood
from linbias.models.decoder.cache import CACHE
from linbias.models.loading import Files
from linbias.models.window_cache.cache import WindowCache

CHUNK = 512
_MOST_LOGITS = 1 << 25  # that a chunk may have at once


@dataclass(frozen=True)
class StreamEvaluation(Likelihood):
    """How well a model predicts a text that was read in one pass."""

    num_tokens: int  # predictions scored: all tokens but the first
    nll: float
    tokens_per_second: float
    peak_memory_bytes: int  # of the process, or of the CUDA device
    cache_bytes: int  # at the end
    reach: list[list[float]]  # [layers][key/value heads]: keys that each keeps, at the end
    uncertified: int  # rows of heads that may have missed more than the tolerance
    largest_dropped: float  # most that a row may have missed, as a share of what it read

    def bits_per_byte(self, num_bytes: int) -> float:
        num_bytes = round(num_bytes * self.num_tokens / (self.num_tokens + 1))
        return self.nll * self.num_tokens / (math.log(2.0) * num_bytes)


class StreamScorer:
    """Scores a text of any length in one pass: every token is predicted from all tokens before it.

    Args:
        model: A causal model with linear biases, as `linbias.models.load` gives it; it is put into
            evaluation mode, and runs without gradients.
        chunk: Tokens read at once; where the vocabulary is large, fewer.
        cache: A fresh `WindowCache` for the model; None makes one that follows the text.

    Raises:
        ValueError: The model can have no such cache, chunk is below 1, or the cache holds tokens.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> config = LinbiasConfig(vocab_size=99, **sizes)
        >>> scorer = StreamScorer(LinbiasForCausalLM(config))
        >>> for part in np.split(np.arange(3000) % 99, 10):
        ...     scorer.read(part)
        >>> result = scorer.result()
        >>> result.num_tokens, result.uncertified, 4.0 < result.nll < 5.0
        (2999, 0, True)
    """

    def __init__(
        self, model: PreTrainedModel, *, chunk: int = CHUNK, cache: WindowCache | None = None
    ) -> None:
        if chunk < 1:
            raise ValueError(f"StreamScorer: chunk must be at least 1, got {chunk}")
        self.cache = WindowCache.for_model(model) if cache is None else cache
        if self.cache.get_seq_length():
            raise ValueError(
                "StreamScorer: cache must be fresh, got one of "
                f"{self.cache.get_seq_length():,} tokens"
            )
        self.model = model.eval()
        self.vocab_size = model.config.get_text_config().vocab_size
        self.chunk = max(1, min(chunk, _MOST_LOGITS // self.vocab_size))
        self._last: Tensor | None = None  # [1, V], the logits of the token to come
        self._sum, self.num_read, self._seconds, self._peak = 0.0, 0, 0.0, 0

    def read(self, ids: NDArray[Any]) -> None:
        """Go on with the text: ids [n], n >= 0; a `ValueError` refuses what is no such."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"StreamScorer: ids must be integers [n], got {ids.dtype} {list(ids.shape)}"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids.max() if ids.min() >= 0 else ids.min()
            raise ValueError(f"StreamScorer: ids must lie in [0, {self.vocab_size}), got {wrong}")
        start = time.perf_counter()
        with PeakMemory(self.model.device) as memory, torch.inference_mode():
            for first in range(0, len(ids), self.chunk):
                tokens = torch.from_numpy(ids[first : first + self.chunk].astype(np.int64))
                self._read(tokens.to(self.model.device))
        self._seconds += time.perf_counter() - start
        self._peak = max(self._peak, memory.peak_bytes)

    def _read(self, tokens: Tensor) -> None:
        logits = self.model(
            input_ids=tokens[None], use_cache=True, return_dict=True, **{CACHE: self.cache}
        ).logits[0]
        if self._last is None:  # nothing predicts the first token
            before, targets = logits[:-1], tokens[1:]
        else:
            before, targets = torch.cat([self._last, logits[:-1]]), tokens
        losses = F.cross_entropy(before.float(), targets, reduction="none")
        self._sum += float(losses.double().sum())
        self._last = logits[-1:].clone()
        self.num_read += len(tokens)

    def result(self) -> StreamEvaluation:
        """What was measured up to here, of two tokens or more."""
        if self.num_read < 2:
            raise ValueError(
                f"StreamScorer: text must hold two tokens or more, got {self.num_read}"
            )
        return StreamEvaluation(
            num_tokens=self.num_read - 1,
            nll=self._sum / (self.num_read - 1),
            tokens_per_second=self.num_read / self._seconds,
            peak_memory_bytes=self._peak,
            cache_bytes=self.cache.num_bytes,
            reach=self.cache.windows,
            uncertified=self.cache.uncertified,
            largest_dropped=self.cache.largest_dropped,
        )


def read_corpus(
    scorer: StreamScorer,
    files: Files,
    corpus: str,
    split: str | None = None,
    *,
    caller: str,
    limit_tokens: int | None,
    bar: Callable[[str], AbstractContextManager[Advance]],
) -> Iterator[int]:
    """Scores a file, standard input ("-") or a split by chunks; yields the bytes read so far."""
    if limit_tokens is not None and limit_tokens < 1:
        raise ValueError(f"{caller}: limit_tokens must be at least 1, got {limit_tokens}")
    path, size = Path(corpus).expanduser(), None
    with ExitStack() as opened:
        if corpus == "-":
            parts = stream_text(files, sys.stdin.buffer, "standard input")
        elif split is None and path.is_file():
            size = path.stat().st_size
            parts = stream_text(files, opened.enter_context(path.open("rb")), corpus)
        else:
            text = read_text(files, corpus, split)
            parts, size = iter([(text.ids, text.num_bytes)]), text.num_bytes
        advance = opened.enter_context(bar("reading"))
        num_bytes = 0.0
        for ids, count in parts:
            for first in range(0, len(ids), scorer.chunk):
                left = math.inf if limit_tokens is None else limit_tokens + 1 - scorer.num_read
                part = ids[first : first + int(min(scorer.chunk, left))]
                if not len(part):
                    return
                scorer.read(part)
                num_bytes += count * len(part) / len(ids)
                if size is not None:
                    advance(round(num_bytes), size)
                yield round(num_bytes)


def stream(
    model: PreTrainedModel,
    prompt: Iterable[int],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    chunk: int = CHUNK,
    cache: WindowCache | None = None,
) -> Iterator[int]:
    """Write a text token by token, for ever, keeping nothing but the cache.

    A step takes as long after a million tokens as after a thousand. `model.generate` with the same
    cache writes the same text, but keeps all ids.

    Args:
        model: As for `StreamScorer`.
        prompt: Token ids, at least one; an iterator is read `chunk` ids at a time.
        temperature, top_k: As for `generate`.
        generator: Of random numbers; None is PyTorch's own.
        chunk: Tokens of the prompt read at once.
        cache: A `WindowCache` for the model, fresh or of the text before; None makes one.

    Yields:
        Token ids; it ends after one that ends a text, if the model has such.

    Raises:
        ValueError: An argument breaks a rule above, or the model can have no such cache.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> config = LinbiasConfig(vocab_size=99, **sizes)
        >>> len(list(islice(stream(LinbiasForCausalLM(config), [1, 2, 3]), 5)))
        5
    """
    if not temperature >= 0 or top_k < 0:
        raise ValueError(
            f"stream: temperature and top_k must be at least 0, got {temperature}, {top_k}"
        )
    if chunk < 1:
        raise ValueError(f"stream: chunk must be at least 1, got {chunk}")
    cache = WindowCache.for_model(model) if cache is None else cache
    model, ids = model.eval(), iter(prompt)
    warpers = LogitsProcessorList()
    if temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if temperature and top_k:
        warpers.append(TopKLogitsWarper(top_k))
    ends = set(np.atleast_1d(model.generation_config.eos_token_id or []).tolist())

    def read(tokens: list[int]) -> Tensor:
        row = torch.tensor([tokens], device=model.device)
        with torch.inference_mode():
            out = model(input_ids=row, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return out.logits[:, -1].float()

    def write() -> Iterator[int]:
        logits: Tensor | None = None
        while tokens := list(islice(ids, chunk)):
            logits = read(tokens)
        if logits is None:
            raise ValueError("stream: prompt must hold a token or more, got none")
        while True:
            if temperature == 0:
                token = int(logits.argmax())
            else:
                weights = warpers(None, logits).softmax(-1)
                token = int(torch.multinomial(weights, 1, generator=generator))
            yield token
            if token in ends:
                return
            logits = read([token])

    return write()
