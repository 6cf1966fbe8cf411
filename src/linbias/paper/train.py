"""Trains the paper's models: recipe.json, history.jsonl and the best model so far in a folder.

Batches and dropout are pure functions of the seed and the step: a run that is killed at any moment
and started again ends, on the same machine, with the very weights of an unbroken one.
"""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, set_seed

from linbias._run.files import Record, fingerprint
from linbias._run.folders import open_run_folder
from linbias._run.processes import num_processes, rank
from linbias.data.segments import InShards
from linbias.lm.loop import Run, TrainingMetrics, uses_cpu
from linbias.lm.watch import ProgressBar
from linbias.models.fields import MAXIMA, own_fields
from linbias.paper.blocks import Batches, batch_order, blocks
from linbias.paper.checkpoint import add_words
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from linbias.paper.recipe import Recipe
from linbias.paper.step import PaperTrainer, SeedEachStep
from linbias.paper.store import read_data


@dataclass(frozen=True, kw_only=True)
class PaperMetrics(TrainingMetrics):
    """What a finished run measured: its last loss in bits, and that of the best validation."""

    loss_base2: float
    ppl: float
    valid_loss_base2: float | None = None
    valid_ppl: float | None = None
    best_step: int | None = None


def train(
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: Recipe,
    *,
    fit: bool = False,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
) -> PaperMetrics:
    """Trains a model, continues a run that was interrupted, or returns one that is finished;
    `fit` leaves out, with a warning, the recipe's cutoffs beyond the words of the data.
    """
    run = PaperRun(recipe, Path(data), Path(output), fit)
    metrics: PaperMetrics = run.finish(progress, callbacks)
    return metrics


def check_recipe(recipe: Recipe) -> None:
    """Refuses what cannot be trained here whatever the data, before data is prepared."""
    uses_cpu(recipe.device, recipe.precision)
    _config(recipe, MAXIMA["vocab_size"])


def _fit_cutoffs(recipe: Recipe, vocab_size: int) -> Recipe:
    """The same recipe without the cutoffs that leave fewer than two ids to the last band."""
    cutoffs = recipe.model.get("cutoffs", PaperConfig.cutoffs)
    fitting = [cutoff for cutoff in cutoffs if cutoff <= vocab_size - 2]
    if len(fitting) == len(cutoffs):
        return recipe
    warnings.warn(
        f"train: cutoffs {[*cutoffs]} are {fitting} here, since the text has {vocab_size:,} types "
        "(`--set cutoffs=[...]` chooses others)",
        stacklevel=3,
    )
    return replace(recipe, model={**recipe.model, "cutoffs": fitting})


def _config(recipe: Recipe, vocab_size: int) -> PaperConfig:
    unknown = sorted(set(recipe.model) - own_fields(PaperConfig))
    if unknown:
        raise ValueError(f"train: model must be made of PaperConfig's fields, got {unknown}")
    return PaperConfig(
        **recipe.model, vocab_size=vocab_size, position=recipe.position, train_length=recipe.length
    )


