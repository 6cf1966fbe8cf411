"""What every training run on Transformers' Trainer does alike.

uses_cpu            where to compute
PiecesTrainer       a Trainer whose processes may share sequences
StopAfterStep       what Ctrl-C and SIGTERM do to a training
trainer_arguments   the Trainer's arguments
run_trainer         train, from the newest complete checkpoint if there is one
publish             write the model aside, then move its files into place
TrainingMetrics     what a finished run measured, as metrics.json keeps it
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from linbias._run.files import Record, move_into_place, read_json, write_json
from linbias._run.processes import is_main
from linbias.lm.checkpoints import Checkpoints
from linbias.lm.memory import PeakMemory
from linbias.lm.watch import ProgressBar
from linbias.models.prepacked import keep_freed_memory
from linbias.torch import context_parallel

_WRITER = "inline_container|PytorchStreamWriter"  # in each error of PyTorch's writer
_LITTLE = 2**20  # bytes: a disk with less is full to whoever writes a model


@dataclass(frozen=True, kw_only=True)
class TrainingMetrics:
    """What a finished run measured; its metrics.json, which marks the run as finished.

    Attributes:
        steps: Updates of the weights.
        tokens: Tokens that were read, over all steps and processes.
        seconds: Training time of all sessions.
        step_seconds: Median time of a step of the last session: start-up, validations and saving are
            not in it. None where that session had one step or none.
        peak_memory_bytes: Highest memory of the first process in the last session.
        num_parameters: Parameters of the model.
        num_processes: Processes that trained it.
    """

    steps: int
    tokens: int
    seconds: float
    step_seconds: float | None = None
    peak_memory_bytes: int
    num_parameters: int
    num_processes: int

    @property
    def tokens_per_second(self) -> float:
        """The pace of a median step; the mean over all of the training time where there is none."""
        return self.tokens / (
            self.steps * self.step_seconds if self.step_seconds else self.seconds
        )

    def to_dict(self) -> Record:
        """All that is known, as JSON values."""
        values = {**asdict(self), "tokens_per_second": self.tokens_per_second}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, record: Record) -> Self:
        """The reverse of `to_dict`; entries that are no fields are ignored."""
        names = {f.name for f in fields(cls)} & set(record)
        return cls(**{name: record[name] for name in names})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the metrics.json of a run's folder.

        Raises:
            ValueError: There is none, or it is damaged.
        """
        path = folder / "metrics.json"
        try:
            return cls.from_dict(read_json(path, "train"))
        except TypeError as error:  # a field is missing
            raise ValueError(f"train: {path} is damaged ({error})") from error

    def write(self, folder: Path) -> None:
        """Writes the metrics.json of a run's folder."""
        write_json(folder / "metrics.json", self.to_dict())


class PiecesTrainer(Trainer):
    """The Trainer, for processes that may share sequences.

    Args:
        pieces: The processes that share each sequence, of which the data sets give a piece to each; None where each
            process reads whole ones.
        arguments, options: Those of the Trainer.
    """

    def __init__(self, *arguments: Any, pieces: ProcessGroup | None, **options: Any) -> None:
        self.pieces = pieces
        super().__init__(*arguments, **options)

    def in_pieces(self) -> AbstractContextManager[None]:
        """Within the block the model reads its piece of each sequence."""
        return nullcontext() if self.pieces is None else context_parallel.use(self.pieces)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Forward and backward of a batch; the first one after a checkpoint that lies between two logs adds to its losses."""
        with self.in_pieces():
            loss = super().training_step(*arguments, **options)
        history = self.state.log_history
        if history and "unlogged" in history[0]:
            before = history.pop(0)
            self._globalstep_last_logged = before["since"]
            loss = loss + before["unlogged"]
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Keep the losses since the last log in a checkpoint that lies between two, which the Trainer would forget."""
        if self.control.should_save and not self.control.should_log:
            unlogged = {"unlogged": tr_loss.item(), "since": self._globalstep_last_logged}
            self.state.log_history.insert(0, unlogged)
        super()._maybe_log_save_evaluate(tr_loss, *arguments, **options)

    def prediction_step(self, *arguments: Any, **options: Any) -> Any:
        """Forward of a batch of a validation."""
        with self.in_pieces():
            return super().prediction_step(*arguments, **options)


class StopAfterStep(TrainerCallback):
    """Within the block, Ctrl-C and SIGTERM end a training after the step, with a checkpoint; the second one ends it at once.

    Signals that the process ignores stay ignored.

    Args:
        checkpoints: Those of the run.
        bar: Says what happens.

    Attributes:
        asked: The signal that came, for whoever called the Trainer to raise again.
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
        self.bar.console.print("Stopping after this step, with a checkpoint; once more: at once.")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.asked is not None:
            control.should_save = control.should_training_stop = self.checkpoints.saving = True


def is_finished(folder: Path) -> bool:
    """Whether a run's folder holds metrics and a model."""
    return (folder / "metrics.json").exists() and any(folder.glob("*.safetensors"))


