"""Trains the paper's models on Transformers' Trainer, and survives being interrupted.

A run lives in one folder:

    recipe.json        what was asked for; written first, compared when the run goes on
    log.jsonl          a line per logged update, in the original's words
    checkpoints/       the Trainer's, while training
    config.json, model.safetensors, dict.txt     the best model so far, for `from_pretrained`
    metrics.json       written last: where it stands, the run is finished

The batches are a pure function of the seed and the update, dropout is seeded anew for each update,
and a checkpoint holds all else that the future depends on. A run that is killed at any moment and
started again therefore ends with the very weights, bit for bit, of an unbroken one (same machine,
same threads).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed

from linbias.data.batches import batch_order, blocks
from linbias.data.dictionary import Dictionary
from linbias.data.prepare import read_data
from linbias.data.store import Ids
from linbias.models.load import no_bars
from linbias.models.paper import PaperForCausalLM
from linbias.models.paper_config import PaperConfig
from linbias.paper.recipe import Recipe
from linbias.paper.trainer import Batches, Log, PaperTrainer, SeedEachUpdate, perplexity
from linbias.runs.checkpoints import (
    Checkpoints,
    check_same,
    check_writable,
    is_main,
    wait_for_all,
    write_json,
)
from linbias.runs.memory import PeakMemory
from linbias.runs.watch import FiniteLoss, ProgressBar


def train(
    data: str | os.PathLike[str],
    output: str | os.PathLike[str],
    recipe: Recipe,
    *,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Trains a model, or goes on with a run that was interrupted, or returns one that is finished.

    Blocks, batches and their order, optimizer, schedule, clipping and the logged numbers are those
    of the paper's code. Sets the global random seeds. Under torchrun every process calls this, and
    any number of processes that divides `batches_per_update` trains the same model.

    Args:
        data: Folder of dict.txt, train.bin, train.idx and, unless `validate_every` is 0, valid.bin
            and valid.idx: made by `linbias paper prepare` or by the original.
        output: Folder of the run. New, empty, or the home of the very same run.
        recipe: What to train and for how long.
        progress: Show a progress bar on standard error.
        callbacks: Further Transformers callbacks.

    Returns:
        `output`, ready for `AutoModelForCausalLM.from_pretrained`: the model of the least validation
        loss, or the last one where there is no validation. Its metrics.json has: loss_base2, ppl
        (training, last log line), valid_loss_base2, valid_ppl and best_update (the best), updates,
        tokens, seconds (training time of all sessions), tokens_per_second, peak_memory_bytes (of
        the first process in the last session), num_parameters, num_processes.

    Raises:
        ValueError: The folder cannot be written or belongs to another run; the data is damaged; the
            recipe does not fit the dictionary, the number of processes or this machine; the loss
            ceases to be a finite number.
        OSError: A file could not be written (disk full). The checkpoint before it is intact, and
            the same call goes on from there.

    Example:
        >>> from linbias.data.prepare import prepare
        >>> model = {"hidden_size": 32, "num_hidden_layers": 1, "cutoffs": []}
        >>> batches = dict(length=4, max_tokens=8, batches_per_update=1)
        >>> run = dict(updates=3, warmup=1, precision="fp32", validate_every=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "text").write_text("the cat sat on the mat\\n" * 3)
        ...     made = prepare({"train": Path(folder, "text")}, f"{folder}/data")
        ...     recipe = Recipe(model=model, **batches, **run)
        ...     result = train(made.folder, f"{folder}/run", recipe, progress=False)
        ...     json.loads((result / "metrics.json").read_text())["tokens"]
        21
    """
    data, output = Path(data), Path(output)
    dictionary, splits = _read(data, recipe)
    on_cpu = _on_cpu(recipe)
    config = _config(recipe, dictionary)
    check_writable(output)  # whatever may refuse has done so, before anything is written
    PartialState(cpu=on_cpu)  # joins the other processes, if there are any
    with no_bars():
        _open_run(recipe, data, splits, output)
        if not all((output / name).exists() for name in ("metrics.json", "model.safetensors")):
            _run(recipe, config, splits, data, output, progress, callbacks)
        wait_for_all()
    return output


