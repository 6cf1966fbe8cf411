"""A model whose attention layers are asked one by one what they make of hidden states."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from linbias.models.decoder.cache import CACHE, AttendingLayer
from linbias.models.decoder.decoder import SelfAttention
from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused.family import FusedAttention


class Answer(AttendingLayer):
    """Keeps the queries and keys that it is given, and answers with zeros."""

    q: Tensor
    k: Tensor
    slopes: Tensor
    scale: float

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        scale: float | None,
        layout: TokenLayout,
    ) -> Tensor:
        self.q, self.k, self.slopes = q, k, slopes
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        return q.new_zeros(*q.shape[:3], v.shape[-1])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make."""

    def get_seq_length(self) -> int:
        return 0


class _FirstLayer(Exception):
    """Ends a forward pass once the first layer's attention is called."""


class Questions:
    """A causal model; `calls` are those of its attention layers, `paths` lead there from norms."""

    def __init__(self, model: PreTrainedModel) -> None:
        if model.config.is_encoder_decoder:
            kind = type(model).__name__
            raise ValueError(f"reach_of_weights: model must be causal, got a {kind}")
        self.model = model
        count = int(model.config.get_text_config().num_hidden_layers)
        self.cache = Cache(layers=[Answer() for _ in range(count)])
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        made: list[
            tuple[nn.Module, Any, Any]
        ] = []  # a norm or linear layer, what it read, and made

        def call(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.append((module, args, kwargs))

        def make(module: nn.Module, args: Any, out: Any) -> None:
            made.append((module, args[0], out))

        hooks = []
        module: Any
        for module in model.modules():
            weight = getattr(module, "weight", None)
            is_norm = isinstance(weight, Tensor) and weight.ndim == 1
            is_attention = isinstance(module, SelfAttention | FusedAttention)
            if is_attention:
                hooks.append(module.register_forward_pre_hook(call, with_kwargs=True))
            elif isinstance(module, nn.Linear) or is_norm:
                hooks.append(module.register_forward_hook(make))
        self._run(torch.zeros(1, 1, dtype=torch.int64), hooks)
        if not self.calls:
            raise ValueError(
                "reach_of_weights: model must have linear biases and run on linbias, got a "
                f"{type(model).__name__} (linbias.models.load gives one)"
            )
        self.num_layers = len(self.calls)
        self.paths = [_path_from_norm(made, args[0]) for _, args, _ in self.calls]

    def first_call(self, ids: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the first layer is called for texts of ids [B, T]."""
        seen: list[Any] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.extend((args, kwargs))
            raise _FirstLayer

        self._run(ids, [self.calls[0][0].register_forward_pre_hook(stop, with_kwargs=True)])
        args, kwargs = seen
        return args, kwargs

    def ask(
        self,
        index: int,
        attention: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensor,
    ) -> Answer:
        """What a layer projects hidden states [1, T, n] to."""
        named = {name: _widened(x) for name, x in kwargs.items()}
        attention(hidden, *map(_widened, args[1:]), **named)
        return cast(Answer, self.cache.layers[index])

    def _run(self, ids: Tensor, hooks: list[Any]) -> None:
        """Let the model read ids, with hooks that are taken away."""
        was_training = self.model.training
        self.model.eval()
        try:
            self.model(ids.to(self.model.device), use_cache=True, **{CACHE: self.cache})
        except _FirstLayer:
            pass
        finally:
            self.model.train(was_training)
            for hook in hooks:
                hook.remove()


def _path_from_norm(
    made: list[tuple[nn.Module, Any, Any]], hidden: Tensor
) -> tuple[nn.Module, nn.Linear | None] | None:
    """The norm that made what attention reads, and the linear layer between, or None."""
    linear = None
    for module, given, out in reversed(made):
        if out is hidden:
            if not isinstance(module, nn.Linear):
                return module, linear
            if linear is not None:
                return None
            linear, hidden = module, given
    return None


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
