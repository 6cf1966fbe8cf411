"""Callbacks that watch the Trainer work: a progress bar, a check of the loss, and a stop watch."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopWatch(TrainerCallback):
    """Keeps the time at which each step ended, in seconds, in `times`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())


class FiniteLoss(TrainerCallback):
    """Ends a run whose loss is no longer a finite number."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise ValueError(
                f"train: loss must stay finite, got {logs['loss']} near step {state.global_step} "
                f"(a smaller learning_rate than {args.learning_rate} may help)"
            )


class ProgressBar(TrainerCallback):
    """Shows the steps done, the loss, the speed and the time left on standard error.

    Args:
        tokens_per_step: Tokens that a step predicts; the mean, where steps differ.
        visible: Whether to show anything.

    Attributes:
        bar: The bar, to be entered as a context while the Trainer works.
    """

    def __init__(self, tokens_per_step: int, visible: bool) -> None:
        self.tokens_per_step = tokens_per_step
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not visible,
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        done = state.global_step
        self.task = self.bar.add_task(
            "training", total=state.max_steps, completed=done, loss=math.nan, speed=math.nan
        )
        self._first_step, self._start_time = done, time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        steps = state.global_step - self._first_step
        speed = steps * self.tokens_per_step / (time.perf_counter() - self._start_time)
        self.bar.update(self.task, completed=state.global_step, speed=speed)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.bar.update(self.task, loss=logs["loss"])