def _on_cpu(recipe: Recipe) -> bool:
    if recipe.device == "auto" and torch.accelerator.is_available():
        return False
    if recipe.precision == "fp16":
        raise ValueError(
            "train: precision 'fp16' must have a GPU, got a CPU (which has 'fp32' and 'bf16')"
        )
    return True


def _config(recipe: Recipe, dictionary: Dictionary) -> PaperConfig:
    unknown = sorted(set(recipe.model) - set(PaperConfig().to_dict()))
    if unknown:
        raise ValueError(f"train: model must be made of PaperConfig's fields, got {unknown}")
    return PaperConfig(
        **recipe.model,
        vocab_size=len(dictionary),
        position=recipe.position,
        train_length=recipe.length,
    )


def _read(data: Path, recipe: Recipe) -> tuple[Dictionary, dict[str, Ids]]:
    splits = {}
    for name in ["train"] if recipe.validate_every == 0 else ["train", "valid"]:
        dictionary, splits[name] = read_data(data, name)
        if not len(splits[name].tokens):
            raise ValueError(f"train: data must have tokens, got none in {data / name}.bin")
    return dictionary, splits


def _open_run(recipe: Recipe, data: Path, splits: Iterable[str], output: Path) -> None:
    processes = PartialState().num_processes
    devices = 1 if _on_cpu(recipe) else torch.cuda.device_count()
    if processes == 1 < devices:
        raise ValueError(
            f"train: every GPU must have a process of its own, got 1 for {devices} (start with "
            f"torchrun --nproc-per-node {devices}, or show it one by CUDA_VISIBLE_DEVICES=0)"
        )
    if recipe.batches_per_update % processes:
        raise ValueError(
            f"train: batches_per_update must be a multiple of the {processes} processes, "
            f"got {recipe.batches_per_update}"
        )
    files = [data / "dict.txt", *(data / f"{name}.bin" for name in splits)]
    claim(
        output / "recipe.json",
        {
            "recipe": asdict(recipe),
            "data": {file.name: fingerprint(file) for file in files},
            "num_processes": processes,
        },
        "train",
    )


