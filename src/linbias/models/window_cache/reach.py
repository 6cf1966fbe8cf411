"""The reach of each head of a model: how many keys it can need, whatever the text.

Where a layer's attention reads the output of a norm, the norm's weights and the answers of the
projections to the unit vectors are all that `linbias.streams.largest_lead` wants: no family is
known here.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linbias.definition import Float64
from linbias.models.decoder.slopes import ModelSlopes
from linbias.models.window_cache.questions import Questions
from linbias.near_to_far import reach
from linbias.streams import largest_lead

_MOST_TOKENS = 8192  # a vocabulary up to which the first layer is asked about every pair of tokens
_DEFAULT_TOLERANCE = 2.0**-24


@dataclass(frozen=True)
class Reach:
    """What the weights of a model say about its heads."""

    lead: (
        Float64  # [layers, H], nats: the most by which a key's score leads the query's own, or inf
    )
    slopes: Float64  # [layers, H]
    key_heads: list[int]  # [layers], how many key/value heads G each has
    why_not: dict[int, str]  # by layer, why its weights do not say

    def of_heads(self, tolerance: float = _DEFAULT_TOLERANCE) -> Float64:
        """[layers, H]: how many near keys hold all but `tolerance` of every row's weight."""
        distance: Float64 = reach(self.slopes, self.lead, tolerance=tolerance)
        return np.maximum(np.ceil(distance), 1.0)


@torch.no_grad()
def reach_of_weights(model: PreTrainedModel) -> Reach:
    """Bound, for every text, how far each head of a causal model with linear biases can look.

    In the first layer every pair of tokens is tried (up to 8,192). Behind, inputs are whatever a
    norm lets through; `why_not` says where they are something else, or projections not linear.

    Example:
        >>> from linbias.models.decoder.config import LinbiasConfig
        >>> from linbias.models.decoder.linbias import LinbiasForCausalLM
        >>> config = LinbiasConfig(vocab_size=99, hidden_size=32, num_attention_heads=2)
        >>> keys = reach_of_weights(LinbiasForCausalLM(config)).of_heads(2**-24)
        >>> keys.shape, bool((keys[:, 0] < keys[:, 1]).all())
        ((4, 2), True)
    """
    refuse_slopes_that_follow_the_length(model, "reach_of_weights")
    asked = Questions(model)
    layers = [heads_of_layer(asked, index) for index in range(asked.num_layers)]
    why_not = {index: layer.why_not for index, layer in enumerate(layers) if layer.why_not}
    lead = np.array([layer.leads() for layer in layers])
    vocabulary = _lead_over_vocabulary(asked)
    if vocabulary is not None:
        lead[0] = np.minimum(lead[0], vocabulary)
        if np.isfinite(vocabulary).all():
            why_not.pop(0, None)
    slopes = np.array([layer.slopes for layer in layers])
    key_heads = [layer.key_heads for layer in layers]
    return Reach(lead=lead, slopes=slopes, key_heads=key_heads, why_not=why_not)


def refuse_slopes_that_follow_the_length(model: nn.Module, caller: str) -> None:
    """Raise a ValueError if slopes depend on the length of the text: no key is ever done with."""
    for module in model.modules():
        bias = getattr(module, "fused_bias", None)
        for slopes in (*vars(module).values(), bias and bias.slopes):
            if isinstance(slopes, ModelSlopes) and slopes.follows_length:
                raise ValueError(
                    f"{caller}: slope_scale of the model must not depend on the length of the "
                    "text, got 'interpolate'"
                )


