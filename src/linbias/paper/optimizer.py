"""Nesterov's accelerated gradient and the cosine schedule, as the paper's code defines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class NAG(Optimizer):
    """Nesterov's accelerated gradient, with a momentum that carries the learning rate.

    With gradient g, momentum m in [0, 1) and r = lr / the lr of the step before:

        p <- p + m^2 r v - (1 + m) lr g
        v <-     m   r v -         lr g

    r rescales the past steps when lr changes, which makes this, in exact arithmetic, the same as
    `torch.optim.SGD(nesterov=True)`, whose buffer is -v / lr. Rounding and state are the
    original's.

    v starts at 0; r is lr itself after a step with lr = 0. Parameters without a gradient are left
    alone. Each step first shrinks p by the factor 1 - lr * weight_decay. `Recipe` checks the
    numbers.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = NAG([p], lr=0.5, momentum=0.9)
        >>> p.grad = torch.tensor([1.0])
        >>> optimizer.step()
        >>> round(p.item(), 4), optimizer.state[p]["momentum_buffer"].item()
        (0.05, -0.5)

    Source: the paper's code; Bengio, Boulanger-Lewandowski and Pascanu, arXiv 1212.0901, section
    3.5.
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
    """The learning rate after n steps: linear warmup, then cosines that restart.

        n < warmup:     init + n (lr - init) / warmup
        t of T steps:   low + (high - low) (1 + cos(pi t / T)) / 2

    Period i = 0, 1, ... has T = period * t_mult^i, high = lr * shrink^i, low = min_lr * shrink^i.
    Step number k uses the value after k - 1 steps. The last value of a period is a little above
    `low`, as the next period begins at its end. `Recipe` checks the numbers.

    Example:
        >>> flags = dict(init=1e-7, lr=1.0, warmup=16000, period=270000, min_lr=1e-4)
        >>> [round(cosine_lr(n, **flags), 5) for n in (0, 8000, 16000, 151000, 285999)]
        [0.0, 0.5, 1.0, 0.50005, 0.0001]

    Source: Loshchilov and Hutter, arXiv 1608.03983; the constants are those of the paper's code.
    """
    if n < warmup:
        return init + n * ((lr - init) / warmup)
    t, height = float(n - warmup), 1.0
    while t >= period:
        t, period, height = t - period, period * t_mult, height * shrink
    low, high = min_lr * height, lr * height
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * t / period))
