"""Endless texts in constant memory: read and scored in one pass, or written token by token.

Both keep nothing but a `WindowCache`, in which every head has the keys that it needs and a bound on what the others weigh,
so that a text of any length is read as if it were one segment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
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

from linbias.lm.memory import PeakMemory
from linbias.models.decoder.cache import CACHE
from linbias.models.window_cache.cache import WindowCache

CHUNK = 512
_MOST_LOGITS = 1 << 25  # that a chunk may have at once


@dataclass(frozen=True)
class StreamEvaluation:
    """How well a model predicts a text that was read in one pass.

    Attributes:
        num_tokens: Predictions scored: all tokens but the first.
        nll: Mean negative log likelihood, nats per token.
        tokens_per_second: Of wall time.
        peak_memory_bytes: Highest memory of the process, or of the CUDA device, meanwhile.
        cache_bytes: Of the cache, at the end.
        windows: [layers][key/value heads]: keys that each head keeps, at the end.
        uncertified: Rows of heads that may have missed more than the tolerance.
        largest_dropped: The most that a row may have missed, as a share of what it read.
    """

    num_tokens: int
    nll: float
    tokens_per_second: float
    peak_memory_bytes: int
    cache_bytes: int
    windows: list[list[float]]
    uncertified: int
    largest_dropped: float

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite where that is beyond a float."""
        return math.exp(self.nll) if self.nll < 709.0 else math.inf

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits spent per byte of a text of so many UTF-8 bytes, whose first token was not scored."""
        num_bytes = round(num_bytes * self.num_tokens / (self.num_tokens + 1))
        return self.nll * self.num_tokens / (math.log(2.0) * num_bytes)

    def to_dict(self) -> dict[str, Any]:
        """All fields and the perplexity as JSON values."""
        return {**asdict(self), "perplexity": self.perplexity}


class StreamScorer:
    """Scores a text of any length in one pass: every token is predicted from all tokens before it.

    Args:
        model: A causal model with linear biases, as `linbias.models.load` gives it; it is put into evaluation mode, and runs without gradients.
        chunk: Tokens read at once; where the vocabulary is large, fewer.
        cache: A fresh `WindowCache` for the model; None makes one with adaptive windows.

    Raises:
        ValueError: The model can have no such cache, chunk is below 1, or the cache holds tokens.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> config = LinbiasConfig(vocab_size=99, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> scorer = StreamScorer(LinbiasForCausalLM(config))
        >>> for part in np.split(np.arange(3000) % 99, 10):
        ...     scorer.read(part)
        >>> found = scorer.result()
        >>> found.num_tokens, found.uncertified, 4.0 < found.nll < 5.0
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
                f"StreamScorer: cache must be fresh, got one of {self.cache.get_seq_length():,} tokens"
            )
        self.model = model.eval()
        self.vocab_size = model.config.get_text_config().vocab_size
        self.chunk = max(1, min(chunk, _MOST_LOGITS // self.vocab_size))
        self._last: Tensor | None = None  # [1, V], the logits of the token to come
        self._sum, self.num_read, self._seconds, self._peak = 0.0, 0, 0.0, 0

    def read(self, ids: NDArray[Any]) -> None:
        """Go on with the text.

        Args:
            ids: [n], integers, n >= 0: the next tokens.

        Raises:
            ValueError: An id is beyond the vocabulary.
        """
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
        """What was found up to here.

        Raises:
            ValueError: Fewer than two tokens were read.
        """
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
            windows=self.cache.windows,
            uncertified=self.cache.uncertified,
            largest_dropped=self.cache.largest_dropped,
        )


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

    A step takes as long after a million tokens as after a thousand. `model.generate` with the same cache writes the same
    text, but keeps all ids.

    Args:
        model: As for `StreamScorer`.
        prompt: Token ids, at least one; an iterator is read `chunk` ids at a time.
        temperature: Divides the logits before sampling; 0 always takes the likeliest token.
        top_k: Sample among the k likeliest tokens; 0: among all.
        generator: Of random numbers; None is PyTorch's own.
        chunk: Tokens of the prompt read at once.
        cache: A `WindowCache` for the model, fresh or of the text before the prompt; None makes one.

    Yields:
        Token ids; it ends after one that ends a text, if the model has such.

    Raises:
        ValueError: An argument breaks a rule above, or the model can have no such cache.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> config = LinbiasConfig(vocab_size=99, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> written = stream(LinbiasForCausalLM(config), [1, 2, 3])
        >>> len(list(islice(written, 5)))
        5
    """
    if not temperature >= 0 or top_k < 0:
        raise ValueError(
            f"stream: temperature and top_k must be at least 0, got {temperature}, {top_k}"
        )
    if chunk < 1:
        raise ValueError(f"stream: chunk must be at least 1, got {chunk}")
    cache = WindowCache.for_model(model) if cache is None else cache
    return _stream(model.eval(), iter(prompt), temperature, top_k, generator, chunk, cache)


def _stream(
    model: PreTrainedModel,
    prompt: Iterator[int],
    temperature: float,
    top_k: int,
    generator: torch.Generator | None,
    chunk: int,
    cache: WindowCache,
) -> Iterator[int]:
    warpers = LogitsProcessorList()
    if temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if temperature and top_k:
        warpers.append(TopKLogitsWarper(top_k))
    ends = set(np.atleast_1d(model.generation_config.eos_token_id or []).tolist())
    logits: Tensor | None = None

    def read(tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=model.device)
        with torch.inference_mode():
            found = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        return found.logits[:, -1].float()

    while tokens := list(islice(prompt, chunk)):
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