def uses_cpu(device: str, precision: str) -> bool:
    """Whether to train on the CPU: by choice, or because there is no accelerator.

    Args:
        device: "auto" or "cpu".
        precision: "fp32", "bf16" or "fp16".

    Raises:
        ValueError: The precision is "fp16", which CPUs do not train in.
    """
    if device == "auto" and torch.accelerator.is_available():
        return False
    if precision == "fp16":
        raise ValueError(
            "train: precision 'fp16' must have a GPU, got a CPU (which has 'fp32' and 'bf16')"
        )
    return True


def trainer_arguments(
    folder: Path,
    *,
    device: str,
    precision: str,
    fsdp: dict[str, Any] | None,
    **others: Any,
) -> TrainingArguments:
    """The Trainer's arguments: those that all runs share, and the run's own.

    Args:
        folder: For the checkpoints.
        device: "auto" or "cpu".
        precision: "fp32", "bf16" or "fp16", of matrix products.
        fsdp: Transformers' `fsdp_config`, or None to keep the model whole.
        others: By the Trainer's names.
    """
    on_cpu = uses_cpu(device, precision)
    return TrainingArguments(
        output_dir=str(folder),
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=on_cpu,
        logging_nan_inf_filter=False,  # the filter would hide a diverging loss, and wait for each step
        disable_tqdm=True,  # `ProgressBar` replaces it
        report_to="none",
        train_sampling_strategy="sequential",  # the data sets have an order of their own
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        fsdp=fsdp is not None,
        fsdp_config=None if fsdp is None else dict(fsdp),
        **others,
    )


def run_trainer(
    trainer: Trainer,
    checkpoints: Checkpoints,
    bar: ProgressBar,
    output: Path,
    *,
    at_the_end: Callable[[], None],
) -> int:
    """Trains, from the newest complete checkpoint if there is one, and returns the peak memory.

    Args:
        trainer: Has `checkpoints` and `bar` among its callbacks.
        checkpoints: Those of the run.
        bar: Shown meanwhile.
        output: The run's folder, for the error.
        at_the_end: Called after the last step; saves what is left to save.

    Returns:
        Bytes.

    Raises:
        OSError: A checkpoint or the model could not be written (disk full).
        KeyboardInterrupt: As it came; with a message where there is a checkpoint to go on from. One process saves its step
            before; several end as they are, since they would have to agree on the step.
    """
    newest = checkpoints.latest()
    trainer.remove_callback(PrinterCallback)
    stop = StopAfterStep(checkpoints, bar)
    trainer.add_callback(stop)
    keep_freed_memory()
    try:
        with PeakMemory(trainer.args.device) as memory, bar:
            with stop if trainer.args.world_size == 1 else nullcontext():
                trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            if stop.asked is not None:
                signal.raise_signal(stop.asked)
                raise KeyboardInterrupt  # where that called a handler that returns
            at_the_end()
    except KeyboardInterrupt as interrupt:
        if not checkpoints.exist():
            raise
        raise KeyboardInterrupt("The same command continues from here.") from interrupt
    except (OSError, RuntimeError, SafetensorError) as error:
        is_full = _is_full(error, output)
        if not (checkpoints.saving or is_full):
            raise
        full = "No space left on the disk: " if is_full else ""
        left = (
            "the last complete checkpoint is intact, and the same call continues from there"
            if checkpoints.exist()
            else "no checkpoint was complete yet, and the same call starts again"
        )
        raise OSError(f"train: could not write to {output} ({full}{error}); {left}") from error
    return memory.peak_bytes


def _is_full(error: BaseException, folder: Path) -> bool:
    """Whether a disk that is full made writing fail; PyTorch and safetensors say so in words of their own, or not."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "os error 28" in str(error):
        return True
    if isinstance(error, RuntimeError) and not re.search(_WRITER, str(error)):
        return False
    return shutil.disk_usage(folder).free < _LITTLE


def publish(
    trainer: Trainer,
    checkpoints: Checkpoints,
    output: Path,
    add_files: Callable[[Path], object],
) -> None:
    """Writes the model into a hidden folder, then moves its files into place.

    Args:
        trainer: Whose model to save. Every process calls this: sharded weights are gathered.
        checkpoints: Those of the run; an error in here is marked as one of saving.
        output: The run's folder.
        add_files: Called by the first process with a folder, to add files to the model's.
    """
    partial, saving = output / ".partial", checkpoints.saving
    checkpoints.saving = True
    trainer.save_model(str(partial))
    if is_main():
        (partial / "training_args.bin").unlink()  # a pickle that nobody needs
        add_files(partial)
        move_into_place(partial, output)
    checkpoints.saving = saving
