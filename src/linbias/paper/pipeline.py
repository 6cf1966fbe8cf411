"""The whole path of the paper in one call: prepare, train, evaluate.

texts.json         the fingerprints of the texts; written first, compared when the run continues
data/              what `prepare` makes
model/             what `train` makes
scores-*.npz       the scores of each evaluation, from which a stopped one continues
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linbias._run.files import Record, fingerprint
from linbias._run.folders import hold_run_folder, open_run_folder
from linbias._run.progress import Advance, progress_bar
from linbias.paper.checkpoint import load
from linbias.paper.prepare import prepare
from linbias.paper.recipe import Recipe
from linbias.paper.score import Scores, evaluate
from linbias.paper.train import PaperMetrics, check_recipe, train


@dataclass(frozen=True)
class PathResults:
    """What the whole path measured.

    Attributes:
        training: Of the training.
        evaluations: Of both held-out splits, at the training length and four times it, without
            overlap and with a window that slides by half its length.
    """

    training: PaperMetrics
    evaluations: tuple[Scores, ...]

    def to_dict(self) -> Record:
        """All of it as JSON values."""
        return {
            "training": self.training.to_dict(),
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
        }


def run(
    texts: Mapping[str, Path],
    output: Path,
    recipe: Recipe,
    *,
    fit: bool = False,
    workers: int = 1,
    batch_tokens: int = 16384,
    progress: bool = True,
) -> PathResults:
    """Goes from texts ("train", "valid" and "test") to perplexities, or continues such a run.

    `output`, `recipe` and `fit` are as for `linbias.paper.train.train`, `workers` and
    `batch_tokens` as for `prepare` and `score`.

    Raises:
        ValueError: A text is missing, empty or not UTF-8; the folder is in use or another run's;
            there are several processes (torchrun); or as `linbias.paper.train.train`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("run: must run as one process; use paper train for several (torchrun)")
    check_recipe(recipe)
    fingerprints = {split: fingerprint(text) for split, text in texts.items()}
    with hold_run_folder(output, "run"):
        open_run_folder(output / "texts.json", fingerprints, "run")
        data, model_folder = output / "data", output / "model"

        def bar(task: str) -> AbstractContextManager[Advance]:
            return progress_bar(task, visible=progress)

        if not data.exists():
            try:
                _prepare(texts, data, workers, bar)
            except ValueError:
                (output / "texts.json").unlink()  # so that other texts can use the folder
                raise
        training = train(data, model_folder, recipe, fit=fit, progress=progress)
        model = load(model_folder)
        evaluations = []
        for split, length, context_window in _measured(recipe.length):
            with bar(f"{split}, {length:,} tokens at a time") as advance:
                evaluation = evaluate(
                    model,
                    data,
                    split,
                    length=length,
                    context_window=context_window,
                    batch_tokens=batch_tokens,
                    resume=output / f"scores-{split}-{length}-{context_window}.npz",
                    progress=advance,
                )
            evaluations.append(evaluation)
        return PathResults(training=training, evaluations=tuple(evaluations))


def _prepare(
    texts: Mapping[str, Path],
    data: Path,
    workers: int,
    bar: Callable[[str], AbstractContextManager[Any]],
) -> None:
    with bar("reading text") as advance:
        made = prepare(texts, data, workers=workers, progress=advance)
    empty = [str(texts[name]) for name, split in made.splits.items() if not split.num_ids]
    if empty:
        shutil.rmtree(data)
        raise ValueError(f"run: texts must have at least a line each, got {empty[0]}")


def _measured(length: int) -> list[tuple[str, int, int]]:
    """Split, length and context window of each evaluation."""
    return [
        (split, tokens, context_window)
        for split in ("valid", "test")
        for tokens in (length, 4 * length)
        for context_window in (0, tokens // 2)
    ]
