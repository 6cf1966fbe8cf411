"""One step of the paper's recipe: optimizer, loss, validation and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from linbias.lm.loop import RunTrainer


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


class PaperTrainer(RunTrainer):
    """The Trainer with the paper's optimizer, loss and validation."""

    loss_is_scaled_for_ga = True  # `compute_loss` returns a share of the step's mean loss

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """NAG on all parameters; its learning rate of 1 is multiplied by the schedule."""
        parameters = (self.model if model is None else model).parameters()
        momentum, decay = self.run.settings.momentum, self.run.settings.weight_decay
        self.optimizer = NAG(parameters, lr=1.0, momentum=momentum, weight_decay=decay)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        """A batch's share of the mean loss over all tokens of the step, of all processes."""
        loss: Tensor = model(**inputs, use_cache=False).loss
        return loss * self.accelerator.num_processes  # over which the Trainer averages gradients

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: Iterable[dict[str, Any]], *_: Any, **__: Any
    ) -> EvalLoopOutput:
        """The training loss of the validation text, without dropout; the best model so far is
        published.
        """
        self.model.eval()
        total, count = 0.0, 0
        for inputs in dataloader:
            with self.in_shards():
                loss = self.model(**self._prepare_inputs(inputs), use_cache=False).loss
            total += loss.item() * inputs["num_items_in_batch"]
            count += inputs["num_items_in_batch"]
        mean = sum(gather_object([total])) / count
        earlier = [entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry]
        if mean < min(earlier, default=math.inf):
            self.run.publish(self)
        return EvalLoopOutput(None, None, {"eval_loss": mean}, count)


class SeedEachStep(TrainerCallback):
    """Seeds PyTorch with seed + steps done, as the original does; each shard draws its own."""

    def __init__(self, seed: int, shard: int = 0) -> None:
        self.seed = seed + (shard << 22)  # PyTorch's generator of the CPU takes 32 bits of a seed

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        torch.manual_seed(self.seed + state.global_step)
