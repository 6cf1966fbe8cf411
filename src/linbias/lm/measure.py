"""A model scored on a text, both by name, at several lengths: what `linbias evaluate` does."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from linbias._run.files import Record
from linbias._run.processes import choose_device, is_main, joined
from linbias._run.progress import Advance
from linbias.data.segments import MaskTokens
from linbias.data.tokenizers import Tokenizer
from linbias.lm.checkpoints import open_model
from linbias.lm.evaluation import Evaluation, evaluate
from linbias.lm.hidden import HiddenEvaluation, evaluate_hidden
from linbias.lm.text import TokenText, read_text
from linbias.models.decoder.linbias import LinbiasForMaskedLM
from linbias.models.limits import default_length


@dataclass(frozen=True)
class TextScores:
    """What `evaluate_text` measured: a result for each length."""

    text: TokenText
    results: list[Any]
    fused: bool  # whether the attention was linbias'

    def rows(self) -> list[Record]:
        rows = []
        for result in self.results:
            row = {"split": self.text.split, **self.text.scored(result.num_tokens)}
            row |= result.to_dict()
            if isinstance(result, Evaluation):
                row["fused"] = self.fused
            rows.append(row)
        return rows

    def describe(self) -> str:
        first = self.results[0]
        if isinstance(first, HiddenEvaluation):
            return f"{self.text.name}: {first.describe()}, the same ones at every length"
        return self.text.describe(first.num_tokens)


def evaluate_text(
    model: str,
    corpus: str,
    split: str | None = None,
    *,
    bar: Callable[[str], AbstractContextManager[Advance]],
    lengths: Sequence[int] | None = None,
    context_parallel: int = 1,
    max_bytes: int | None = None,
    device: str = "auto",
    **options: Any,
) -> TextScores:
    """Scores a model on a text, both by name, for each of some lengths."""
    where = choose_device("evaluate", device)
    with warnings.catch_warnings(), joined(where):
        if not is_main():  # the first process warns for all
            warnings.simplefilter("ignore")
        files, loaded = open_model("evaluate", model, device=where)
        text = read_text(files, corpus, split, max_bytes=max_bytes)
        score: Callable[..., Any] = partial(
            evaluate, num_bytes=text.num_bytes, context_parallel=context_parallel
        )
        if isinstance(loaded, LinbiasForMaskedLM):
            if context_parallel != 1:
                raise ValueError(
                    "evaluate: context_parallel must be 1 but for causal models, got "
                    f"{context_parallel}"
                )
            score = partial(evaluate_hidden, tokens=MaskTokens.of(Tokenizer.load(files.name)))
        fused = loaded.config._attn_implementation == "linbias"
        scores = TextScores(text=text, results=[], fused=fused)
        for length in lengths or (default_length(loaded),):
            with bar(f"reading {length:,} tokens at a time") as advance:
                result = score(loaded, text.ids, length=length, progress=advance, **options)
            if isinstance(result, Evaluation) and length > result.num_tokens:
                result = result.of_one_piece()
                warnings.warn(
                    f"evaluate: length {length:,} is beyond the {result.length:,} tokens that "
                    "were scored: they were read in one piece, and are shown by this length",
                    stacklevel=1,
                )
            scores.results.append(result)
    return scores
