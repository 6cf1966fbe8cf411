"""What `fuse` knows of an architecture, and how its layers come to run fused."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from linbias.models.fused.bias import Bias, Rounded
from linbias.models.fused.mask import NAME, FusedMask
from linbias.models.slopes import ModelSlopes


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
        return Bias(
            ModelSlopes(chosen.tolist(), self.slope_scale, length or 1),
            scale,
            rounded if self.rounding == "checkpoint" else None,
            self.implementation,
        )


DEFAULT = Options()


@dataclass(frozen=True)
class Family:
    """An architecture of Transformers.

    Attributes:
        model_type: As in its configuration.
        body, block, attention: Its classes: what asks for the mask, one layer, and the attention of a layer.
        language_model: The class that generates.
        arguments: Of the forward of `attention`, in the version that we know.
        forward: Takes its place: called with the layer, the mask, and the other arguments.
        bias: (configuration, Options) -> what they say together, or ValueError if that is not ALiBi. Without Options,
            the default ones.
        num_heads_name: The attribute of a layer that says how many heads it holds.
    """

    model_type: str
    body: type[nn.Module]
    block: type[nn.Module]
    attention: type[nn.Module]
    language_model: type[nn.Module]
    arguments: tuple[str, ...]
    forward: Callable[..., tuple[Tensor, Tensor | None]]
    bias: Callable[..., Bias]
    num_heads_name: str

    def install(self) -> None:
        """Let the attention and the blocks of Transformers understand a `FusedMask`.

        With any other mask they do what they did. A version of Transformers that we do not know is left alone.
        """
        if self.why_unknown() is None:
            _understand_mask(self.attention, self.forward)
            _understand_output_attentions(self.block)
            _keep_mask_for_generate(self.language_model)

    def why_unknown(self) -> str | None:
        """Why this version of Transformers cannot be fused; None if it can."""
        found = tuple(inspect.signature(self.attention.forward).parameters)
        if found == self.arguments:
            return None
        return (
            f"{self.attention.__name__} of transformers {transformers.__version__} takes {', '.join(found)}, "
            f"and linbias knows one that takes {', '.join(self.arguments)}"
        )


def _understand_mask(layer: type[nn.Module], fused: Callable[..., Any]) -> None:
    original = layer.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, FusedMask):
            if isinstance(mask, Tensor) and hasattr(self, "fused_bias"):
                raise ValueError(
                    f"{layer.__name__}: attention_mask of a fused model must have shape [B, S], got {list(mask.shape)}"
                )
            return original(self, *args, **kwargs)
        del kwargs["attention_mask"]
        return fused(self, mask, *args, **kwargs)

    layer.forward = forward


def _understand_output_attentions(block: type[nn.Module]) -> None:
    """Not every block tells its attention that its weights are wanted: the mask does."""
    original = block.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if kwargs.get("output_attentions") and isinstance(mask, FusedMask):
            kwargs["attention_mask"] = mask.with_weights()
        return original(self, *args, **kwargs)

    block.forward = forward


def _keep_mask_for_generate(language_model: Any) -> None:
    """With a static cache, `generate` makes the mask of a forward pass itself; ours is made inside, from [B, S]."""
    if hasattr(language_model, "create_masks_for_generate"):  # BLOOM's already returns [B, S]
        return

    def masks(self: Any, config: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if config._attn_implementation == NAME:
            return attention_mask
        return create_masks_for_generate(config, attention_mask=attention_mask, **kwargs)

    language_model.create_masks_for_generate = masks