class Heads(NamedTuple):
    """The heads of one layer: q = F y + f and k = G z + g of normed inputs y and z."""

    slopes: list[float]
    key_heads: int
    scale: float
    why_not: str | None = None
    F: Float64 = np.empty((0, 0, 0))  # [H, D, n]
    f: Float64 = np.empty((0, 0))  # [H, D]
    G: Float64 = np.empty((0, 0, 0))  # [G, D, n]
    radius: float = 0.0
    centred: bool = False
    related: bool = True

    def leads(self) -> list[float]:
        if self.why_not:
            return [math.inf] * len(self.slopes)
        sharing = len(self.F) // len(self.G)
        norm: Any = {"radius": self.radius, "centred": self.centred, "related": self.related}
        return [
            largest_lead(F, self.G[head // sharing], f, scale=self.scale, **norm)
            for head, (F, f) in enumerate(zip(self.F, self.f, strict=True))
        ]


def heads_of_layer(asked: Questions, index: int) -> Heads:
    """What the weights of a layer say."""
    module, args, kwargs = asked.calls[index]
    attention: Any = copy.deepcopy(module).double()
    norm: Any
    norm, linear = asked.paths[index] or (None, None)
    width = args[0].shape[-1] if linear is None else linear.in_features
    hidden = torch.cat([torch.zeros(1, width), torch.eye(width), _mixed(width)]).double()
    if linear is not None:
        hidden = copy.deepcopy(linear).double()(hidden)
    answer = asked.ask(index, attention, args, kwargs, hidden[None])
    q, k = (x[0].movedim(0, -1).numpy() for x in (answer.q, answer.k))  # [T, D, heads]
    slopes, scale = answer.slopes.double().tolist(), float(answer.scale)
    heads = Heads(slopes=slopes, key_heads=answer.k.shape[1], scale=scale)
    if norm is None:
        return heads._replace(why_not="its attention reads something else than a norm's output")
    if hasattr(attention, "q_ln"):
        return _with_own_norms(heads, attention)
    f, F, G = q[0], q[1 : width + 1] - q[0], k[1 : width + 1] - k[0]
    mixed = _mixed(width)[0].double().numpy()
    for answers, weights in ((q, F), (k, G)):
        linear_answer = answers[0] + np.tensordot(mixed, weights, 1)
        if not np.allclose(answers[-1], linear_answer, rtol=1e-9, atol=1e-12):
            return heads._replace(why_not="its projections are not linear")
    gain = norm.weight.detach().double().cpu().numpy()
    shift = getattr(norm, "bias", None)
    shift = np.zeros(width) if shift is None else shift.detach().double().cpu().numpy()
    return heads._replace(
        F=(F * gain[:, None, None]).transpose(2, 1, 0),
        f=(f + np.tensordot(shift, F, 1)).T,
        G=(G * gain[:, None, None]).transpose(2, 1, 0),
        radius=math.sqrt(width),
        centred=_subtracts_the_mean(norm, width),
    )


def _with_own_norms(heads: Heads, attention: Any) -> Heads:
    """Heads whose queries and keys are normed, over all heads at once or over each."""

    def rows(norm: Any, heads: int) -> tuple[Float64, Float64]:
        """F [heads, D, width of the norm] and f [heads, D]."""
        width, size = norm.normalized_shape[0], attention.head_dim
        gain = torch.diag(norm.weight.detach()).cpu().numpy().reshape(-1, size, width)
        shift = torch.zeros(width) if norm.bias is None else norm.bias.detach()
        shift = shift.cpu().numpy().reshape(-1, size)
        return np.resize(gain, (heads, size, width)), np.resize(shift, (heads, size))

    F, f = rows(attention.q_ln, len(heads.slopes))
    K, _ = rows(attention.k_ln, heads.key_heads)
    width = max(F.shape[2], K.shape[2])
    F, K = (np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]))) for x in (F, K))
    return heads._replace(F=F, f=f, G=K, radius=math.sqrt(width), related=False)


def _lead_over_vocabulary(asked: Questions) -> Float64 | None:
    """[H], of the first layer: the most over all pairs of tokens; None for too many tokens."""
    size = asked.model.config.get_text_config().vocab_size
    size = getattr(asked.model.get_input_embeddings(), "num_embeddings", size)
    if size > _MOST_TOKENS:
        return None
    args, kwargs = asked.first_call(torch.arange(size)[:, None])
    hidden = args[0].double().transpose(0, 1)  # as one text
    answer = asked.ask(0, copy.deepcopy(asked.calls[0][0]).double(), args, kwargs, hidden)
    q, k = answer.q[0] * answer.scale, answer.k[0]
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    scores = q @ k.mT  # [H, V, V]
    lead = scores.amax(-1) - scores.diagonal(dim1=1, dim2=2)
    return lead.amax(-1).numpy() * (1 + 1e-9)


def _subtracts_the_mean(norm: Any, width: int) -> bool:
    """Whether a norm does not see what all entries have in common."""
    weight = norm.weight.detach()
    x, near = _mixed(width).to(weight.device, weight.dtype), 1e-3 * float(weight.abs().max())
    return torch.allclose(norm(x), norm(x + 1), rtol=1e-3, atol=near)


def _mixed(width: int) -> Tensor:
    """[1, width]: an input that is no unit vector."""
    return torch.linspace(-1.0, 1.0, width)[None].sin().roll(1) * 3
