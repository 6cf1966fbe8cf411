"""A model scored on a text, both by name, at several lengths: what `linbias evaluate` does."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from transformers import PreTrainedModel

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
from linbias.models.limits import default_length, stated_length
from linbias.models.scale import with_slopes

SlopeScales = Sequence[float | str | None]


@dataclass(frozen=True)
class TextScores:
    """What `evaluate_text` measured: a result for each length and scale of the slopes."""

    text: TokenText
    results: list[Any]
    slope_scales: list[float | str | None]
    fused: bool  # whether the attention was linbias'

    def rows(self) -> list[Record]:
        rows = []
        for scale, result in zip(self.slope_scales, self.results, strict=True):
            row = {"split": self.text.split, **self.text.scored(result.num_tokens)}
            row |= result.to_dict()
            if isinstance(result, Evaluation):
                row |= {"fused": self.fused, "slope_scale": scale}
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
    slope_scales: SlopeScales | None = None,
    train_length: int | None = None,
    context_parallel: int = 1,
    max_bytes: int | None = None,
    device: str = "auto",
    **options: Any,
) -> TextScores:
    """Scores a model on a text, both by name, for each of some lengths and slope scales."""
    where = choose_device("evaluate", device)
    with warnings.catch_warnings(), joined(where):
        if not is_main():  # the first process warns for all
            warnings.simplefilter("ignore")
        files, loaded = open_model("evaluate", model, device=where)
        text = read_text(files, corpus, split, max_bytes=max_bytes)
        score: Callable[..., Any] = partial(
            evaluate, num_bytes=text.num_bytes, context_parallel=context_parallel
        )
        masked = isinstance(loaded, LinbiasForMaskedLM)
        if masked:
            tokens = MaskTokens.of(Tokenizer.load(files.name))
            score = partial(evaluate_hidden, tokens=tokens)
        if masked and slope_scales is not None:
            kind = type(loaded).__name__
            raise ValueError(f"evaluate: --slope-scale is for causal models, got a {kind}")
        if context_parallel != 1 and masked:
            raise ValueError(
                f"evaluate: --context-parallel must be 1 but for causal models, got "
                f"{context_parallel}"
            )
        scales = _scales(loaded, slope_scales, train_length)

        def slopes(scale: float | str | None) -> AbstractContextManager[None]:
            if slope_scales is None:
                return nullcontext()
            return with_slopes(loaded, scale, train_length=train_length)

        for scale in scales:  # an error comes before any work
            with slopes(scale):
                pass
        scores = TextScores(text=text, results=[], slope_scales=[], fused=_is_fused(loaded))
        for length, scale in product(lengths or (default_length(loaded),), scales):
            with slopes(scale), bar(f"reading {length:,} tokens at a time") as advance:
                result = score(loaded, text.ids, length=length, progress=advance, **options)
            if isinstance(result, Evaluation) and length > result.num_tokens:
                result = result.of_one_piece()
                if scale == scales[0]:
                    warnings.warn(
                        f"evaluate: length {length:,} is beyond the {result.length:,} tokens that "
                        "were scored: they were read in one piece, and are shown by this length",
                        stacklevel=1,
                    )
            scores.results.append(result)
            scores.slope_scales.append(scale)
    return scores


def _is_fused(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation == "linbias")


def _scales(
    model: PreTrainedModel, scales: SlopeScales | None, train_length: int | None
) -> SlopeScales:
    """The scales of the slopes, without "interpolate" where the model's length is not known."""
    if scales is None:
        return (getattr(model.config, "slope_scale", None),)
    known = train_length is not None or stated_length(model.config) is not None
    if known or "interpolate" not in scales:
        return scales
    rule = (
        "--train-length: must be given for --slope-scale interpolate, since the model's "
        "configuration does not say it"
    )
    others = tuple(scale for scale in scales if scale != "interpolate")
    if not others:
        raise ValueError(rule)
    warnings.warn(f"{rule}; interpolate is left out", stacklevel=1)
    return others
