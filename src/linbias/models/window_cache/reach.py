"""The reach of each head of a model: how many keys it can need, whatever the text.

It follows from the weights of any model that runs on linbias, by asking it: where a layer's
attention reads the output of a norm, the norm's weights and the answers of the projections to the
unit vectors are all that `linbias.streams.largest_lead` wants. No family is known here.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from linbias.definition import Float64
from linbias.models.decoder.cache import CACHE, AttendingLayer
from linbias.models.decoder.decoder import SelfAttention
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.slopes import ModelSlopes
from linbias.models.fused.family import FusedAttention
from linbias.streams import largest_lead, window_of_lead

_MOST_TOKENS = 8192  # a vocabulary up to which the first layer is asked about every pair of tokens
_DEFAULT_TOLERANCE = 2.0**-24


@dataclass(frozen=True)
class Reach:
    """What the weights of a model say about its heads.

    Attributes:
        lead: [layers, H], nats: the most by which a key's score without bias leads the query's
            own; inf where the weights do not say.
        slopes: [layers, H].
        key_heads: [layers], how many key/value heads G each has.
        why_not: By layer, why its weights do not say.
    """

    lead: Float64
    slopes: Float64
    key_heads: list[int]
    why_not: dict[int, str]

    def of_heads(self, tolerance: float = _DEFAULT_TOLERANCE) -> Float64:
        """[layers, H]: so many of the nearest keys hold all but `tolerance` of every row's weight.

        It is inf for a slope of 0.
        """
        return window_of_lead(self.lead, self.slopes, tolerance=tolerance)


@torch.no_grad()
def reach_of_weights(model: PreTrainedModel) -> Reach:
    """Bound, for every text, how far each head of a causal model can look.

    In the first layer the inputs are known, one for each token of the vocabulary, and every pair
    is tried (up to 8,192 tokens). Behind, they are whatever a norm lets through.

    Args:
        model: With linear biases, as `linbias.models.load` gives it. Its weights are read in float64.

    Returns:
        The Reach. That of a layer that reads something else than a norm's output, or whose
        projections are not linear (clipped, for example), has no end, and `why_not` says so.

    Raises:
        ValueError: The model has no linear biases, or its slopes depend on the length of the text.

    Example:
        >>> from linbias.models.decoder.config import LinbiasConfig
        >>> from linbias.models.decoder.linbias import LinbiasForCausalLM
        >>> config = LinbiasConfig(vocab_size=99, hidden_size=32, num_attention_heads=2)
        >>> keys = reach_of_weights(LinbiasForCausalLM(config)).of_heads(2**-24)
        >>> keys.shape, bool((keys[:, 0] < keys[:, 1]).all())
        ((4, 2), True)
    """
    asked = _Questions(model)
    layers = [asked.layer(index) for index in range(asked.num_layers)]
    why_not = {index: layer.why_not for index, layer in enumerate(layers) if layer.why_not}
    lead = np.array([layer.leads() for layer in layers])
    vocabulary = asked.lead_over_vocabulary()
    if vocabulary is not None:
        lead[0] = np.minimum(lead[0], vocabulary)
        if np.isfinite(vocabulary).all():
            why_not.pop(0, None)
    slopes = np.array([layer.slopes for layer in layers])
    key_heads = [layer.key_heads for layer in layers]
    return Reach(lead=lead, slopes=slopes, key_heads=key_heads, why_not=why_not)


def refuse_slopes_that_follow_the_length(model: nn.Module, caller: str) -> None:
    """Raise a ValueError if the slopes of a model depend on the length of the text.

    Then no key is ever done with.
    """
    for module in model.modules():
        bias = getattr(module, "fused_bias", None)
        for slopes in (*vars(module).values(), bias and bias.slopes):
            if isinstance(slopes, ModelSlopes) and slopes.follows_length:
                raise ValueError(
                    f"{caller}: slope_scale of the model must not depend on the length of the "
                    "text, got 'interpolate'"
                )


@dataclass(frozen=True)
class _Layer:
    """The heads of one layer: q = F y + f and k = G z + g of normed inputs y and z."""

    slopes: list[float]
    key_heads: int
    scale: float
    why_not: str | None = None
    F: Float64 = field(default_factory=lambda: np.empty((0, 0, 0)))  # [H, D, n]
    f: Float64 = field(default_factory=lambda: np.empty((0, 0)))  # [H, D]
    G: Float64 = field(default_factory=lambda: np.empty((0, 0, 0)))  # [G, D, n]
    radius: float = 0.0
    centred: bool = False
    related: bool = True

    def leads(self) -> list[float]:
        """[H], from the weights."""
        if self.why_not:
            return [math.inf] * len(self.slopes)
        sharing = len(self.F) // len(self.G)
        norm: Any = {"radius": self.radius, "centred": self.centred, "related": self.related}
        return [
            largest_lead(F, self.G[head // sharing], f, scale=self.scale, **norm)
            for head, (F, f) in enumerate(zip(self.F, self.f, strict=True))
        ]


class _Answer(AttendingLayer):
    """Keeps the queries and keys that it is given, and answers with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.slopes = torch.empty(3, 0)
        self.scale = 1.0

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


