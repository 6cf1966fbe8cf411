"""One update of the paper's recipe, in the terms of Transformers' Trainer: which tokens, which loss,
which step, and what is logged of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from linbias.data.batches import block_tokens, blocks
from linbias.data.dictionary import Dictionary
from linbias.paper.optimizer import NAG, cosine_lr
from linbias.paper.recipe import Recipe
from linbias.runs.checkpoints import write_whole


class Batches(Dataset[dict[str, Any]]):
    """All batches of a run, one after another: item i belongs to update i // per_update.

    Every pass over the text has an order of its own. The last update of a pass may lack batches;
    empty ones, a single target that is not scored, stand for them, so that every process has its
    share. To go on at update n is to read from place n * per_update.

    Args:
        ids: [N], the ids of a split.
        length: Tokens per block.
        order: The number of a pass, from 1, to its batches, each a list of block numbers. All
            passes have as many batches.
        per_update: Batches per update.
        updates: Updates of the run; None: those of one pass.

    Example:
        >>> ids = np.arange(4, 11, dtype=np.uint16)
        >>> batches = Batches(ids, 3, lambda number: [[0, 2], [1]], per_update=2)
        >>> batches[0]["input_ids"].tolist(), batches[0]["targets"].tolist()
        ([[2, 4, 5], [9, 1, 1]], [[4, 5, 6], [10, -100, -100]])
    """

    def __init__(
        self,
        ids: NDArray[Any],
        length: int,
        order: Callable[[int], list[list[int]]],
        *,
        per_update: int,
        updates: int | None = None,
    ) -> None:
        self.ids, self.spans, self.per_update = ids, blocks(len(ids), length), per_update
        self.order = lru_cache(maxsize=2)(order)
        self.updates_per_pass = math.ceil(len(order(1)) / per_update)
        self.updates = updates or self.updates_per_pass

    def __len__(self) -> int:
        return self.updates * self.per_update

    def __getitem__(self, place: int) -> dict[str, Any]:
        """A batch: input_ids and targets, int64 [rows, longest block], and the update's targets.

        Rows are padded on the right: <pad> is read there, and -100, which is not scored, predicted.
        """
        update, slot = divmod(place, self.per_update)
        batches = self._batches(update)
        batch = batches[slot] if slot < len(batches) else []
        rows = [block_tokens(self.ids, *self.spans[block]) for block in batch]
        shape = max(1, len(rows)), max((len(asked) for _, asked in rows), default=1)
        inputs, targets = np.full(shape, Dictionary.PAD), np.full(shape, -100)
        for row, (read, asked) in enumerate(rows):
            inputs[row, : len(read)], targets[row, : len(asked)] = read, asked
        return {
            "input_ids": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            "num_items_in_batch": self.num_targets(update),
        }

    def num_targets(self, update: int) -> int:
        """Tokens that an update predicts, over all its batches."""
        numbers = [block for batch in self._batches(update) for block in batch]
        return int(np.diff(self.spans[numbers]).sum())

    def num_tokens(self) -> int:
        """Tokens that the run predicts."""
        passes, rest = divmod(self.updates, self.updates_per_pass)
        first = self.updates - rest
        return passes * len(self.ids) + sum(map(self.num_targets, range(first, self.updates)))

    def _batches(self, update: int) -> list[list[int]]:
        number, place = divmod(update, self.updates_per_pass)
        first = place * self.per_update
        return self.order(number + 1)[first : first + self.per_update]


class PaperTrainer(Trainer):
    """The Trainer with the paper's optimizer, schedule, loss and validation.

    Args:
        recipe: What to train.
        publish: Called, by every process, when the model is the best so far.
        arguments: The Trainer's own.
    """

    loss_is_scaled_for_ga = True  # it is a share of the update's mean from the start
    control: TrainerControl

    def __init__(
        self, recipe: Recipe, publish: Callable[[PaperTrainer], None], **arguments: Any
    ) -> None:
        super().__init__(data_collator=lambda batches: batches[0], **arguments)
        self.recipe, self.publish = recipe, publish

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """NAG on all parameters; its learning rate 1 is the factor that the schedule multiplies."""
        recipe = self.recipe
        parameters = (self.model if model is None else model).parameters()
        self.optimizer = NAG(
            parameters, lr=1.0, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """The cosine schedule, which ends where the recipe says."""
        recipe = self.recipe
        self.lr_scheduler = LambdaLR(
            self.optimizer,
            lambda n: cosine_lr(
                n,
                init=recipe.warmup_init_lr,
                lr=recipe.lr,
                warmup=recipe.warmup,
                period=recipe.cosine_period,
                min_lr=recipe.min_lr,
                t_mult=recipe.t_mult,
                shrink=recipe.lr_shrink,
            ),
        )
        return self.lr_scheduler

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A batch's share of the mean over all tokens of the update, of whatever process.

        Gradients are averaged over the processes, but shares add up: hence the factor.
        """
        loss: Tensor = model(**inputs, use_cache=False).loss
        return loss * self.accelerator.num_processes

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measures, logs and returns the validation loss: nats per token, the training loss without
        dropout. A model that is better than all before it is published."""
        self.model.eval()
        total, count = 0.0, 0
        for inputs in self.get_eval_dataloader():
            loss = self.model(**self._prepare_inputs(inputs), use_cache=False).loss
            total += loss.item() * inputs["num_items_in_batch"]
            count += inputs["num_items_in_batch"]
        metrics = {"eval_loss": sum(gather_object([total])) / count}
        earlier = [entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry]
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        if metrics["eval_loss"] < min(earlier, default=math.inf):
            self.publish(self)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs the learning rate of the next update, as the original does."""
        if "learning_rate" in logs:
            logs["learning_rate"] = self._get_learning_rate()
        super().log(logs, start_time)


class SeedEachUpdate(TrainerCallback):
    """Seeds PyTorch with seed + updates done, in every process alike, as the original does."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        torch.manual_seed(self.seed + state.global_step)


class Log(TrainerCallback):
    """Writes log.jsonl in the original's words; a run that goes on first drops lines from beyond
    its checkpoint. The last update is always logged. For the callbacks of every process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        if state.is_world_process_zero:
            lines = [_line(entry, entry["step"]) for entry in state.log_history]
            write_whole(self.path, "".join(lines).encode())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        control.should_log |= state.global_step == state.max_steps

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(logs, state.global_step))


def _line(logs: dict[str, float], update: int) -> str:
    """A line of log.jsonl, or nothing for what else the Trainer logs."""
    if "loss" in logs:
        loss, norm = logs["loss"] / math.log(2), logs["grad_norm"]
        columns: dict[str, float | None] = {"loss_base2": loss, "ppl": perplexity(loss)}
        columns["gnorm"] = norm if math.isfinite(norm) else None  # float16 overflowed: no step
        columns["lr"] = logs["learning_rate"]
    elif "eval_loss" in logs:
        loss = logs["eval_loss"] / math.log(2)
        columns = {"valid_loss_base2": loss, "valid_ppl": perplexity(loss)}
    else:
        return ""
    return json.dumps({"update": update, **columns}) + "\n"


def perplexity(loss_base2: float) -> float:
    """2 to the power of a loss; a loss beyond any float counts as the largest that is not."""
    return 2.0 ** min(loss_base2, 1023.0)
