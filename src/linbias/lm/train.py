"""Trains a language model on Transformers' Trainer, and survives being interrupted.

A run has a folder:

    settings.json      the settings; written first, compared when the run continues
    checkpoints/       the Trainer's, while training
    model.safetensors, config.json, tokenizer.json, ...      the result, for `from_pretrained`
    metrics.json       written last: a run that has it is finished

The training sequences are a pure function of the seed and the step, and a checkpoint holds all
else that the future depends on. A run that is killed at any moment and started again therefore
ends with the very weights, bit for bit, of an unbroken one (same machine, same threads).
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.modeling_outputs import CausalLMOutput

from linbias.data.corpus import Corpus
from linbias.data.segments import Segments
from linbias.lm.settings import TrainSettings
from linbias.models.config import LinbiasConfig
from linbias.models.linbias import LinbiasForCausalLM
from linbias.models.load import no_bars
from linbias.runs.checkpoints import Checkpoints
from linbias.runs.files import Record
from linbias.runs.folders import hold_run_folder, open_run_folder
from linbias.runs.processes import is_main, wait_for_all
from linbias.runs.training import (
    TrainingMetrics,
    is_finished,
    publish,
    run_trainer,
    trainer_arguments,
    uses_cpu,
)
from linbias.runs.watch import FiniteLoss, ProgressBar, StopWatch

# With a time budget, the steps follow from the time that this many steps of a throw-away model
# take. The first ones are not timed.
_WARM_STEPS, _TIMED_STEPS = 2, 8


@dataclass(frozen=True, kw_only=True)
class LanguageModelMetrics(TrainingMetrics):
    """What a finished run measured.

    Attributes:
        loss: Nats per token, mean over the last tenth of the steps.
    """

    loss: float


def train(
    settings: TrainSettings,
    corpus: Corpus,
    output: str | os.PathLike[str],
    *,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
) -> LanguageModelMetrics:
    """Trains a model, continues a run that was interrupted, or returns one that is finished.

    The text is cut into segments of `length` + 1 tokens that overlap by one: of each, the first
    `length` are read and the last `length` predicted. Segments come in an order shuffled anew for
    each pass over the text. Sets the global random seeds. Under torchrun every process calls this,
    with a corpus loaded the same way.

    Args:
        settings: What to train and for how long.
        corpus: Its train split is used; its tokenizer is saved with the model.
        output: Folder of the run: new, empty, or of the very same run.
        progress: Show a progress bar on standard error.
        callbacks: Further Transformers callbacks.

    Returns:
        What the run measured, as metrics.json keeps it. `output` is then ready for
        `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ValueError: The folder cannot be written, is in use or belongs to another run; the corpus is shorter
            than a segment; the batch cannot be divided; the loss ceases to be a finite number.
        OSError: A file could not be written (disk full). The last complete checkpoint is intact,
            and the same call continues from there.

    Example:
        >>> from linbias.data.corpus import load_corpus
        >>> settings = TrainSettings({"hidden_size": 48}, length=32, batch_size=4, steps=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     corpus = load_corpus(max_bytes=9999)
        ...     train(settings, corpus, folder, progress=False).tokens
        256
    """
    output = Path(output)
    on_cpu = uses_cpu(settings.device, settings.precision)
    _config(settings, corpus)  # may refuse, and should before anything is written
    PartialState(cpu=on_cpu)  # joins the other processes, if there are any
    _check_batch(settings)
    with hold_run_folder(output, "train"), _threads(settings.threads), no_bars():
        steps = _open_run(settings, corpus, output)
        if not is_finished(output):
            _run(settings, corpus, output, steps, progress, callbacks)
        wait_for_all()
    return LanguageModelMetrics.read(output)


def _config(settings: TrainSettings, corpus: Corpus) -> LinbiasConfig:
    if len(corpus.train) <= settings.length:
        raise ValueError(
            f"train: corpus must hold length + 1 = {settings.length + 1} tokens to train on, "
            f"got {len(corpus.train)}"
        )
    return LinbiasConfig(
        **settings.model,
        vocab_size=corpus.tokenizer.vocab_size,
        train_length=settings.length,
        **corpus.tokenizer.special_ids,
    )


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Sets PyTorch's CPU threads for the length of the block; None leaves them alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_batch(settings: TrainSettings) -> None:
    processes = PartialState().num_processes
    if settings.batch_size % (processes * settings.accumulation):
        raise ValueError(
            f"train: batch_size must be a multiple of processes x accumulation = "
            f"{processes} x {settings.accumulation}, got {settings.batch_size}"
        )


def _open_run(settings: TrainSettings, corpus: Corpus, output: Path) -> int:
    """Opens the run's folder, and returns the number of steps."""
    identity: Record = {
        "settings": asdict(settings),
        "corpus": {"fingerprint": corpus.fingerprint, "splits": corpus.splits},
        "num_processes": PartialState().num_processes,
    }
    first_time: dict[str, Callable[[], Any]] = {
        "location": lambda: corpus.location,  # not compared: a corpus may move
    }
    if settings.seconds is None:
        identity["steps"] = _num_steps(settings, corpus)
    else:
        first_time["steps"] = lambda: _num_steps(settings, corpus)
    path = output / "settings.json"
    record = open_run_folder(path, identity, "train", first_time=first_time)
    steps = record["steps"]
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"train: {path} is damaged (steps is {steps!r})")
    return steps


def _num_steps(settings: TrainSettings, corpus: Corpus) -> int:
    """The budget as a number of steps; a budget in seconds is measured."""
    if settings.steps is not None:
        return settings.steps
    if settings.tokens is not None:
        return math.ceil(settings.tokens / (settings.batch_size * settings.length))
    watch = StopWatch()
    with tempfile.TemporaryDirectory() as folder:
        steps = _WARM_STEPS + _TIMED_STEPS
        trainer = _trainer(settings, corpus, Path(folder), steps, [watch])
        trainer.remove_callback(PrinterCallback)
        trainer.args.save_strategy = "no"
        trainer.train()
    times = [after - before for before, after in pairwise(watch.times[_WARM_STEPS - 1 :])]
    assert settings.seconds is not None
    return max(1, round(settings.seconds / statistics.median(times)))


def _run(
    settings: TrainSettings,
    corpus: Corpus,
    output: Path,
    steps: int,
    progress: bool,
    callbacks: Sequence[TrainerCallback],
) -> None:
    checkpoints = Checkpoints(output / "checkpoints")
    tokens_per_step = settings.batch_size * settings.length
    bar = ProgressBar(tokens_per_step, visible=progress and is_main())
    all_callbacks = [checkpoints, bar, FiniteLoss(), *callbacks]
    if settings.tensorboard:
        all_callbacks.append(TensorBoardCallback())
        all_callbacks[-1].logging_dir = str(output / "tensorboard")
    trainer = _trainer(settings, corpus, checkpoints.folder, steps, all_callbacks)

    def save() -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.config.use_cache = True  # the Trainer turned it off
        publish(trainer, checkpoints, output, corpus.tokenizer.save)

    peak_memory_bytes = run_trainer(trainer, checkpoints, bar, output, at_the_end=save)
    if is_main():
        LanguageModelMetrics(
            loss=_final_loss(trainer.state),
            steps=steps,
            tokens=steps * tokens_per_step,
            seconds=checkpoints.seconds,
            peak_memory_bytes=peak_memory_bytes,
            num_parameters=trainer.model.num_parameters(),
            num_processes=trainer.args.world_size,
        ).write(output)
    checkpoints.delete()


def _trainer(
    settings: TrainSettings,
    corpus: Corpus,
    folder: Path,
    steps: int,
    callbacks: list[TrainerCallback],
) -> Trainer:
    processes = PartialState().num_processes
    arguments = trainer_arguments(
        folder,
        device=settings.device,
        precision=settings.precision,
        fsdp=settings.fsdp,
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size // (processes * settings.accumulation),
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(settings.warmup * steps),
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=settings.clip,
        seed=settings.seed,
        save_steps=settings.save_steps,
        # Logs fall on checkpoints, so that an interrupted run logs the same numbers.
        logging_steps=math.gcd(settings.save_steps, min(10, steps)),
        average_tokens_across_devices=False,  # all devices have the same number of tokens
    )
    set_seed(settings.seed)
    model = LinbiasForCausalLM(_config(settings, corpus))
    # Tied weights are saved once; the Trainer would warn of the other name when it resumes.
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)

    def mean_loss(outputs: CausalLMOutput, labels: Tensor, **_: Any) -> Tensor:
        loss = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return loss / settings.accumulation  # the parts of a batch are all of one size

    return Trainer(
        model,
        arguments,
        data_collator=lambda batch: batch,
        train_dataset=Segments(
            corpus.train,
            length=settings.length,
            num_segments=steps * settings.batch_size,
            seed=settings.seed,
        ),
        compute_loss_func=mean_loss,
        callbacks=callbacks,
    )


def _final_loss(state: TrainerState) -> float:
    """The mean of the losses that were logged in the last tenth of the steps."""
    logged = [(log["step"], log["loss"]) for log in state.log_history if "loss" in log]
    recent = [loss for step, loss in logged if step > 0.9 * state.max_steps]
    return statistics.fmean(recent or [logged[-1][1]])
