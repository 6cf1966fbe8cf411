"""Trains the paper's models on Transformers' Trainer, and survives being interrupted.

A run has a folder:

    recipe.json        the settings; written first, compared when the run continues
    log.jsonl          a line per logged step, with the columns that the original logs
    checkpoints/       the Trainer's, while training
    config.json, model.safetensors, dict.txt, tokenizer.json, ...     the best model so far, for `linbias.models.load`
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainingArguments, set_seed

from linbias._run.files import fingerprint
from linbias._run.folders import hold_run_folder, open_run_folder
from linbias._run.processes import Sharing, is_main, rank, wait_for_all
from linbias.lm.checkpoints import Checkpoints
from linbias.lm.loop import (
    TrainingMetrics,
    is_finished,
    publish,
    run_trainer,
    trainer_arguments,
    uses_cpu,
)
from linbias.lm.watch import FiniteLoss, ProgressBar, StopWatch
from linbias.models.fields import MAXIMA, own_fields
from linbias.models.loading import no_bars
from linbias.paper.blocks import Batches, batch_order, blocks
from linbias.paper.checkpoint import add_words
from linbias.paper.config import PaperConfig
from linbias.paper.dictionary import Dictionary
from linbias.paper.model import PaperForCausalLM
from linbias.paper.recipe import Recipe
from linbias.paper.step import LogFile, PaperTrainer, SeedEachStep, perplexity
from linbias.paper.store import StoredIds, read_data


@dataclass(frozen=True, kw_only=True)
class PaperMetrics(TrainingMetrics):
    """What a finished run measured.

    Attributes:
        loss_base2: Bits per word in training, in the last line of the log.
        ppl: 2^loss_base2.
        valid_loss_base2: Bits per word of the best validation; None without validation.
        valid_ppl: 2^valid_loss_base2.
        best_step: When that was.
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
    any number of processes that divides `batches_per_step` (times `context_parallel`) trains the same model.

    Args:
        data: Folder of dict.txt, train.bin, train.idx and, unless `validate_steps` is 0, valid.bin
            and valid.idx: made by `linbias paper prepare` or by the original.
        output: Folder of the run: new, empty, or of the very same run.
        recipe: What to train and for how long.
        fit: Leave out the cutoffs of the recipe that lie beyond the words of the data, and warn of it.
        progress: Show a progress bar on standard error.
        callbacks: Further Transformers callbacks.

    Returns:
        What the run measured, as metrics.json keeps it. `output` then has the model of the least
        validation loss, or the last one where there is no validation, ready for
        `linbias.models.load`.

    Raises:
        ValueError: The folder cannot be written, is in use or belongs to another run; the data is damaged; the
            recipe does not fit the dictionary, the number of processes or this machine; the loss
            ceases to be a finite number.
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
    data, output = Path(data), Path(output)
    dictionary, splits = _read_splits(data, recipe)
    on_cpu = uses_cpu(recipe.device, recipe.precision)
    if fit:
        recipe = _fit_cutoffs(recipe, len(dictionary))
    config = _config(recipe, len(dictionary))
    PartialState(cpu=on_cpu)  # joins the other processes, if there are any
    _check_processes(recipe, on_cpu)
    # All checks are done before anything is written.
    with hold_run_folder(output, "train"), no_bars():
        _open_run(recipe, data, splits, output)
        if not is_finished(output):
            _run(recipe, config, splits, data, output, progress, callbacks)
        # Of a finished run, too: it may have been killed here.
        Checkpoints(output / "checkpoints").delete()
        wait_for_all()
    return PaperMetrics.read(output)


