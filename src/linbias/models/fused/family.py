"""What `fuse` knows of an architecture of Transformers, and how its modules come to run fused.

Transformers asks the attention implementation of a model for its mask, once per forward pass. For
a fused model that is `make_mask`, which answers with `TokenLayout`, a few numbers per row instead
of [B, 1, T, S]; and the modules of the model that are given it become those of `Family.fused`,
subclasses whose forward knows it. Other models stay as they are.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import causal_mask_function

from linbias.models.decoder.cache import CACHE
from linbias.models.decoder.layout import TokenLayout, fill_room, read_attention_mask
from linbias.models.decoder.packing import find_packing
from linbias.models.decoder.slopes import ModelSlopes
from linbias.models.fused.bias import Bias, Rounded, RoundedBias
from linbias.models.prepacked import forward_name

NAME = "linbias"  # as in attn_implementation="linbias"
MODEL_TYPES = ("bloom", "falcon", "mpt")


@dataclass(frozen=True)
class Options:
    """What a user of `fuse` chooses; the arguments of `fuse` say what each means."""

    rounding: str = "exact"
    implementation: str = "auto"
    slope_scale: float | str | None = None
    train_length: int | None = None
    heads: Sequence[int] | None = None

    def bias(
        self,
        slopes: NDArray[np.float64],
        scale: float,
        rounded: Rounded | None,
        train_length: int | None,
    ) -> Bias:
        """The bias of a model that has these slopes.

        Args:
            slopes: [H], of all heads.
            scale: What q . k is multiplied by.
            rounded: How the reference code rounds; None where it does not.
            train_length: What the configuration says about it; None: nothing.
        """
        heads = range(len(slopes)) if self.heads is None else self.heads
        if outside := [head for head in heads if not 0 <= head < len(slopes)]:
            raise ValueError(f"fuse: heads must be in [0, {len(slopes)}), got {outside[0]}")
        chosen = slopes[list(heads)]
        length = self.train_length or train_length
        if self.slope_scale == "interpolate" and length is None:
            raise ValueError(
                "fuse: train_length must be given for slope_scale='interpolate', since the configuration does not say it"
            )
        given: Any = {
            "slopes": ModelSlopes(chosen.tolist(), self.slope_scale, length or 1),
            "scale": scale,
            "implementation": self.implementation,
        }
        if rounded is None or self.rounding != "checkpoint":
            return Bias(**given)
        return RoundedBias(**given, rounded=rounded)


@dataclass(frozen=True)
class Family:
    """An architecture of Transformers.

    Attributes:
        body: What asks for the mask, and holds the layers.
        attention: The attention of a layer.
        language_model: The class that generates.
        arguments: Of the forward of `attention`, in the version that we know, in words.
        fused: What the modules of an original class become.
        bias: (configuration, Options) -> what they say together, or ValueError if that is not ALiBi.
        num_heads_name: The attribute of a layer that says how many heads it holds.
    """

    body: type[nn.Module]
    attention: type[nn.Module]
    language_model: type[nn.Module]
    arguments: str
    fused: Mapping[type[nn.Module], type[nn.Module]]
    bias: Callable[[Any, Options], Bias]
    num_heads_name: str

    def why_unknown(self) -> str | None:
        """Why this version of Transformers cannot be fused; None if it can."""
        taken, known = list(inspect.signature(self.attention.forward).parameters), self.arguments
        if taken == known.split():
            return None
        return (
            f"{self.attention.__name__} of transformers {transformers.__version__} takes "
            f"{', '.join(taken)}, and linbias knows one that takes {', '.join(known.split())}"
        )

    def layers(self, body: nn.Module) -> list[Any]:
        """The attention of each layer, fused or not."""
        return [module for module in body.modules() if isinstance(module, self.attention)]

    def set_bias(self, body: nn.Module, bias: Bias) -> None:
        """Let the modules of a body run fused, with this bias."""
        change_classes(body, self.fused)
        for layer in self.layers(body):
            layer.fused_bias = bias


def change_classes(body: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Let modules be of other classes that know the same attributes."""
    module: Any
    for module in body.modules():
        if (found := classes.get(type(module))) is not None:
            module.__class__ = found
            if "_old_forward" in vars(module):  # what the hooks of accelerate call
                module._old_forward = MethodType(found.forward, module)


