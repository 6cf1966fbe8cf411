"""Trains a language model on Transformers' Trainer, and survives being interrupted.

A run lives in one folder:

    settings.json      what was asked for; written first, compared when the run goes on
    checkpoints/       the Trainer's, while training
    model.safetensors, config.json, tokenizer.json, ...      the result, for `from_pretrained`
    metrics.json       written last: where it stands, the run is finished

The training sequences are a pure function of the seed and the step, and a checkpoint holds all
else that the future depends on. A run that is killed at any moment and started again therefore
ends with the very weights, bit for bit, of an unbroken one (same machine, same threads).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.modeling_outputs import CausalLMOutput

from linbias.data.corpus import Corpus
from linbias.data.segments import Segments
from linbias.models.config import LinbiasConfig
from linbias.models.linbias import LinbiasForCausalLM
from linbias.models.load import no_bars
from linbias.runs.checkpoints import (
    Checkpoints,
    check_same,
    check_writable,
    is_main,
    wait_for_all,
    write_json,
)
from linbias.runs.memory import PeakMemory
from linbias.runs.watch import FiniteLoss, ProgressBar, StopWatch

# The steps of a time budget come from this many of a throw-away model, the first ones not timed.
_WARM_STEPS, _TIMED_STEPS = 2, 8


@dataclass(frozen=True)
class TrainSettings:
    """What determines a run, besides the corpus and the number of processes.

    Exactly one of `steps`, `tokens` and `seconds` says how long to train.

    Attributes:
        model: Fields of `LinbiasConfig` that differ from its defaults; the vocabulary and
            `train_length` follow from the corpus and `length`.
        length: Tokens that a training sequence predicts, each from at most so many before it.
        batch_size: Sequences per step, over all processes and accumulated parts together.
        accumulation: Parts that a process computes one after another to save memory.
        steps: Updates of the weights.
        tokens: Tokens to predict, rounded up to whole steps.
        seconds: Training time; a few steps of a throw-away model are timed to find the steps.
        learning_rate: Peak of the schedule: linear warmup, then a cosine down to zero.
        warmup: Share of the steps that raise the learning rate.
        weight_decay: Of AdamW, on matrices only.
        clip: Largest norm of the gradient.
        precision: "fp32", "bf16", or "fp16" (GPU only) for matrix products; weights are float32.
        save_steps: Steps between checkpoints.
        seed: Fixes the initial weights, the order of the text, and dropout.
        threads: CPU threads; None leaves PyTorch's choice.
        device: "auto" takes a GPU where there is one; or "cpu".
        tensorboard: Also write the loss curve to `<output>/tensorboard`.
        fsdp: Transformers' `fsdp_config`, for runs under torchrun; {} takes its defaults.

    Raises:
        ValueError: A field breaks its rule.

    Example:
        >>> TrainSettings(model={"position": "rotary"}, length=64, steps=100).batch_size
        32
    """

    model: dict[str, Any] = field(default_factory=dict)
    length: int = 128
    batch_size: int = 32
    accumulation: int = 1
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "fp32"
    save_steps: int = 100
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    tensorboard: bool = False
    fsdp: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        budget = (self.steps, self.tokens, self.seconds)
        is_one = sum(amount is not None for amount in budget) == 1
        _require("steps, tokens, seconds", is_one, "given one at a time", budget)
        for name in ("length", "batch_size", "accumulation", "save_steps"):
            _require(name, getattr(self, name) >= 1, "at least 1", getattr(self, name))
        for name in ("steps", "tokens", "threads"):
            value = getattr(self, name)
            _require(name, value is None or value >= 1, "at least 1", value)
        _require("seconds", self.seconds is None or self.seconds > 0, "positive", self.seconds)
        _require("learning_rate", self.learning_rate > 0, "positive", self.learning_rate)
        _require("warmup", 0 <= self.warmup < 1, "in [0, 1)", self.warmup)
        for name in ("weight_decay", "clip"):
            _require(name, getattr(self, name) >= 0, "at least 0", getattr(self, name))
        choices = ("fp32", "bf16", "fp16")
        _require("precision", self.precision in choices, f"one of {choices}", self.precision)
        _require("device", self.device in ("auto", "cpu"), "'auto' or 'cpu'", self.device)
        given = set(self.model) & {"vocab_size", "train_length"}
        _require("model", not given, "without vocab_size and train_length", self.model)
        unknown = sorted(set(self.model) - set(LinbiasConfig().to_dict()))
        _require("model", not unknown, "made of LinbiasConfig's fields", unknown)


def _require(name: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"TrainSettings: {name} must be {rule}, got {value!r}")


def train(
    settings: TrainSettings,
    corpus: Corpus,
    output: str | os.PathLike[str],
    *,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """Trains a model, or goes on with a run that was interrupted, or returns one that is finished.

    The text is cut into segments of `length` + 1 tokens that overlap by one: of each, the first
    `length` are read and the last `length` predicted. Segments come in an order shuffled anew for
    each pass over the text. Sets the global random seeds. Under torchrun every process calls this,
    with a corpus loaded the same way.

    Args:
        settings: What to train and for how long.
        corpus: Its train split is used; its tokenizer is saved with the model.
        output: Folder of the run. New, empty, or the home of the very same run.
        progress: Show a progress bar on standard error.
        callbacks: Further Transformers callbacks.

    Returns:
        `output`, ready for `AutoModelForCausalLM.from_pretrained`. Its metrics.json has: loss
        (nats per token, mean over the last tenth of the steps), steps, tokens, seconds (training
        time of all sessions), tokens_per_second, peak_memory_bytes (of the first process in the
        last session), num_parameters, num_processes.

    Raises:
        ValueError: The folder cannot be written or belongs to another run; the corpus is shorter
            than a segment; the batch cannot be divided; the loss ceases to be a finite number.
        OSError: A checkpoint could not be written (disk full). The one before it is intact, and
            the same call goes on from there.

    Example:
        >>> from linbias.data.corpus import load_corpus
        >>> settings = TrainSettings({"hidden_size": 48}, length=32, batch_size=4, steps=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = train(settings, load_corpus(max_bytes=9999), folder, progress=False)
        ...     json.loads((result / "metrics.json").read_text())["tokens"]
        256
    """
    output = Path(output)
    on_cpu = _on_cpu(settings)
    _config(settings, corpus)  # may refuse, and should before anything is written
    check_writable(output)
    PartialState(cpu=on_cpu)  # joins the other processes, if there are any
    with _threads(settings.threads), no_bars():
        steps = _open_run(settings, corpus, output)
        if not (output / "metrics.json").exists():
            _run(settings, corpus, output, steps, progress, callbacks)
        wait_for_all()
    return output


def _on_cpu(settings: TrainSettings) -> bool:
    if settings.device == "auto" and torch.accelerator.is_available():
        return False
    if settings.precision == "fp16":
        raise ValueError("train: precision 'fp16' must have a GPU, got a CPU (which has 'bf16')")
    return True


def _config(settings: TrainSettings, corpus: Corpus) -> LinbiasConfig:
    if len(corpus.train) <= settings.length:
        raise ValueError(
            f"train: corpus must hold length + 1 = {settings.length + 1} tokens to train on, "
            f"got {len(corpus.train)}"
        )
    vocab_size = corpus.tokenizer.vocab_size
    return LinbiasConfig(**settings.model, vocab_size=vocab_size, train_length=settings.length)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _open_run(settings: TrainSettings, corpus: Corpus, output: Path) -> int:
    """Writes settings.json, or checks that the one in the folder says the same; returns steps."""
    processes = PartialState().num_processes
    if settings.batch_size % (processes * settings.accumulation):
        raise ValueError(
            f"train: batch_size must be a multiple of processes x accumulation = "
            f"{processes} x {settings.accumulation}, got {settings.batch_size}"
        )
    asked = {
        "settings": asdict(settings),
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "num_processes": processes,
    }
    path = output / "settings.json"
    is_new = not path.exists()
    if is_new and any(not child.name.startswith(".") for child in output.iterdir()):
        raise ValueError(f"train: output must be empty or hold this run, got {output}")
    wait_for_all()  # every process has looked before the first one writes
    if is_new:
        steps = _num_steps(settings, corpus)
        if is_main():
            write_json(path, {**asked, "steps": steps})
        wait_for_all()
    record = json.loads(path.read_text(encoding="utf-8"))
    steps = int(record.pop("steps"))
    check_same(record, asked, output)
    return steps


def _num_steps(settings: TrainSettings, corpus: Corpus) -> int:
    if settings.steps is not None:
        return settings.steps
    if settings.tokens is not None:
        return math.ceil(settings.tokens / (settings.batch_size * settings.length))
    watch = StopWatch()
    with tempfile.TemporaryDirectory() as folder:
        steps = _WARM_STEPS + _TIMED_STEPS
        trainer = _trainer(settings, corpus, Path(folder), steps, [watch])
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
    newest = checkpoints.latest()
    tokens_per_step = settings.batch_size * settings.length
    meter = ProgressBar(tokens_per_step, visible=progress and is_main())
    watchers = [checkpoints, meter, FiniteLoss(), *callbacks]
    if settings.tensorboard:
        watchers.append(TensorBoardCallback())
        watchers[-1].logging_dir = str(output / "tensorboard")
    trainer = _trainer(settings, corpus, checkpoints.folder, steps, watchers)
    try:
        with PeakMemory(trainer.args.device) as memory, meter.bar:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    except (OSError, RuntimeError, SafetensorError) as error:
        if not checkpoints.saving:
            raise
        raise OSError(
            f"train: could not write a checkpoint to {checkpoints.folder} ({error}); those "
            "before it are intact, and the same call goes on from there"
        ) from error
    metrics = {
        "loss": _final_loss(trainer.state),
        "steps": steps,
        "tokens": steps * tokens_per_step,
        "seconds": checkpoints.seconds,
        "tokens_per_second": steps * tokens_per_step / checkpoints.seconds,
        "peak_memory_bytes": memory.peak_bytes,
        "num_parameters": trainer.model.num_parameters(),
        "num_processes": trainer.args.world_size,
    }
    _save(trainer, corpus, output, metrics)
    if is_main():
        shutil.rmtree(checkpoints.folder)  # the model itself is safe now


def _trainer(
    settings: TrainSettings,
    corpus: Corpus,
    folder: Path,
    steps: int,
    callbacks: list[TrainerCallback],
) -> Trainer:
    on_cpu = _on_cpu(settings)
    processes = PartialState().num_processes
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size // (processes * settings.accumulation),
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(settings.warmup * steps),
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        use_cpu=on_cpu,
        save_steps=settings.save_steps,
        # Logs fall on checkpoints, so that an interrupted run logs the same numbers.
        logging_steps=math.gcd(settings.save_steps, min(10, steps)),
        logging_nan_inf_filter=False,  # it would hide a diverging loss, and wait for each step
        disable_tqdm=True,  # we draw our own bar
        report_to="none",
        train_sampling_strategy="sequential",  # the order is `Segments`' own
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        average_tokens_across_devices=False,  # they all have the same number
        ddp_find_unused_parameters=False,
        fsdp=settings.fsdp is not None,
        fsdp_config=None if settings.fsdp is None else dict(settings.fsdp),
    )
    set_seed(settings.seed)
    model = LinbiasForCausalLM(_config(settings, corpus))
    # Tied weights are saved once; the Trainer would warn of the other name when it resumes.
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)

    def mean_loss(outputs: CausalLMOutput, labels: Tensor, **_: Any) -> Tensor:
        loss = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return loss / settings.accumulation  # whose parts are all of one size

    trainer = Trainer(
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
    trainer.remove_callback(PrinterCallback)
    return trainer


def _save(trainer: Trainer, corpus: Corpus, output: Path, metrics: dict[str, Any]) -> None:
    """Writes the model aside, then moves its files into place, the metrics last."""
    trainer.accelerator.unwrap_model(
        trainer.model
    ).config.use_cache = True  # Trainer turned it off
    partial = output / ".partial"
    trainer.save_model(str(partial))  # every process takes part where the weights are sharded
    if is_main():
        (partial / "training_args.bin").unlink()  # a pickle, of use to nobody
        corpus.tokenizer.save(partial)
        for file in partial.iterdir():
            os.replace(file, output / file.name)
        partial.rmdir()
        write_json(output / "metrics.json", metrics)


def _final_loss(state: TrainerState) -> float:
    logged = [(log["step"], log["loss"]) for log in state.log_history if "loss" in log]
    recent = [loss for step, loss in logged if step > 0.9 * state.max_steps]
    return statistics.fmean(recent or [logged[-1][1]])
