"""One step of the paper's recipe, in the terms of Transformers' Trainer: its loss, its update of the
weights, and what is logged of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from linbias._run.files import Record
from linbias.lm.loop import PiecesTrainer
from linbias.lm.watch import Log
from linbias.paper.optimizer import NAG, cosine_lr
from linbias.paper.recipe import Recipe


class PaperTrainer(PiecesTrainer):
    """The Trainer with the paper's optimizer, schedule, loss and validation.

    `publish` is called, by every process, when the model is the best so far.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` returns a share of the step's mean loss
    control: TrainerControl

    def __init__(
        self, recipe: Recipe, publish: Callable[[PaperTrainer], None], **arguments: Any
    ) -> None:
        super().__init__(data_collator=lambda batches: batches[0], **arguments)
        self.recipe, self.publish = recipe, publish

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """NAG on all parameters; its learning rate of 1 is multiplied by the schedule."""
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
                init=recipe.initial_learning_rate,
                lr=recipe.learning_rate,
                warmup=recipe.warmup_steps,
                period=recipe.cosine_period,
                min_lr=recipe.min_learning_rate,
                t_mult=recipe.t_mult,
                shrink=recipe.shrink,
            ),
        )
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """A batch's share of the mean loss over all tokens of the step, of all processes.

        The Trainer averages gradients over the processes, but shares add up: hence the factor.
        """
        loss: Tensor = model(**inputs, use_cache=False).loss
        return loss * self.accelerator.num_processes

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measures, logs and returns the validation loss, and publishes the best model so far.

        The loss is the training loss without dropout, in nats per token.
        """
        self.model.eval()
        total, count = 0.0, 0
        for inputs in self.get_eval_dataloader():
            with self.in_pieces():
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
        """Logs the learning rate of the next step, as the original does."""
        if "learning_rate" in logs:
            logs["learning_rate"] = self._get_learning_rate()
        super().log(logs, start_time)


class SeedEachStep(TrainerCallback):
    """Seeds PyTorch with seed + steps done, in every process alike, as the original does.

    Where processes share sequences, the pieces of one draw different numbers.
    """

    def __init__(self, seed: int, piece: int = 0) -> None:
        self.seed = seed + (piece << 22)  # PyTorch's generator of the CPU takes 32 bits of a seed

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        torch.manual_seed(self.seed + state.global_step)


class LogFile(Log):
    """Writes log.jsonl, with the columns that the original logs."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Record, **_: Any) -> None:
        if "loss" in logs:
            loss, norm = logs["loss"] / math.log(2), logs["grad_norm"]
            line: Record = {
                "step": state.global_step,
                "loss_base2": loss,
                "ppl": perplexity(loss),
                "gnorm": norm if math.isfinite(norm) else None,  # float16 overflowed: no step
                "lr": logs["learning_rate"],
            }
            self.append(state, line)
        elif "eval_loss" in logs:
            loss = logs["eval_loss"] / math.log(2)
            line = {"valid_loss_base2": loss, "valid_ppl": perplexity(loss)}
            self.append(state, {"step": state.global_step, **line})


def perplexity(loss_base2: float) -> float:
    """2 to the power of a loss, or the largest power of two that is a float."""
    return 2.0 ** min(loss_base2, 1023.0)
