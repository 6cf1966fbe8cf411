"""How well a model predicts a split of the paper's data: `score` on a folder of ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from linbias.data.dictionary import check_words
from linbias.lm.paper.checkpoint import check_dictionary, load
from linbias.lm.paper.score import Scores, score
from linbias.lm.paper.store import read_data
from linbias.models.paper import PaperForCausalLM


def load_for(
    path: str | Path, data: str | Path, *, position: str | None = None
) -> PaperForCausalLM:
    """Loads a model to evaluate on some data, and checks that both have the same words.

    Args:
        path: As for `linbias.lm.paper.checkpoint.load`.
        data: Folder that `prepare` or the original made.
        position: As for `linbias.lm.paper.checkpoint.load`.

    Raises:
        ValueError: There is no such model, or it was trained with other words.
    """
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

    Args:
        model: Moved to the GPU where there is one.
        data: Folder that `prepare` or the original made.
        split: "train", "valid" or "test".
        length: As for `score`; None is the length that the model was trained with.
        options: Of `score`.

    Raises:
        ValueError: The data is damaged, or its dictionary has another size than the model's; or as
            `score`.
    """
    dictionary, ids = read_data(data, split)
    check_dictionary(dictionary, model.config, Path(data, "dict.txt"), "evaluate")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    length = model.config.train_length if length is None else length
    return replace(score(model, ids.tokens, length=length, **options), split=split)
