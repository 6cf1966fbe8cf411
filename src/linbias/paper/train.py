"""Trains the paper's models on Transformers' Trainer, and survives being interrupted.

A run has a folder:

    recipe.json        the settings; written first, compared when the run continues
    log.jsonl          a line per logged step, with the columns that the original logs
    checkpoints/       the Trainer's, while training
    config.json, model.safetensors, dict.txt, ...    the best model so far, for `models.load`
    metrics.json       written last: a run that has it is finished

The batches are a pure function of the seed and the step, dropout is seeded anew for each step, and
a checkpoint holds all else that the future depends on. A run that is killed at any moment and
started again therefore ends with the very weights, bit for bit, of an unbroken one (same machine,
same threads).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainerState, set_seed

from linbias._run.files import Record, fingerprint
from linbias._run.folders import open_run_folder
from linbias._run.processes import num_processes, rank
from linbias.lm.loop import Run, TrainingMetrics, uses_cpu
from linbias.lm.watch import FiniteLoss, ProgressBar
from linbias.models.fields import MAXIMA, own_fields
from linbias.paper.blocks import Batches, batch_order, blocks
from linbias.paper.checkpoint import add_words
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from linbias.paper.recipe import Recipe
from linbias.paper.step import LogFile, PaperTrainer, SeedEachStep, perplexity
from linbias.paper.store import read_data


@dataclass(frozen=True, kw_only=True)
class PaperMetrics(TrainingMetrics):
    """What a finished run measured, in bits per word.

    `loss_base2` is in the last line of the log, `valid_loss_base2` the best validation's, if there
    is one; `ppl` and `valid_ppl` are 2 to the power of these.
    """

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
    """Trains a model, continues a run that was interrupted, or returns one that is finished.

    Blocks, batches and their order, optimizer, schedule, clipping and the logged numbers are those
    of the paper's code. Sets the global random seeds. Under torchrun every process calls this, and
    any number of processes that divides `batches_per_step` (times `context_parallel`) trains the
    same model.

    Args:
        data: Folder of dict.txt, train.bin, train.idx and, unless `validate_steps` is 0, valid.bin
            and valid.idx: made by `linbias paper prepare` or by the original.
        output: Folder of the run: new, empty, or of the very same run.
        recipe: What to train and for how long.
        fit: Leave out the cutoffs of the recipe that lie beyond the words of the data, and warn.
        progress: Show a progress bar on standard error.
        callbacks: Further Transformers callbacks.

    Returns:
        What the run measured, as metrics.json keeps it. `output` then has the model of the least
        validation loss, or the last one where there is no validation, ready for
        `linbias.models.load`.

    Raises:
        ValueError: The folder cannot be written, is in use or belongs to another run; the data is
            damaged; the recipe does not fit the dictionary, the number of processes or this
            machine; the loss ceases to be a finite number.
        OSError: A file could not be written (disk full). The last complete checkpoint is intact,
            and the same call continues from there.

    Example:
        >>> from linbias.paper.prepare import prepare
        >>> model = {"hidden_size": 32, "num_hidden_layers": 1, "cutoffs": []}
        >>> batches = dict(length=4, max_tokens=8, batches_per_step=1)
        >>> run = dict(steps=3, warmup_steps=1, precision="fp32", validate_steps=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text").write_text("the cat sat on the mat\\n" * 3)
        ...     made = prepare({"train": Path(folder, "text")}, f"{folder}/data")
        ...     recipe = Recipe(model=model, **batches, **run)
        ...     train(made.folder, f"{folder}/run", recipe, progress=False).tokens
        21
    """
    metrics: PaperMetrics = PaperRun(recipe, Path(data), Path(output), fit).finish(
        progress, callbacks
    )
    return metrics


def check_recipe(recipe: Recipe) -> None:
    """Refuses what cannot be trained here whatever the data, before data is prepared.

    Raises:
        ValueError: As `train`.
    """
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
        **recipe.model,
        vocab_size=vocab_size,
        position=recipe.position,
        train_length=recipe.length,
    )


class PaperRun(Run):
    """A run of `train`: its recipe, its data, its folder and the configuration of its model."""

    settings: Recipe
    metrics = PaperMetrics

    def __init__(self, recipe: Recipe, data: Path, output: Path, fit: bool = False) -> None:
        self.data, self.splits = data, {}
        for name in ["train"] if recipe.validate_steps == 0 else ["train", "valid"]:
            self.dictionary, self.splits[name] = read_data(data, name)
            if not len(self.splits[name].tokens):
                raise ValueError(f"train: data must have tokens, got none in {data / name}.bin")
        super().__init__(recipe, output)
        if fit:
            self.settings = _fit_cutoffs(recipe, len(self.dictionary))
        self.config = _config(self.settings, len(self.dictionary))
        self.steps = recipe.steps
        self._check_processes()
        self.batches = self._training_batches()
        self.tokens_per_step = len(self.batches.ids) // self.batches.steps_per_pass

    def _check_processes(self) -> None:
        pieces, readers = self.settings.context_parallel, self.sharing.of
        devices = 1 if self.on_cpu else torch.cuda.device_count()
        if num_processes() == 1 < devices:
            raise ValueError(
                f"train: every GPU must have a process of its own, got 1 for {devices} (start "
                f"with torchrun --nproc-per-node {devices}, or show it one by "
                "CUDA_VISIBLE_DEVICES=0)"
            )
        if self.settings.batches_per_step % readers:
            what = "processes" if pieces == 1 else f"groups of {pieces} processes"
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
        seeds = SeedEachStep(self.settings.seed, rank() % self.settings.context_parallel)
        return [seeds, LogFile(self.output / "log.jsonl"), FiniteLoss(), bar]

    def trainer(self, callbacks: list[TrainerCallback]) -> PaperTrainer:
        recipe = self.settings
        set_seed(recipe.seed)
        return PaperTrainer(
            recipe,
            self.publish,
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
            pieces=self.sharing.group,
            train_dataset=self.batches,
            eval_dataset=self._validation_batches() if "valid" in self.splits else None,
            callbacks=callbacks,
        )

    def _training_batches(self) -> Batches:
        recipe, ids = self.settings, self.splits["train"].tokens
        numbers = (len(ids), recipe.length, recipe.max_tokens, recipe.seed)
        order = partial(batch_order, *numbers, multiple=recipe.rows_multiple)
        return Batches(
            ids,
            recipe.length,
            order,
            per_step=recipe.batches_per_step,
            steps=recipe.steps,
            pieces=recipe.context_parallel,
        )

    def _validation_batches(self) -> Batches:
        """One pass in the order of the text.

        Each process, or each group that shares it, scores one batch of every "step".
        """
        recipe, ids = self.settings, self.splits["valid"].tokens
        numbers = range(len(blocks(len(ids), recipe.length)))
        rows = recipe.max_tokens // recipe.length
        order = [list(numbers[first : first + rows]) for first in numbers[::rows]]
        return Batches(
            ids,
            recipe.length,
            lambda _: order,
            per_step=self.sharing.of,
            pieces=recipe.context_parallel,
        )

    def publish_last(self, trainer: Trainer) -> None:
        if "valid" not in self.splits:  # with validation, the best model is saved already
            self.publish(trainer)

    def add_files(self, folder: Path) -> None:
        add_words(self.dictionary, folder)

    def losses(self, state: TrainerState) -> Record:
        """The last training loss, and the best validation loss and when it was."""
        logs = state.log_history
        trained = [log["loss"] for log in logs if "loss" in log][-1] / math.log(2)
        losses = {"loss_base2": trained, "ppl": perplexity(trained)}
        validated = [(log["eval_loss"], log["step"]) for log in logs if "eval_loss" in log]
        if validated:
            best, step = min(validated)
            best /= math.log(2)
            losses |= {"valid_loss_base2": best, "valid_ppl": perplexity(best), "best_step": step}
        return losses