def check_recipe(recipe: Recipe) -> None:
    """Refuses what cannot be trained here whatever the data, so that it is known before data is prepared.

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


def _read_splits(data: Path, recipe: Recipe) -> tuple[Dictionary, dict[str, StoredIds]]:
    splits = {}
    for name in ["train"] if recipe.validate_steps == 0 else ["train", "valid"]:
        dictionary, splits[name] = read_data(data, name)
        if not len(splits[name].tokens):
            raise ValueError(f"train: data must have tokens, got none in {data / name}.bin")
    return dictionary, splits


def _check_processes(recipe: Recipe, on_cpu: bool) -> None:
    processes = PartialState().num_processes
    devices = 1 if on_cpu else torch.cuda.device_count()
    if processes == 1 < devices:
        raise ValueError(
            f"train: every GPU must have a process of its own, got 1 for {devices} (start with "
            f"torchrun --nproc-per-node {devices}, or show it one by CUDA_VISIBLE_DEVICES=0)"
        )
    readers, pieces = Sharing.by("train", recipe.context_parallel).of, recipe.context_parallel
    if recipe.batches_per_step % readers:
        what = "processes" if pieces == 1 else f"groups of {pieces} processes"
        raise ValueError(
            f"train: batches_per_step must be a multiple of the {readers} {what}, "
            f"got {recipe.batches_per_step}"
        )


def _open_run(recipe: Recipe, data: Path, splits: Iterable[str], output: Path) -> None:
    files = [data / "dict.txt", *(data / f"{name}.bin" for name in splits)]
    open_run_folder(
        output / "recipe.json",
        {
            "recipe": asdict(recipe),
            "data": {file.name: fingerprint(file) for file in files},
            "num_processes": PartialState().num_processes,
        },
        "train",
        may_change=["recipe.context_parallel"],
    )


def _run(
    recipe: Recipe,
    config: PaperConfig,
    splits: dict[str, StoredIds],
    data: Path,
    output: Path,
    progress: bool,
    callbacks: Sequence[TrainerCallback],
) -> None:
    add_dictionary = partial(add_words, Dictionary.read(data / "dict.txt"))
    checkpoints = Checkpoints(output / "checkpoints", add_dictionary)
    sharing = Sharing.by("train", recipe.context_parallel)
    batches = _training_batches(recipe, splits["train"])
    tokens_per_step = len(batches.ids) // batches.steps_per_pass
    bar, watch = ProgressBar(tokens_per_step, visible=progress and is_main()), StopWatch()

    def save(trainer: PaperTrainer) -> None:
        publish(trainer, checkpoints, output, add_dictionary)

    set_seed(recipe.seed)
    trainer = PaperTrainer(
        recipe,
        save,
        model=PaperForCausalLM(config),
        args=_arguments(recipe, checkpoints.folder, batches.steps_per_pass, sharing.of),
        pieces=sharing.group,
        train_dataset=batches,
        eval_dataset=(
            _validation_batches(recipe, splits["valid"], sharing.of) if "valid" in splits else None
        ),
        callbacks=[
            *(checkpoints, SeedEachStep(recipe.seed, rank() % recipe.context_parallel)),
            *(LogFile(output / "log.jsonl"), FiniteLoss(), bar, watch, *callbacks),
        ],
    )

    def save_last() -> None:
        if "valid" not in splits:  # with validation, the best model is saved already
            save(trainer)

    peak_memory_bytes = run_trainer(trainer, checkpoints, bar, output, at_the_end=save_last)
    if is_main():
        PaperMetrics(
            **_losses(trainer.state.log_history),
            steps=recipe.steps,
            tokens=batches.num_tokens(),
            seconds=checkpoints.seconds,
            step_seconds=watch.step_seconds(),
            peak_memory_bytes=peak_memory_bytes,
            num_parameters=trainer.model.num_parameters(),
            num_processes=trainer.args.world_size,
        ).write(output)


def _training_batches(recipe: Recipe, split: StoredIds) -> Batches:
    def order(number: int) -> list[list[int]]:
        return batch_order(
            len(split.tokens),
            recipe.length,
            recipe.max_tokens,
            recipe.seed,
            number,
            multiple=recipe.rows_multiple,
        )

    return Batches(
        split.tokens,
        recipe.length,
        order,
        per_step=recipe.batches_per_step,
        steps=recipe.steps,
        pieces=recipe.context_parallel,
    )


def _validation_batches(recipe: Recipe, split: StoredIds, readers: int) -> Batches:
    """One pass in the order of the text; each process, or each group that shares it, scores one batch of every "step"."""
    ids, rows = split.tokens, recipe.max_tokens // recipe.length
    numbers = range(len(blocks(len(ids), recipe.length)))
    order = [list(numbers[first : first + rows]) for first in numbers[::rows]]
    pieces = recipe.context_parallel
    return Batches(ids, recipe.length, lambda _: order, per_step=readers, pieces=pieces)


def _arguments(
    recipe: Recipe, folder: Path, steps_per_pass: int, readers: int
) -> TrainingArguments:
    return trainer_arguments(
        folder,
        device=recipe.device,
        precision=recipe.precision,
        fsdp=recipe.fsdp,
        max_steps=recipe.steps,
        per_device_train_batch_size=1,  # an item of `Batches` is a whole batch
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=recipe.batches_per_step // readers,
        learning_rate=recipe.learning_rate,  # for messages only
        max_grad_norm=recipe.clip,
        seed=recipe.seed,
        eval_strategy="no" if recipe.validate_steps == 0 else "steps",
        eval_steps=recipe.validate_steps or steps_per_pass,
        save_steps=recipe.save_steps,
        logging_steps=recipe.log_steps,
        use_cache=True,  # in the configuration of the saved model; training makes no cache
    )


def _losses(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The last training loss, and the best validation loss and when it was."""
    trained = [entry["loss"] for entry in history if "loss" in entry][-1] / math.log(2)
    losses = {"loss_base2": trained, "ppl": perplexity(trained)}
    validated = [(entry["eval_loss"], entry["step"]) for entry in history if "eval_loss" in entry]
    if validated:
        best, step = min(validated)
        best /= math.log(2)
        losses |= {"valid_loss_base2": best, "valid_ppl": perplexity(best), "best_step": step}
    return losses
