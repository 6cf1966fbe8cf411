"""One step of the paper's recipe: optimizer, schedule, loss, and what is logged of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState

from linbias._run.files import Record
from linbias.lm.loop import PiecesTrainer
from linbias.lm.watch import Log
from linbias.paper.recipe import Recipe


class NAG(Optimizer):
    """Nesterov's accelerated gradient (arXiv 1212.0901), rounded as by the original, with r = lr /
    the lr before:   p <- p + m^2 r v - (1 + m) lr g,   v <- m r v - lr g.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1.0,
        momentum: float = 0.99,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "lr_old": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step; `closure`, a part of PyTorch's interface, computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
            group["lr_old"] = group["lr"]
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        rescale = lr / group["lr_old"] if group["lr_old"] > 0 else lr
        state, gradient = self.state[p], p.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        v = state["momentum_buffer"]
        if group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        p.add_(v, alpha=momentum**2 * rescale).add_(gradient, alpha=-(1 + momentum) * lr)
        v.mul_(momentum * rescale).add_(gradient, alpha=-lr)


def cosine_lr(
    n: int,
    *,
    init: float,
    lr: float,
    warmup: int,
    period: float,
    min_lr: float,
    t_mult: float = 1.0,
    shrink: float = 1.0,
) -> float:
    """The learning rate after n steps: linear warmup, then cosines that restart, each longer by
    the factor `t_mult` and lower by `shrink` (arXiv 1608.03983).
    """
    if n < warmup:
        return init + n * ((lr - init) / warmup)
    t, height = float(n - warmup), 1.0
    while t >= period:
        t, period, height = t - period, period * t_mult, height * shrink
    low, high = min_lr * height, lr * height
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * t / period))


class PaperTrainer(PiecesTrainer):
    """The Trainer with the paper's optimizer, schedule, loss and validation; every process calls
    `publish` when the model is the best so far.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` returns a share of the step's mean loss
    control: TrainerControl

    def __init__(
        self, recipe: Recipe, publish: Callable[[PaperTrainer], None], **arguments: Any
    ) -> None:
        super().__init__(data_collator=lambda batches: batches[0], **arguments)
        self.recipe, self.publish = recipe, publish

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """NAG on all parameters; its learning rate of 1 is multiplied by the schedule."""
        parameters = (self.model if model is None else model).parameters()
        momentum, decay = self.recipe.momentum, self.recipe.weight_decay
        self.optimizer = NAG(parameters, lr=1.0, momentum=momentum, weight_decay=decay)
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
        """A batch's share of the mean loss over all tokens of the step, of all processes."""
        loss: Tensor = model(**inputs, use_cache=False).loss
        return loss * self.accelerator.num_processes  # over which the Trainer averages gradients

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Logs and returns the training loss of the validation text, without dropout."""
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
    """Seeds PyTorch with seed + steps done, as the original does; each piece draws its own."""

    def __init__(self, seed: int, piece: int = 0) -> None:
        self.seed = seed + (piece << 22)  # PyTorch's generator of the CPU takes 32 bits of a seed

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        torch.manual_seed(self.seed + state.global_step)


class LogFile(Log):
    """Writes log.jsonl, with the columns that the original logs."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Record, **_: Any) -> None:
        if "loss" in logs:
            norm = logs["grad_norm"]
            line = in_bits(logs["loss"]) | {
                "gnorm": norm if math.isfinite(norm) else None,  # float16 overflowed: no step
                "lr": logs["learning_rate"],
            }
            self.append(state, {"step": state.global_step, **line})
        elif "eval_loss" in logs:
            line = in_bits(logs["eval_loss"], "valid_")
            self.append(state, {"step": state.global_step, **line})


def in_bits(nats: float, prefix: str = "") -> Record:
    """A loss in bits, and 2 to the power of it or the largest power of two that is a float."""
    bits = nats / math.log(2)
    return {f"{prefix}loss_base2": bits, f"{prefix}ppl": 2.0 ** min(bits, 1023.0)}
