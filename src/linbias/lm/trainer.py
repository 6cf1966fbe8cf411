"""Transformers' Trainer with the weight decay, the schedule and the validations of our language models."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.trainer_utils import EvalLoopOutput

from linbias.lm.loop import PiecesTrainer
from linbias.lm.validate import Validation


class LanguageModelTrainer(PiecesTrainer):
    """The Trainer, changed so that validations do not affect the training and only matrices decay.

    Args:
        learning_rate_floor: Share of its peak below which the rate does not go after the warmup.
        validation: What a validation measures instead of the loss alone; None leaves it at that.
    """

    def __init__(
        self,
        *arguments: Any,
        learning_rate_floor: float,
        validation: Validation | None,
        **options: Any,
    ) -> None:
        self.learning_rate_floor, self.validation = learning_rate_floor, validation
        super().__init__(*arguments, **options)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """The Trainer's schedule, which stops falling at the floor, if there is one."""
        if self.learning_rate_floor and getattr(self, "lr_scheduler", None) is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            factor = partial(_share_of_peak, warmup, num_training_steps, self.learning_rate_floor)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The names of the weights that decay: all matrices but the table of token embeddings.

        Learned slopes are vectors and do not decay, which would pull them towards 1. The table
        decays only where it also computes the output: otherwise the row of a rare token, which
        gets no gradient at most steps, would do nothing but shrink.
        """
        names = super().get_decay_parameter_names(model)
        spared = {name for name, weight in model.named_parameters() if weight.ndim < 2}
        if not model.config.tie_word_embeddings:
            table = model.get_input_embeddings().weight
            spared |= {name for name, weight in model.named_parameters() if weight is table}
        return [name for name in names if name not in spared]

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Put the random numbers back that the Trainer draws for the order of its data."""
        with torch.random.fork_rng():
            return super().evaluate(*arguments, **options)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> EvalLoopOutput:
        """Run the run's own `Validation` if there is one, and the Trainer's loop otherwise."""
        if self.validation is None:
            return super().evaluation_loop(*arguments, **options)
        measured = self.validation.measure(self.model, options["metric_key_prefix"])
        return EvalLoopOutput(None, None, measured, len(self.validation.ids) - 1)


def _share_of_peak(warmup: int, steps: int, floor: float, step: int) -> float:
    """The share of its peak that the learning rate has at a step."""
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return max(floor, 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
