"""The ALiBi slopes of a model: from numbers to the tensor that attention takes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from linbias.schedules import slopes
from linbias.torch.constant import constant
from linbias.torch.shard import refuse_shard

SlopeScale = str | float | None  # None, "interpolate" or a positive factor


class ModelSlopes:
    """The slopes [H] of a model's query heads, times None, a positive factor, or "interpolate":
    train_length / S wherever a row has S > train_length keys (Al-Khateeb et al., arXiv
    2310.13017). They are Python floats, since `model.to(torch.bfloat16)` would round a buffer.
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

    def left(self, q: Tensor, num_keys: int, key_range: Tensor | None = None) -> Tensor:
        """Return the slopes of one call: [H], or [B, H] where rows differ; at least float32."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return self.apply_scale(constant(self._slopes, dtype, q.device), num_keys, key_range)

    def apply_scale(self, left: Tensor, num_keys: int, key_range: Tensor | None = None) -> Tensor:
        """Return slopes [H] times the factor of one call: [H], or [B, H] where rows differ."""
        if self._scale is None:
            return left
        if self._scale != "interpolate":
            return left * float(self._scale)
        refuse_shard("slope_scale='interpolate'")
        if key_range is None:
            return left * min(1.0, self._train_length / num_keys) if num_keys else left
        keys_of_row = (key_range[:, 1:] - key_range[:, :1]).clamp(min=1)
        return left * (self._train_length / keys_of_row.to(left.dtype)).clamp(max=1.0)
