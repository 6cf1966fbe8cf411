"""A training run on Transformers' Trainer, as of language models and of the paper's models."""

import errno
import re
import shutil
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from linbias._run.files import Record, move_into_place, read_json, write_json
from linbias._run.folders import hold_run_folder
from linbias._run.processes import Sharing, is_main, wait_for_all
from linbias.lm.checkpoints import Checkpoints
from linbias.lm.memory import PeakMemory
from linbias.lm.watch import FiniteLoss, LossHistory, ProgressBar, StopWatch
from linbias.models.loading import no_bars
from linbias.torch import context_parallel

_WRITER = "inline_container|PytorchStreamWriter"  # in each error of PyTorch's writer
_LITTLE = 2**20  # bytes: a disk with less is full to whoever writes a model


@dataclass(frozen=True, kw_only=True)
class TrainingMetrics:
    """What a finished run measured; its metrics.json, which marks the run as finished."""

    steps: int  # updates of the weights
    tokens: int  # that were read, over all steps and processes
    seconds: float  # of training, in all sessions
    step_seconds: float | None = None  # median, of the last session that had two steps or more
    peak_memory_bytes: int  # of the first process, in the last session
    num_parameters: int
    num_processes: int

    @property
    def tokens_per_second(self) -> float:
        """The pace of a median step; where there is none, the mean over all of the training."""
        seconds = self.steps * self.step_seconds if self.step_seconds else self.seconds
        return self.tokens / seconds

    def to_dict(self) -> Record:
        values = {**asdict(self), "tokens_per_second": self.tokens_per_second}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, record: Record) -> Self:
        """The reverse of `to_dict`; entries that are no fields are ignored."""
        names = {f.name for f in fields(cls)} & set(record)
        return cls(**{name: record[name] for name in names})

    @classmethod
    def read(cls, folder: Path) -> Self:
        path = folder / "metrics.json"
        try:
            return cls.from_dict(read_json(path, "train"))
        except TypeError as error:  # a field is missing
            raise ValueError(f"train: {path} is damaged ({error})") from error


class RunTrainer(Trainer):
    """The Trainer of a run, of which validations do not affect the training."""

    def __init__(self, run: Any, **options: Any) -> None:
        self.run = run
        super().__init__(**options)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.run.schedule)
        return self.lr_scheduler

    def in_shards(self) -> AbstractContextManager[None]:
        """Within the block the model reads this process's part of each sequence."""
        group = self.run.sharing.group
        return nullcontext() if group is None else context_parallel.use(group)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """The first step after a checkpoint between two logs adds the losses before it."""
        with self.in_shards():
            loss = super().training_step(*arguments, **options)
        history = self.state.log_history
        if history and "unlogged" in history[0]:
            before = history.pop(0)
            self._globalstep_last_logged = before["since"]
            loss = loss + before["unlogged"]
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Keeps the losses since the last log in a checkpoint; the Trainer would forget them."""
        if self.control.should_save and not self.control.should_log:
            unlogged = {"unlogged": tr_loss.item(), "since": self._globalstep_last_logged}
            self.state.log_history.insert(0, unlogged)
        super()._maybe_log_save_evaluate(tr_loss, *arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Puts the random numbers back that the Trainer draws for the order of its data."""
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return super().evaluate(*arguments, **options)

    def prediction_step(self, *arguments: Any, **options: Any) -> Any:
        with self.in_shards():
            return super().prediction_step(*arguments, **options)


class StopAfterStep(TrainerCallback):
    """Within the block, Ctrl-C and SIGTERM end a training after the step, with a checkpoint; the
    second one at once. `asked` is the one that came, to be raised again.
    """

    def __init__(self, checkpoints: Checkpoints, bar: ProgressBar) -> None:
        self.checkpoints, self.bar = checkpoints, bar
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number: int, _: object) -> None:
        self.__exit__()
        self.asked = number
        self.bar.say("Stopping after this step, with a checkpoint; once more: at once.")

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.asked is not None:
            control.should_save = control.should_training_stop = self.checkpoints.saving = True


def is_finished(folder: Path) -> bool:
    """Whether a run's folder holds metrics and a model."""
    return (folder / "metrics.json").exists() and any(folder.glob("*.safetensors"))


def uses_cpu(device: str, precision: str) -> bool:
    """Whether to train on the CPU: by choice ("cpu", not "auto"), or as nothing else is there."""
    if device == "auto" and torch.accelerator.is_available():
        return False
    if precision == "fp16":
        raise ValueError(
            "train: precision 'fp16' must have a GPU, got a CPU (which has 'fp32' and 'bf16')"
        )
    return True