class _Questions:
    """A model whose attention layers are asked one by one."""

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_slopes_that_follow_the_length(model, "reach_of_weights")
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"reach_of_weights: model must be causal, got a {type(model).__name__}"
            )
        self.model = model
        self.cache = Cache(layers=[_Answer() for _ in range(_num_layers(model))])
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        made: list[tuple[nn.Module, Any, Any]] = []
        with self._watched(made):
            self._run(torch.zeros(1, 1, dtype=torch.int64))
        if not self.calls:
            raise ValueError(
                "reach_of_weights: model must have linear biases and run on linbias, got a "
                f"{type(model).__name__} (linbias.models.load gives one)"
            )
        self.num_layers = len(self.calls)
        self.paths = [_path_from_norm(made, args[0]) for _, args, _ in self.calls]

    def layer(self, index: int) -> _Layer:
        """What the weights of a layer say."""
        module, args, kwargs = self.calls[index]
        path: Any = self.paths[index]
        attention = copy.deepcopy(module).double()
        norm, linear = path or (None, None)
        width = args[0].shape[-1] if linear is None else linear.in_features
        hidden = torch.cat([torch.zeros(1, width), torch.eye(width), _mixed(width)]).double()
        if linear is not None:
            hidden = copy.deepcopy(linear).double()(hidden)
        answer = self._ask(index, attention, args, kwargs, hidden[None])
        q, k = (x[0].movedim(0, -1).numpy() for x in (answer.q, answer.k))  # [T, D, heads]
        heads: Any = {
            "slopes": answer.slopes.double().tolist(),
            "key_heads": answer.k.shape[1],
            "scale": float(answer.scale),
        }
        if norm is None:
            reason = "its attention reads something else than a norm's output"
            return _Layer(**heads, why_not=reason)
        if hasattr(attention, "q_ln"):
            return _own_norms(attention, heads)
        f, F, G = q[0], q[1 : width + 1] - q[0], k[1 : width + 1] - k[0]
        mixed = _mixed(width)[0].double().numpy()
        for answers, weights in ((q, F), (k, G)):
            linear_answer = answers[0] + np.tensordot(mixed, weights, 1)
            if not np.allclose(answers[-1], linear_answer, rtol=1e-9, atol=1e-12):
                return _Layer(**heads, why_not="its projections are not linear")
        gain = norm.weight.detach().double().cpu().numpy()
        shift = getattr(norm, "bias", None)
        shift = np.zeros(width) if shift is None else shift.detach().double().cpu().numpy()
        return _Layer(
            **heads,
            F=(F * gain[:, None, None]).transpose(2, 1, 0),
            f=(f + np.tensordot(shift, F, 1)).T,
            G=(G * gain[:, None, None]).transpose(2, 1, 0),
            radius=math.sqrt(width),
            centred=_subtracts_the_mean(norm, width),
        )

    def lead_over_vocabulary(self) -> Float64 | None:
        """[H], of the first layer: the most over all pairs of tokens; None for too many tokens."""
        size = self.model.config.get_text_config().vocab_size
        size = getattr(self.model.get_input_embeddings(), "num_embeddings", size)
        if size > _MOST_TOKENS:
            return None
        module, _, _ = self.calls[0]
        found: list[Any] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.extend((args, kwargs))
            raise _FirstLayer

        handle = module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._run(torch.arange(size)[:, None])
        except _FirstLayer:
            pass
        finally:
            handle.remove()
        args, kwargs = found
        hidden = args[0].double().transpose(0, 1)  # as one text
        answer = self._ask(0, copy.deepcopy(module).double(), args, kwargs, hidden)
        q, k = answer.q[0] * answer.scale, answer.k[0]
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        scores = q @ k.mT  # [H, V, V]
        lead = scores.amax(-1) - scores.diagonal(dim1=1, dim2=2)
        return lead.amax(-1).numpy() * (1 + 1e-9)

    def _ask(
        self,
        index: int,
        attention: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hidden: Tensor,
    ) -> _Answer:
        """What a layer projects hidden states [1, T, n] to."""
        named = {name: _widened(x) for name, x in kwargs.items()}
        attention(hidden, *map(_widened, args[1:]), **named)
        return cast(_Answer, self.cache.layers[index])

    def _run(self, ids: Tensor) -> None:
        was_training = self.model.training
        self.model.eval()
        try:
            self.model(ids.to(self.model.device), use_cache=True, **{CACHE: self.cache})
        finally:
            self.model.train(was_training)

    @contextmanager
    def _watched(self, made: list[tuple[nn.Module, Any, Any]]) -> Iterator[None]:
        """Keeps the calls of attention, and what norms and linear layers make of what, while the model runs."""

        def call(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.append((module, args, kwargs))

        def make(module: nn.Module, args: Any, out: Any) -> None:
            made.append((module, args[0], out))

        handles = []
        module: Any
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            is_norm = isinstance(weight, Tensor) and weight.ndim == 1
            is_attention = isinstance(module, SelfAttention | FusedAttention)
            if is_attention:
                handles.append(module.register_forward_pre_hook(call, with_kwargs=True))
            elif isinstance(module, nn.Linear) or is_norm:
                handles.append(module.register_forward_hook(make))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _path_from_norm(
    made: list[tuple[nn.Module, Any, Any]], hidden: Tensor
) -> tuple[nn.Module, nn.Linear | None] | None:
    """The norm that made what attention reads, and the linear layer between, if there is one.

    None for anything else.
    """
    linear = None
    for module, given, out in reversed(made):
        if out is hidden:
            if not isinstance(module, nn.Linear):
                return module, linear
            if linear is not None:
                return None
            linear, hidden = module, given
    return None


def _own_norms(attention: Any, heads: dict[str, Any]) -> _Layer:
    """Heads whose queries and keys are normed, over all heads at once or over each."""

    def rows(norm: Any, heads: int) -> tuple[Float64, Float64]:
        """F [heads, D, width of the norm] and f [heads, D]."""
        width, size = norm.normalized_shape[0], attention.head_dim
        gain = torch.diag(norm.weight.detach()).cpu().numpy().reshape(-1, size, width)
        shift = torch.zeros(width) if norm.bias is None else norm.bias.detach()
        shift = shift.cpu().numpy().reshape(-1, size)
        return np.resize(gain, (heads, size, width)), np.resize(shift, (heads, size))

    F, f = rows(attention.q_ln, len(heads["slopes"]))
    K, _ = rows(attention.k_ln, heads["key_heads"])
    width = max(F.shape[2], K.shape[2])
    F, K = (np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]))) for x in (F, K))
    return _Layer(**heads, F=F, f=f, G=K, radius=math.sqrt(width), related=False)


def _subtracts_the_mean(norm: Any, width: int) -> bool:
    """Whether a norm does not see what all entries have in common."""
    weight = norm.weight.detach()
    x, near = _mixed(width).to(weight.device, weight.dtype), 1e-3 * float(weight.abs().max())
    return torch.allclose(norm(x), norm(x + 1), rtol=1e-3, atol=near)


def _mixed(width: int) -> Tensor:
    """[1, width]: an input that is no unit vector."""
    return torch.linspace(-1.0, 1.0, width)[None].sin().roll(1) * 3


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)
