"""How well a model predicts a split of the paper's data: `score` on a folder of ids, as a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from linbias._run.files import Record
from linbias.data.dictionary import check_words
from linbias.lm.paper.checkpoint import check_dictionary, load
from linbias.lm.paper.score import score
from linbias.lm.paper.store import read_data
from linbias.models.paper import PaperForCausalLM


@dataclass(frozen=True)
class PaperEvaluation:
    """How well a model predicts a split of the paper's data.

    Attributes:
        split: "train", "valid" or "test".
        length: Most inputs that a prediction reads.
        context_window: Inputs among them that belong to the blocks before.
        num_tokens: Ids that were scored: all.
        loss_base2: Mean bits per id.
        perplexity: 2^loss_base2.
        line: What the original prints.
        tokens_per_second: Ids scored per second of wall time; 0 where a resumed run was complete.
        peak_memory_bytes: Highest memory of the process, or of the CUDA device, meanwhile.
    """

    split: str
    length: int
    context_window: int
    num_tokens: int
    loss_base2: float
    perplexity: float
    line: str
    tokens_per_second: float
    peak_memory_bytes: int

    def to_dict(self) -> Record:
        """All fields as JSON values."""
        return asdict(self)


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
    context_window: int = 0,
    batch_tokens: int = 16384,
    resume: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PaperEvaluation:
    """Scores a split of a folder of data, on a GPU where there is one.

    Args:
        model: Moved to the GPU where there is one.
        data: Folder that `prepare` or the original made.
        split: "train", "valid" or "test".
        length: As for `score`; None is the length that the model was trained with.
        context_window: As for `score`, as is all that follows.
        batch_tokens: See there.
        resume: See there.
        progress: See there.

    Raises:
        ValueError: The data is damaged, or its dictionary has another size than the model's; or as
            `score`.
    """
    dictionary, ids = read_data(data, split)
    check_dictionary(dictionary, model.config, Path(data, "dict.txt"), "evaluate")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    scores = score(
        model,
        ids.tokens,
        length=model.config.train_length if length is None else length,
        context_window=context_window,
        batch_tokens=batch_tokens,
        resume=resume,
        progress=progress,
    )
    return PaperEvaluation(
        split=split,
        length=scores.length,
        context_window=context_window,
        num_tokens=len(scores.log_probs),
        loss_base2=scores.loss_base2,
        perplexity=scores.perplexity,
        line=scores.original_line,
        tokens_per_second=scores.tokens_per_second,
        peak_memory_bytes=scores.peak_memory_bytes,
    )