class Run(ABC):
    """A run in its folder, checked in `__init__`; its kind says what the abstract parts are."""

    settings: Any
    metrics: type[TrainingMetrics]
    steps: int
    tokens_per_step: int  # that a step predicts; the mean, where steps differ

    @property
    def tokens(self) -> int:
        """Tokens that the run predicts."""
        return self.steps * self.tokens_per_step

    def __init__(self, settings: Any, output: Path) -> None:
        self.settings, self.output = settings, output
        self.on_cpu = uses_cpu(settings.device, settings.precision)
        self.checkpoints = Checkpoints(output / "checkpoints", self.add_files)

    @abstractmethod
    def open(self) -> None:
        """Opens the folder, and sets the number of steps; refuses a folder of another run."""

    @abstractmethod
    def trainer(self, callbacks: list[TrainerCallback]) -> RunTrainer:
        """The Trainer of a model before its first step."""

    @abstractmethod
    def schedule(self, steps: int) -> float:
        """The learning rate after so many steps, as a share of the optimizer's."""

    @abstractmethod
    def watchers(self, bar: ProgressBar) -> list[TrainerCallback]:
        """The callbacks of this kind of run, beside those of all runs."""

    @abstractmethod
    def add_files(self, folder: Path) -> None:
        """Adds to the Trainer's files of a model what else its folder holds."""

    @abstractmethod
    def losses(self, state: TrainerState) -> Record:
        """The metrics that this kind of run has beside those of all runs."""

    @cached_property
    def sharing(self) -> Sharing:
        """Which processes share a sequence; the first use joins them."""
        PartialState(cpu=self.on_cpu)
        return Sharing.by("train", self.settings.context_parallel)

    def is_finished(self) -> bool:
        return is_finished(self.output) and self.metrics.read(self.output).steps == self.steps

    def finish(
        self, progress: bool, callbacks: Sequence[TrainerCallback], num_kept: int = 0
    ) -> Any:
        """Trains what is left to train, keeps so many checkpoints, and returns the metrics."""
        with hold_run_folder(self.output, "train"), no_bars():
            self.open()
            if not self.is_finished():
                self._train(progress, callbacks)
            # Of a finished run, too: it may have been killed here.
            self.checkpoints.delete(all_but=num_kept)
            wait_for_all()
        return self.metrics.read(self.output)

    def arguments(self, **own: Any) -> TrainingArguments:
        """The Trainer's arguments: those that all runs share, and this run's own."""
        settings = self.settings
        return TrainingArguments(
            output_dir=str(self.checkpoints.folder),
            max_steps=self.steps,
            learning_rate=settings.learning_rate,
            max_grad_norm=settings.clip,
            seed=settings.seed,
            save_steps=settings.save_steps,
            bf16=settings.precision == "bf16",
            fp16=settings.precision == "fp16",
            use_cpu=self.on_cpu,
            logging_nan_inf_filter=False,  # it would hide a diverging loss, and wait for each step
            disable_tqdm=True,  # `ProgressBar` replaces it
            report_to="none",
            train_sampling_strategy="sequential",  # the data sets have an order of their own
            remove_unused_columns=False,
            dataloader_pin_memory=not self.on_cpu,
            ddp_find_unused_parameters=False,
            fsdp=settings.fsdp is not None,
            fsdp_config=None if settings.fsdp is None else dict(settings.fsdp),
            **own,
        )

    def _train(self, progress: bool, callbacks: Sequence[TrainerCallback]) -> None:
        """Trains, from the newest complete checkpoint if there is one, and writes the metrics.
        Several processes end at Ctrl-C without saving: they would have to agree on the step.
        """
        bar = ProgressBar(self.tokens_per_step, visible=progress and is_main())
        watch, stop = StopWatch(), StopAfterStep(self.checkpoints, bar)
        history = LossHistory(self.output / "history.jsonl", self.tokens_per_step)
        own = [self.checkpoints, FiniteLoss(), history, bar, *self.watchers(bar), watch]
        trainer = self.trainer([*own, *callbacks, stop])
        trainer.remove_callback(PrinterCallback)
        newest = self.checkpoints.latest()
        try:
            with PeakMemory(trainer.args.device) as memory, closing(bar):
                with stop if trainer.args.world_size == 1 else nullcontext():
                    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
                if stop.asked is not None:
                    signal.raise_signal(stop.asked)
                    raise KeyboardInterrupt  # where that called a handler that returns
                self.publish_last(trainer)
        except KeyboardInterrupt as interrupt:
            if not self.checkpoints.exist():
                raise
            raise KeyboardInterrupt("The same command continues from here.") from interrupt
        except (OSError, RuntimeError, SafetensorError) as error:
            full = "No space left on the disk: " if _is_full(error, self.output) else ""
            if not (self.checkpoints.saving or full):
                raise
            left = (
                "the last complete checkpoint is intact, and the same call continues from there"
                if self.checkpoints.exist()
                else "no checkpoint was complete yet, and the same call starts again"
            )
            raise OSError(
                f"train: could not write to {self.output} ({full}{error}); {left}"
            ) from error
        if is_main():
            metrics = self.metrics(
                **self.losses(trainer.state),
                steps=self.steps,
                tokens=self.tokens,
                seconds=self.checkpoints.seconds,
                step_seconds=watch.step_seconds(),
                peak_memory_bytes=memory.peak_bytes,
                num_parameters=trainer.model.num_parameters(),
                num_processes=trainer.args.world_size,
            )
            write_json(self.output / "metrics.json", metrics.to_dict())

    def publish_last(self, trainer: Trainer) -> None:
        """Publishes the model after the last step."""
        self.publish(trainer)

    def publish(self, trainer: Trainer) -> None:
        """Puts the model's files in place; every process calls this, to gather sharded weights."""
        partial, saving = self.output / ".partial", self.checkpoints.saving
        self.checkpoints.saving = True
        trainer.save_model(str(partial))
        if is_main():
            (partial / "training_args.bin").unlink()  # a pickle that nobody needs
            self.add_files(partial)
            move_into_place(partial, self.output)
        self.checkpoints.saving = saving


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether a full disk made writing fail; PyTorch and safetensors may say it in other words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "os error 28" in str(error):
        return True
    if isinstance(error, RuntimeError) and not re.search(_WRITER, str(error)):
        return False
    return shutil.disk_usage(folder).free < _LITTLE