class FusedAttention:
    """What the fused attention of a family has: its `fused_forward` runs, with `TokenLayout` in the place of the mask.

    `split` makes queries [B, H, T, D], keys and values [B, G, T, D] of what its first linear layer gives.
    """

    fused_bias: Bias
    fused_forward: Callable[..., tuple[Tensor, Tensor | None]]
    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

    def forward(
        self, *args: Any, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """That of Transformers, without a mask [T, S]."""
        if not isinstance(attention_mask, TokenLayout):
            got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else None
            raise ValueError(
                f"{type(self).__name__}: attention_mask of a fused model must have shape [B, S], got {got}, and its "
                f"attn_implementation must be {NAME!r}"
            )
        if kwargs.get("output_attentions"):
            attention_mask = replace(attention_mask, need_weights=True)
        return self.fused_forward(attention_mask, *args, **kwargs)


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | TokenLayout | None,
    config: PreTrainedConfig,
    device: torch.device,
    **_: Any,
) -> TokenLayout:
    """Answer Transformers' question for a mask.

    Args:
        batch_size, q_length: B and T.
        kv_length: Keys in the cache after this pass: more than q_offset + T where a static cache has room.
        q_offset: Number of cached tokens.
        mask_function: What Transformers would evaluate for each query and key.
        attention_mask: [B, S] bool, False at padding; None without padding; a mask made earlier stays.
        config: Of the model.
        device: Where the new tokens are.

    Raises:
        ValueError: The model is of another type, is not causal, or its attention_mask has gaps.
    """
    if isinstance(attention_mask, TokenLayout):
        return attention_mask
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"linbias: attn_implementation={NAME!r} fuses models of type {', '.join(MODEL_TYPES)}, got {config.model_type}"
        )
    if mask_function is not causal_mask_function:
        raise ValueError(
            f"linbias: the attention of a fused {config.model_type} model must be causal, without a mask of its own"
        )
    if not torch.compiler.is_compiling():
        q_offset = int(q_offset)
    return read_attention_mask(
        f"{config.model_type} with attn_implementation={NAME!r}",
        attention_mask,
        torch.empty((), device=device).expand(batch_size, q_length),
        q_offset,
        has_cache=True,
        has_room=isinstance(q_offset, Tensor) or kv_length > q_offset + q_length,
    )


def check_texts(model: Any) -> None:
    """Let a body or a model around it refuse packed rows, whose position_ids most heads of Transformers drop."""
    name = forward_name(model)
    if isinstance(vars(model).get(name), partial):
        return
    signature = inspect.signature(MethodType(type(model).forward, model))
    checked: Any = partial(_forward, model, tuple(signature.parameters))
    checked.__signature__ = (
        signature  # which Trainer and `generate` read to know what a model takes
    )
    vars(model)[name] = checked


def stop_checking_texts(model: Any) -> None:
    """Undo `check_texts`."""
    name = forward_name(model)
    if isinstance(vars(model).get(name), partial):
        del vars(model)[name]
        if name == "_old_forward":
            vars(model)[name] = MethodType(type(model).forward, model)


def _forward(model: Any, arguments: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """That of the class of a model, for rows of one text each."""
    given = dict(zip(arguments, args, strict=False)) | kwargs
    if given.get("position_ids") is not None:
        _refuse_texts(type(model).__name__, given)
    return type(model).forward(model, *args, **kwargs)


def _refuse_texts(name: str, given: Mapping[str, Any]) -> None:
    """Raise a ValueError if position_ids mark several texts in a row, as `read_attention_mask` reads them."""
    position_ids, cache = given["position_ids"], given.get("cache", given.get("past_key_values"))
    mask, T = given.get("attention_mask"), position_ids.shape[-1]
    if T < 2 or (cache is not None and torch.compiler.is_compiling()):
        return
    new = None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        start = 0 if cache is None else int(cache.get_seq_length())
        new = mask[:, start : start + T].to(position_ids.device) != 0
        position_ids = position_ids.expand(len(new), T)
    if find_packing(position_ids, new) is not None:
        raise ValueError(
            f"{name}: position_ids of a fused model must count on from token to token, got several texts in a row, "
            "which would see each other: give each a row of its own, with padding and attention_mask"
        )


def keep_mask_for_generate(
    config: Any, attention_mask: Tensor | None, **given: Any
) -> Tensor | None:
    """With a static cache, `generate` makes the mask of a forward pass itself; ours is made inside, from [B, S]."""
    return fill_room(attention_mask, given[CACHE])
