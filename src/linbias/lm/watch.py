"""Callbacks that watch the Trainer work: progress, the history of the loss, a stop watch."""

import math
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from linbias._run.files import JsonLog, Record
from linbias._run.progress import new_bar


class StopWatch(TrainerCallback):
    """Keeps the times at which steps ended; `exact` waits for an accelerator, whose steps end else
    when they are given to it, at the same pace once its queue is full.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.times: list[float] = []
        self.exact = exact

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.exact and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())

    def step_seconds(self, after: int = 1) -> float | None:
        """The median time of a step, without the first `after`; None where there is no other."""
        steps = [end - start for start, end in pairwise(self.times[after - 1 :])]
        return statistics.median(steps) if steps else None


class FiniteLoss(TrainerCallback):
    """Ends a run whose loss is no longer a finite number."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Record, **_: Any) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise ValueError(
                f"train: loss must stay finite, got {logs['loss']} near step {state.global_step} "
                f"(a smaller learning_rate than {args.learning_rate} may help)"
            )


class LossHistory(TrainerCallback):
    """Keeps what the Trainer logs, a line of JSON for each log, up to the checkpoint that a run
    goes on from; the pace is without validations and saving.
    """

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens_per_step = path, tokens_per_step
        self._start: tuple[int, float] | None = None  # step and time of the line before
        self._line: Record = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._log = JsonLog(self.path)
            kept = [line for line in self._log.records if line["step"] <= state.global_step]
            if len(kept) < len(self._log.records):
                self._log.restart(kept)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._start is None:
            self._start = state.global_step, time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        is_last = state.global_step == state.max_steps
        control.should_log |= control.should_evaluate or is_last

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Record, **_: Any) -> None:
        if "loss" in logs and self._start is not None:
            first_step, start_time = self._start
            norm = logs["grad_norm"]
            tokens = (state.global_step - first_step) * self.tokens_per_step
            self._line = {
                "step": state.global_step,
                "loss": logs["loss"],
                "validation_loss": None,
                "grad_norm": norm if math.isfinite(norm) else None,  # float16 overflowed: no step
                "learning_rate": logs["learning_rate"],
                "tokens_per_second": round(tokens / (time.perf_counter() - start_time), 1),
            }
            self._start = None
            if not control.should_evaluate:  # otherwise the line waits for the validation
                self._append(state)
        elif "eval_loss" in logs:
            loss = logs["eval_loss"]
            self._line["validation_loss"] = loss if math.isfinite(loss) else None
            self._append(state)

    def _append(self, state: TrainerState) -> None:
        if state.is_world_process_zero:
            self._log.append(self._line)


class ProgressBar(TrainerCallback):
    """Shows progress on standard error, until it is closed."""

    def __init__(self, tokens_per_step: int, visible: bool) -> None:
        look = {"unit": " tokens", "unit_scale": tokens_per_step}
        self._bar = new_bar("training", visible=visible, **look)
        self._losses: dict[str, str] = {}

    def say(self, text: str) -> None:
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._bar.initial = state.global_step
        self._bar.reset(state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Record, **_: Any) -> None:
        names = {"loss": "loss", "eval_loss": "validation"}
        found = {names[key]: f"{logs[key]:.3f} nats" for key in names.keys() & logs.keys()}
        self._losses |= found
        self._bar.set_postfix(self._losses, refresh=False)


class FollowSchedule(TrainerCallback):
    """Starts an extended run with the rate of its own schedule, not the one that it ended with."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        optimizer: Any,
        lr_scheduler: Any,
        **_: Any,
    ) -> None:
        before = lr_scheduler.get_last_lr()
        parts = zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
        rates = [base * factor(lr_scheduler.last_epoch) for base, factor in parts]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        lr_scheduler._last_lr = rates
        if rates != before:
            self.bar.say(
                f"training: extended to {state.max_steps:,} steps after {state.global_step:,}, "
                f"the learning rate goes from {before[0]:.3g} to {rates[0]:.3g} and then down"
            )
