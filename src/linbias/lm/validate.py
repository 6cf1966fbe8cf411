"""What a validation keeps beside its loss, in segments as of `linbias.lm.evaluate`, as JSON
values.

    {"lengths": {"64": {"loss": ..., "accuracy": ..., "first": ..., "trained": ..., "last": ...}},
     "continuation": "It is ..."}
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainerState

from linbias._run.files import Record
from linbias.data.corpus import Corpus
from linbias.data.tokenizers import Tokenizer
from linbias.lm.evaluation import windows
from linbias.lm.settings import TrainSettings
from linbias.lm.windows import equal_windows, rows_of

MAX_TOKENS = 2**15  # predictions of a validation
_BATCH_TOKENS = 2**13
_NEW_TOKENS = 25  # of a continuation


@dataclass(frozen=True)
class Validation:
    """What to measure after so many steps."""

    ids: NDArray[np.unsignedinteger[Any]]  # [N + 1]: N predictions
    train_length: int  # tokens of a training segment
    lengths: tuple[int, ...]  # tokens of a segment, `train_length` first
    tokenizer: Tokenizer
    prompt: str | None  # is continued by the likeliest tokens
    limit: int | None  # tokens that the model reads at most; None for any number

    @classmethod
    def of(cls, settings: TrainSettings, corpus: Corpus, limit: int | None) -> Validation | None:
        """What a run asks for; None where the loss is enough."""
        if not (settings.validate_lengths or settings.prompt):
            return None
        if settings.prompt is not None:
            try:
                corpus.tokenizer.encode(settings.prompt)
            except ValueError as error:
                raise ValueError(
                    "TrainSettings: prompt must be made of the corpus' characters, got "
                    f"{settings.prompt!r} ({error})"
                ) from error
        lengths = (settings.length, *settings.validate_lengths)
        return cls(
            ids=corpus.valid[: max(MAX_TOKENS, *lengths) + 1],
            train_length=settings.length,
            lengths=tuple(n for n in dict.fromkeys(lengths) if limit is None or n <= limit),
            tokenizer=corpus.tokenizer,
            prompt=settings.prompt,
            limit=limit,
        )

    def measure(self, model: nn.Module, prefix: str) -> dict[str, Any]:
        """Numbers and the continuation as the Trainer logs them, by flat names after a prefix."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                numbers: dict[str, Any] = {
                    f"{prefix}_{length}_{name}": value
                    for length in self.lengths
                    for name, value in self._score(model, length).items()
                }
                numbers[f"{prefix}_loss"] = numbers[f"{prefix}_{self.train_length}_loss"]
                if self.prompt is not None:
                    numbers[f"{prefix}_continuation"] = self._continue(model, self.prompt)
        finally:
            model.train(was_training)
        return numbers

    def _score(self, model: nn.Module, length: int) -> dict[str, float]:
        num_tokens = len(self.ids) - 1
        losses, hits, count = np.zeros(length), 0, np.zeros(length)
        device = next(model.parameters()).device
        for batch in equal_windows(windows(num_tokens, length), _BATCH_TOKENS):
            rows = rows_of(self.ids, batch, device)
            inputs, targets = rows[:, :-1], rows[:, 1:]
            logits = model(input_ids=inputs, use_cache=False).logits.float()
            nll = cross_entropy(logits.mT, targets, reduction="none")
            width = inputs.shape[1]
            losses[:width] += nll.double().sum(0).cpu().numpy()
            count[:width] += len(batch)
            hits += int((logits.argmax(-1) == targets).sum())
        by_position = losses / count
        scores = {
            "loss": float(losses.sum() / num_tokens),
            "accuracy": hits / num_tokens,
            "first": float(by_position[0]),
            "last": float(by_position[-1]),
        }
        if length >= self.train_length:
            scores["trained"] = float(by_position[self.train_length - 1])
        return scores

    def _continue(self, model: nn.Module, prompt: str) -> str:
        """The prompt and the likeliest tokens after it, read whole each time: there are few."""
        ids = self.tokenizer.encode(prompt).astype(np.int64)
        rows = torch.from_numpy(ids)[None].to(next(model.parameters()).device)
        for _ in range(_NEW_TOKENS):
            read = rows if self.limit is None else rows[:, -self.limit :]
            logits = model(input_ids=read, use_cache=False).logits
            rows = torch.cat([rows, logits[:, -1:].argmax(-1)], dim=1)
        return self.tokenizer.decode(rows[0].tolist())


_ENTRY = re.compile(r"eval_(\d+)_(\w+)")


def record(logs: dict[str, Any]) -> Record | None:
    """A validation, from what the Trainer logged; None where it was the loss only."""
    lengths: dict[str, dict[str, float | None]] = {}
    for name, value in logs.items():
        if entry := _ENTRY.fullmatch(name):
            empty = dict.fromkeys(("loss", "accuracy", "first", "trained", "last"))
            scores = lengths.setdefault(entry[1], empty)
            scores[entry[2]] = value if math.isfinite(value) else None
    if not lengths:
        return None
    return {"lengths": lengths, "continuation": logs.get("eval_continuation")}


def lines(validation: Record, train_length: int) -> list[str]:
    words = []
    for length, scores in validation["lengths"].items():
        positions = {
            1: scores["first"],
            train_length: scores["trained"],
            int(length): scores["last"],
        }
        words.append(
            f"{int(length):,} tokens: loss {_number(scores['loss'])}, "
            f"accuracy {scores['accuracy']:.1%}; "
            + ", ".join(
                f"{_number(loss)} at token {position:,}"
                for position, loss in sorted(positions.items())
                if position <= int(length)
            )
        )
    if validation["continuation"] is not None:
        words.append(repr(validation["continuation"]))
    return words


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


class Validations(TrainerCallback):
    def __init__(self, train_length: int, console: Console) -> None:
        self.train_length, self.console = train_length, console

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Record, **_: Any) -> None:
        validation = record(logs)
        if validation is not None and state.is_world_process_zero:
            for line in lines(validation, self.train_length):
                self.console.print(f"  {escape(line)}", soft_wrap=True)