class PaperRun(Run):
    """A run of `train`: its recipe, its data, its folder and the configuration of its model."""

    settings: Recipe
    metrics = PaperMetrics

    def __init__(self, recipe: Recipe, data: Path, output: Path, fit: bool = False) -> None:
        self.data, self.splits = data, {}
        for name in ["train"] if recipe.validate_steps == 0 else ["train", "valid"]:
            self.dictionary, self.splits[name] = read_data(data, name)
            if not len(self.splits[name]):
                raise ValueError(f"train: data must have tokens, got none in {data / name}.bin")
        super().__init__(recipe, output)
        if fit:
            self.settings = _fit_cutoffs(recipe, len(self.dictionary))
        self.config = _config(self.settings, len(self.dictionary))
        self.steps = recipe.steps
        self._check_processes()
        ids = self.splits["train"]
        numbers = (len(ids), recipe.length, recipe.max_tokens, recipe.seed)
        order = partial(batch_order, *numbers, multiple=recipe.rows_multiple)
        self.batches = self._batches(ids, order, recipe.batches_per_step, recipe.steps)
        self.tokens_per_step = len(self.batches.ids) // self.batches.steps_per_pass

    def _check_processes(self) -> None:
        shards, readers = self.settings.context_parallel, self.sharing.of
        devices = 1 if self.on_cpu else torch.cuda.device_count()
        if num_processes() == 1 < devices:
            raise ValueError(
                f"train: every GPU must have a process of its own, got 1 for {devices} (start "
                f"with torchrun --nproc-per-node {devices}, or show it one by "
                "CUDA_VISIBLE_DEVICES=0)"
            )
        if self.settings.batches_per_step % readers:
            what = "processes" if shards == 1 else f"groups of {shards} processes"
            raise ValueError(
                f"train: batches_per_step must be a multiple of the {readers} {what}, "
                f"got {self.settings.batches_per_step}"
            )

    @property
    def tokens(self) -> int:
        return self.batches.num_tokens()

    def open(self) -> None:
        files = [self.data / "dict.txt", *(self.data / f"{name}.bin" for name in self.splits)]
        identity = {
            "recipe": asdict(self.settings),
            "data": {file.name: fingerprint(file) for file in files},
            "num_processes": num_processes(),
        }
        path, may_change = self.output / "recipe.json", ["recipe.context_parallel"]
        open_run_folder(path, identity, "train", may_change=may_change)

    def watchers(self, bar: ProgressBar) -> list[TrainerCallback]:
        return [SeedEachStep(self.settings.seed, rank() % self.settings.context_parallel)]

    def trainer(self, callbacks: list[TrainerCallback]) -> PaperTrainer:
        recipe = self.settings
        set_seed(recipe.seed)
        return PaperTrainer(
            self,
            data_collator=lambda batch: batch,
            model=PaperForCausalLM(self.config),
            args=self.arguments(
                per_device_train_batch_size=1,  # an item of `Batches` is a whole batch
                per_device_eval_batch_size=1,
                gradient_accumulation_steps=recipe.batches_per_step // self.sharing.of,
                eval_strategy="no" if recipe.validate_steps == 0 else "steps",
                eval_steps=recipe.validate_steps or self.batches.steps_per_pass,
                logging_steps=recipe.log_steps,
                use_cache=True,  # of the saved model; training makes no cache
            ),
            train_dataset=self._in_shards(self.batches),
            eval_dataset=self._in_shards(self._validation_batches()),
            callbacks=callbacks,
        )

    def schedule(self, steps: int) -> float:
        return self.settings.learning_rate_after(steps)

    def _in_shards(self, batches: Batches | None) -> Any:
        shards = self.settings.context_parallel
        return batches if batches is None or shards == 1 else InShards(batches, shards, 1)

    def _validation_batches(self) -> Batches | None:
        """One pass in the order of the text; all who read score one batch of every "step"."""
        if "valid" not in self.splits:
            return None
        recipe, ids = self.settings, self.splits["valid"]
        numbers = range(len(blocks(len(ids), recipe.length)))
        rows = recipe.max_tokens // recipe.length
        order = [list(numbers[first : first + rows]) for first in numbers[::rows]]
        return self._batches(ids, lambda _: order, self.sharing.of)

    def _batches(self, ids: Any, order: Any, per_step: int, steps: int | None = None) -> Batches:
        length, shards = self.settings.length, self.settings.context_parallel
        return Batches(ids, length, order, per_step=per_step, steps=steps, least_width=shards)

    def publish_last(self, trainer: Trainer) -> None:
        if "valid" not in self.splits:  # with validation, the best model is saved already
            self.publish(trainer)

    def add_files(self, folder: Path) -> None:
        add_words(self.dictionary, folder)

    def losses(self, state: TrainerState) -> Record:
        """The last training loss, and the best validation loss and when it was."""
        logs = state.log_history
        losses = _in_bits([log["loss"] for log in logs if "loss" in log][-1])
        validated = [(log["eval_loss"], log["step"]) for log in logs if "eval_loss" in log]
        if validated:
            best, step = min(validated)
            losses |= {**_in_bits(best, "valid_"), "best_step": step}
        return losses


def _in_bits(nats: float, prefix: str = "") -> Record:
    """A loss in bits, and 2 to the power of it or the largest power of two that is a float."""
    bits = nats / math.log(2)
    return {f"{prefix}loss_base2": bits, f"{prefix}ppl": 2.0 ** min(bits, 1023.0)}
