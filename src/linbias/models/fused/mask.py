"""What a fused model hands to its layers in place of a mask: where the tokens stand, and the bias.

Transformers asks the attention implementation of a model for its mask, once per forward pass. Ours answers with a
`FusedMask`, a few numbers per row instead of [B, 1, T, S]. It is no tensor: code that does not know it stops with
an error instead of computing without the bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import causal_mask_function

from linbias.models.fused.bias import Bias
from linbias.models.padding import Padding, read_attention_mask

NAME = "linbias"  # as in attn_implementation="linbias"


@dataclass(frozen=True)
class FusedMask:
    """Which keys each new token sees, and how their scores fall.

    Attributes:
        padding: Where the new tokens stand, and which keys are tokens.
        default_bias: Makes what the model's configuration says, for layers that `fuse` has not given theirs.
        need_weights: Whether the layers return attention weights as well.
    """

    padding: Padding
    default_bias: Callable[[], Bias]
    need_weights: bool = False
    ndim: ClassVar[int] = 0  # models look whether a mask has two or four axes: neither

    def with_weights(self) -> "FusedMask":
        """The same, for layers that shall return attention weights."""
        return replace(self, need_weights=True)

    def to(self, *args: Any, **kwargs: Any) -> "FusedMask":
        """On another device, where one is named. A dtype means nothing here: MPT asks for bool.

        A model that lies on several devices moves what its layers are given, by the number of a device.
        """
        device = kwargs.get("device", args[0] if args else None)
        if device is None or isinstance(device, torch.dtype):
            return self
        old = self.padding
        moved = Padding(
            old.positions.to(device),
            None if old.key_range is None else old.key_range.to(device),
            None if old.query_start is None else old.query_start.to(device),
        )
        return replace(self, padding=moved)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: Any, **__: Any) -> Any:
        # Not a TypeError, which Python's operators would replace by a message of their own.
        raise ValueError(
            f"linbias: {getattr(function, '__name__', function)} was given the mask of a fused model as if it were a "
            "tensor: this layer does not know attn_implementation='linbias'"
        )


def make_mask(
    biases: dict[str, Callable[[Any], Bias]],
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | FusedMask | None,
    config: PreTrainedConfig,
    device: torch.device,
    **_: Any,
) -> FusedMask:
    """Answer Transformers' question for a mask.

    Args:
        biases: By model type, what turns a configuration into a Bias.
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
    if isinstance(attention_mask, FusedMask):
        return attention_mask
    if config.model_type not in biases:
        raise ValueError(
            f"linbias: attn_implementation='linbias' fuses models of type {', '.join(biases)}, got {config.model_type}"
        )
    if mask_function is not causal_mask_function:
        raise ValueError(
            f"linbias: the attention of a fused {config.model_type} model must be causal, without a mask of its own"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling:
        q_offset = int(q_offset)
        if attention_mask is not None:  # a static cache comes with a mask as long as its room
            attention_mask = attention_mask[:, : q_offset + q_length]
    padding = read_attention_mask(
        f"{config.model_type} with attn_implementation='linbias'",
        attention_mask,
        torch.empty((), device=device).expand(batch_size, q_length),
        q_offset,
        has_cache=True,
        has_room=isinstance(q_offset, Tensor) or kv_length > q_offset + q_length,
    )
    return FusedMask(padding, partial(biases[config.model_type], config))
