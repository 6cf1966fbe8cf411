"""The ALiBi slopes of a model: from numbers to the tensor that attention takes, scaled by length if asked."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from linbias.schedules import slopes
from linbias.torch.constant import constant
from linbias.torch.share import refuse_share

SlopeScale = str | float | None  # None, "interpolate" or a positive factor


class ModelSlopes:
    """The slopes of a model's heads, scaled as asked.

    They are kept as Python floats: a buffer would be rounded by `model.to(torch.bfloat16)`.

    Args:
        slopes: [H], of the query heads.
        scale: None, a positive factor, or "interpolate": the factor train_length / S wherever a row has
            S > train_length keys.
        train_length: Tokens per training sequence; only "interpolate" uses it.

    Source of "interpolate": Al-Khateeb, Dey, Soboleva and Hestness, arXiv 2310.13017.

    Example:
        >>> double = ModelSlopes([0.0625, 0.00390625], scale=2.0)
        >>> double.left(torch.zeros(1, 2, 1, 4), num_keys=1)
        tensor([0.1250, 0.0078])
    """

    def __init__(
        self, slopes: Sequence[float], scale: SlopeScale = None, train_length: int = 1
    ) -> None:
        self._slopes = tuple(map(float, slopes))
        self._scale = scale
        self._train_length = train_length

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ModelSlopes":
        """What a configuration asks for."""
        heads = slopes(config.num_attention_heads, config.slope_schedule).tolist()
        return cls(heads, config.slope_scale, config.train_length)

    def __len__(self) -> int:
        return len(self._slopes)

    @property
    def follows_length(self) -> bool:
        """Whether the slopes depend on the length of the text."""
        return self._scale == "interpolate"

    def scaled(self, scale: SlopeScale, train_length: int | None = None) -> "ModelSlopes":
        """The same slopes with another scale, and another train_length if one is given."""
        return ModelSlopes(self._slopes, scale, train_length or self._train_length)

    def left(self, q: Tensor, num_keys: int, key_range: Tensor | None = None) -> Tensor:
        """Return the slopes of one call: [H], or [B, H] where rows differ; at least float32.

        Args:
            q: [B, H, T, D]; only type and device are used.
            num_keys: Number of keys, padding included.
            key_range: [B, 2] or None: which keys are no padding; "interpolate" counts those alone.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        return self.apply_scale(constant(self._slopes, dtype, q.device), num_keys, key_range)

    def apply_scale(self, left: Tensor, num_keys: int, key_range: Tensor | None = None) -> Tensor:
        """Return slopes [H] times the factor of one call: [H], or [B, H] where rows differ."""
        if self._scale is None:
            return left
        if self._scale != "interpolate":
            return left * float(self._scale)
        refuse_share("slope_scale='interpolate'")
        if key_range is None:
            return left * min(1.0, self._train_length / num_keys) if num_keys else left
        keys_of_row = (key_range[:, 1:] - key_range[:, :1]).clamp(min=1)
        return left * (self._train_length / keys_of_row.to(left.dtype)).clamp(max=1.0)
