"""What `torch.func` and forward mode ask of a custom operator beyond its derivative.

PyTorch gives a custom operator a derivative that `torch.func.grad` refuses, and whose forward-mode
tangents are silently none: where a transform is active, an `autograd.Function` around it runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def active() -> bool:
    """Whether a transform of `torch.func` that asks for a rule, or forward mode, is running."""
    if not torch._C._are_functorch_transforms_active():
        return forward_mode()
    if torch.compiler.is_compiling():  # which knows none without a rule
        return True
    kinds = [layer.key() for layer in torch._C._functorch.get_interpreter_stack()]
    return any(kind != torch._C._functorch.TransformType.Functionalize for kind in kinds)


def forward_mode() -> bool:
    """Whether tensors may carry tangents; inside further transforms a tensor cannot be asked."""
    return forward_ad._current_level >= 0


def function(
    operator: Callable[..., Any],
    names: Sequence[str],
    save: Callable[..., None],
    differentiate: Callable[..., Any],
    forward_mode: Callable[..., Any],
) -> Callable[..., Any]:
    """Make a function that PyTorch can transform of an operator with these arguments."""

    class Transformable(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            return tuple(operator(*arguments))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return differentiate(ctx, *gradients)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return forward_mode(ctx, *tangents)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
            return vmap_rule(Transformable.apply, names)(info, in_dims, *arguments)

    return Transformable.apply


def vmap_rule(operator: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The rule of `torch.func.vmap` for an operator: the mapped axis becomes part of B.

    With dropout, whose mask counts B, the operator runs once per element.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        given = dict(zip(names, arguments, strict=True))
        axes = dict(zip(names, in_dims, strict=True))
        size = info.batch_size
        if given["seed"] is not None:
            runs = [operator(*_element(i, arguments, in_dims)) for i in range(size)]
            results = tuple(torch.stack(parts) for parts in zip(*runs, strict=True))
            return results, (0,) * len(results)
        q, axis = given["q"], axes["q"]
        B = q.shape[0] if axis is None else q.movedim(axis, 0).shape[1]
        folded = [_fold(name, x, axes[name], size, B) for name, x in given.items()]
        results = tuple(x.unflatten(0, (size, B)) for x in operator(*folded))
        return results, (0,) * len(results)

    return rule


def _element(i: int, arguments: Sequence[Any], in_dims: Sequence[int | None]) -> list[Any]:
    return [x if d is None else x.select(d, i) for x, d in zip(arguments, in_dims, strict=True)]


def _fold(name: str, x: Any, axis: int | None, size: int, B: int) -> Any:
    """An argument of all elements: [B, ...] or [size, B, ...] -> [size * B, ...]."""
    if not isinstance(x, Tensor):
        return x
    if axis is not None:
        x = x.movedim(axis, 0)
    if name in ("left", "right") and x.dim() - (axis is not None) == 1:
        if axis is None:
            return x  # [H]: the same for all
        x = x[:, None].expand(size, B, -1)
    elif axis is None:
        x = x.expand(size, *x.shape)
    return x.flatten(0, 1)
