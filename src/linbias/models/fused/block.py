"""Blocks of a prepacked model in one piece: their operations in a row, without the modules around them.

A layer's weights pass through the processor's caches for every token, and whatever Python runs before the next layer finds nothing
in them. Modules, and a check in each linear layer, took up to a tenth of a token's time. A block in one piece asks once whether its
modules are as `prepack` found them and nobody listens to them, and calls what they would call; else they run as ever.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused.bias import attend
from linbias.models.linear.layers import is_plain, prepacked_of, read_prepacked


@dataclass(frozen=True)
class Parts:
    """The names of a block's modules, and of modules in these.

        x = x + attention.dense(attend(attention.qkv(attention_norm(x))))
        x = x + feed_forward.down(gelu(feed_forward.up(feed_forward_norm(x))))

    `approximate` is the GELU's.
    """

    attention_norm: str
    attention: str
    qkv: str
    dense: str
    feed_forward_norm: str
    feed_forward: str
    up: str
    down: str
    approximate: Literal["none", "tanh"]


class _Block:
    """The modules of a block as they were found."""

    def __init__(self, block: Any, parts: Parts) -> None:
        self.attention = getattr(block, parts.attention)
        feed_forward = getattr(block, parts.feed_forward)
        self.norms = getattr(block, parts.attention_norm), getattr(block, parts.feed_forward_norm)
        self.layers = (
            *(getattr(self.attention, name) for name in (parts.qkv, parts.dense)),
            *(getattr(feed_forward, name) for name in (parts.up, parts.down)),
        )
        self.prepacked: list[Any] = [prepacked_of(layer) for layer in self.layers]
        self.approximate = parts.approximate
        self._found = [
            (parent._modules, name, module, type(module), vars(module).get("forward"))
            for parent in block.modules()
            for name, module in parent._modules.items()
            if module is not None
        ]

    def can_run(self) -> bool:
        """Whether its linear layers are prepacked, and of one type, and its norms PyTorch's."""
        return (
            None not in self.prepacked
            and len({layer.weight.dtype for layer in self.layers}) == 1
            and all(type(norm) is nn.LayerNorm for norm in self.norms)
        )

    def is_as_found(self) -> bool:
        """Whether the same modules are there, in evaluation mode, with the same forward, and without hooks."""
        for modules, name, module, kind, forward in self._found:
            if (
                modules.get(name) is not module
                or type(module) is not kind
                or module.training
                or vars(module).get("forward") is not forward
                or module._forward_hooks
                or module._forward_pre_hooks
            ):
                return False
        return True

    def run(self, x: Tensor, layout: TokenLayout, cache: Any) -> Tensor | None:
        """What the block makes of x [B, T, hidden size]; None, and nothing has changed, where its modules have to run."""
        weights: list[Any] = [
            prepacked.of(layer._parameters.get("weight"))
            for prepacked, layer in zip(self.prepacked, self.layers, strict=True)
        ]
        if any(weight is None for weight in weights):
            return None
        biases = [layer._parameters.get("bias") for layer in self.layers]
        qkv, dense, up, down = zip(weights, biases, strict=True)
        q, k, v = self.attention.split(read_prepacked(_normed(self.norms[0], x), *qkv))
        gathered, _ = attend(self.attention, q, k, v, layout, cache, dropout=0.0)
        x = read_prepacked(gathered, *dense).add_(x)
        inner = read_prepacked(_normed(self.norms[1], x), *up, "gelu", self.approximate)
        return read_prepacked(inner, *down).add_(x)


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    return torch.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def run_in_one_piece(block: nn.Module, parts: Parts) -> None:
    """Let a block whose linear layers are prepacked run so; others stay as they are."""
    found = _Block(block, parts)
    if found.can_run() and "_old_forward" not in vars(block):  # what the hooks of accelerate call
        vars(block)["forward"] = partial(_forward, block, found)


def run_modules(model: nn.Module) -> None:
    """Undo `run_in_one_piece`."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del vars(module)["forward"]


def _forward(block: Any, found: _Block, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """That of the block's class: the new residual stream [B, T, hidden size], and the weights of attention, if asked for."""
    layout, layer = kwargs.get("attention_mask"), found.layers[0]
    if (
        is_plain(hidden_states, layer._parameters.get("weight"), layer._parameters.get("bias"))
        and isinstance(layout, TokenLayout)
        and not (layout.need_weights or kwargs.get("output_attentions") or block.training)
        and not _has_any_global_hook()
        and found.is_as_found()
    ):
        out = found.run(hidden_states, layout, kwargs.get("layer_past"))
        if out is not None:
            return out, None
    return type(block).forward(block, hidden_states, *args, **kwargs)
