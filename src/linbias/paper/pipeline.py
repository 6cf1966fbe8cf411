"""The whole path of the paper in one call: prepare into data/, train into model/, evaluate.

texts.json has the fingerprints of the texts. What a stopped run had scored is scored again.
"""

import os
import shutil
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path

from linbias._run.files import fingerprint
from linbias._run.folders import hold_run_folder, open_run_folder
from linbias._run.progress import progress_bar
from linbias.paper.checkpoint import load
from linbias.paper.prepare import prepare
from linbias.paper.recipe import Recipe
from linbias.paper.score import Scores, evaluate
from linbias.paper.train import PaperMetrics, check_recipe, train


def run(
    texts: Mapping[str, Path],
    output: Path,
    recipe: Recipe,
    *,
    fit: bool = False,
    batch_tokens: int = 16384,
    progress: bool = True,
) -> tuple[PaperMetrics, list[Scores]]:
    """Goes from texts to perplexities, at the training length and four times it, without overlap
    and with a window that slides by half its length; or continues such a run. Returns what the
    training measured, and each evaluation.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("run: must run as one process; use paper train for several (torchrun)")
    check_recipe(recipe)
    fingerprints = {split: fingerprint(text) for split, text in texts.items()}
    with hold_run_folder(output, "run"):
        open_run_folder(output / "texts.json", fingerprints, "run")
        data, bar = output / "data", partial(progress_bar, visible=progress)
        if not data.exists():
            try:
                with bar("reading text") as advance:
                    made = prepare(texts, data, progress=advance)
                for name, read in made.splits.items():
                    if not read.num_ids:
                        shutil.rmtree(data)
                        raise ValueError(
                            f"run: texts must have at least a line each, got {texts[name]}"
                        )
            except ValueError:
                (output / "texts.json").unlink()  # so that other texts can use the folder
                raise
        training = train(data, output / "model", recipe, fit=fit, progress=progress)
        model, evaluations = load(output / "model"), []
        lengths = (recipe.length, 4 * recipe.length)
        for split, length, slides in product(("valid", "test"), lengths, (False, True)):
            context_window = length // 2 if slides else 0
            with bar(f"{split}, {length:,} tokens at a time") as advance:
                evaluation = evaluate(
                    model,
                    data,
                    split,
                    length=length,
                    context_window=context_window,
                    batch_tokens=batch_tokens,
                    progress=advance,
                )
            evaluations.append(evaluation)
        return training, evaluations