def claim(path: Path, asked: dict[str, Any], function: str) -> None:
    """Makes a folder the home of a run, or finds that it is the home of this very run.

    Args:
        path: The run's JSON file in its folder.
        asked: What the run is made with.
        function: Whom the error names.

    Raises:
        ValueError: The folder holds something else, or another run; the difference is listed.
    """
    folder, is_new = path.parent, not path.exists()
    if is_new and any(not child.name.startswith(".") for child in folder.iterdir()):
        raise ValueError(f"{function}: output must be empty or hold this run, got {folder}")
    wait_for_all()  # every process has looked before the first one writes
    if is_new and is_main():
        write_json(path, asked)
    wait_for_all()
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(there, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise ValueError(f"{function}: {path} is damaged ({error})") from error
    check_same(there, asked, folder, function)


def fingerprint(path: Path) -> str:
    """16 hexadecimal digits that stand for a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _run(
    recipe: Recipe,
    config: PaperConfig,
    splits: dict[str, Ids],
    data: Path,
    output: Path,
    progress: bool,
    callbacks: Sequence[TrainerCallback],
) -> None:
    checkpoints = Checkpoints(output / "checkpoints")
    newest = checkpoints.latest()
    batches = _training_batches(recipe, splits["train"])
    meter = ProgressBar(
        len(batches.ids) // batches.updates_per_pass, visible=progress and is_main()
    )
    set_seed(recipe.seed)
    trainer = PaperTrainer(
        recipe,
        partial(_publish, checkpoints=checkpoints, data=data, output=output),
        model=PaperForCausalLM(config),
        args=_arguments(recipe, checkpoints.folder, batches.updates_per_pass),
        train_dataset=batches,
        eval_dataset=_validation_batches(recipe, splits["valid"]) if "valid" in splits else None,
        callbacks=[
            *(checkpoints, SeedEachUpdate(recipe.seed), Log(output / "log.jsonl")),
            *(FiniteLoss(), meter, *callbacks),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    try:
        with PeakMemory(trainer.args.device) as memory, meter.bar:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            if "valid" not in splits:
                trainer.publish(trainer)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not checkpoints.saving:
            raise
        raise OSError(
            f"train: could not write to {output} ({error}); the last complete checkpoint is "
            "intact, and the same call goes on from there"
        ) from error
    if is_main():
        tokens = batches.num_tokens()
        write_json(
            output / "metrics.json",
            {
                **_losses(trainer.state.log_history),
                "updates": recipe.updates,
                "tokens": tokens,
                "seconds": checkpoints.seconds,
                "tokens_per_second": tokens / checkpoints.seconds,
                "peak_memory_bytes": memory.peak_bytes,
                "num_parameters": trainer.model.num_parameters(),
                "num_processes": trainer.args.world_size,
            },
        )
        shutil.rmtree(checkpoints.folder)  # the model itself is safe now


def _training_batches(recipe: Recipe, split: Ids) -> Batches:
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
        per_update=recipe.batches_per_update,
        updates=recipe.updates,
    )


def _validation_batches(recipe: Recipe, split: Ids) -> Batches:
    """One pass in stream order; each process scores a batch of every "update"."""
    ids, rows = split.tokens, recipe.max_tokens // recipe.length
    numbers = range(len(blocks(len(ids), recipe.length)))
    order = [list(numbers[first : first + rows]) for first in numbers[::rows]]
    return Batches(ids, recipe.length, lambda _: order, per_update=PartialState().num_processes)


def _arguments(recipe: Recipe, folder: Path, updates_per_pass: int) -> TrainingArguments:
    on_cpu = _on_cpu(recipe)
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.updates,
        per_device_train_batch_size=1,  # of `Batches`, whose items are batches
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=recipe.batches_per_update // PartialState().num_processes,
        learning_rate=recipe.lr,  # for messages only
        max_grad_norm=recipe.clip,
        bf16=recipe.precision == "bf16",
        fp16=recipe.precision == "fp16",
        seed=recipe.seed,
        use_cpu=on_cpu,
        eval_strategy="no" if recipe.validate_every == 0 else "steps",
        eval_steps=recipe.validate_every or updates_per_pass,
        save_steps=recipe.save_every,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # it would hide a diverging loss, and wait for each step
        disable_tqdm=True,  # we draw our own bar
        report_to="none",
        train_sampling_strategy="sequential",  # the order is that of `Batches`
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        use_cache=True,  # of the saved model; training makes none
        ddp_find_unused_parameters=False,
        fsdp=recipe.fsdp is not None,
        fsdp_config=None if recipe.fsdp is None else dict(recipe.fsdp),
    )


def _publish(trainer: PaperTrainer, checkpoints: Checkpoints, data: Path, output: Path) -> None:
    """Writes the model aside, then moves its files into place."""
    aside, saving = output / ".partial", checkpoints.saving
    checkpoints.saving = True  # so that an error now is known to come from writing
    trainer.save_model(str(aside))  # every process takes part where the weights are sharded
    if is_main():
        (aside / "training_args.bin").unlink()  # a pickle, of use to nobody
        shutil.copyfile(data / "dict.txt", aside / "dict.txt")
        for file in aside.iterdir():
            os.replace(file, output / file.name)
        aside.rmdir()
    checkpoints.saving = saving


def _losses(history: list[dict[str, Any]]) -> dict[str, float]:
    """The last training loss, and the best validation loss and when it was."""
    trained = [entry["loss"] for entry in history if "loss" in entry][-1] / math.log(2)
    losses = {"loss_base2": trained, "ppl": perplexity(trained)}
    validated = [(entry["eval_loss"], entry["step"]) for entry in history if "eval_loss" in entry]
    if validated:
        best, update = min(validated)
        best /= math.log(2)
        losses |= {"valid_loss_base2": best, "valid_ppl": perplexity(best), "best_update": update}
    return losses
