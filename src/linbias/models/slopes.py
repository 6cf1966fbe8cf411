"""The ALiBi slopes of a model: from the names in its configuration to the tensor that attention takes."""

import torch
from torch import Tensor

from linbias.schedules import slopes
from linbias.torch.constant import constant


class ModelSlopes:
    """The slopes of a model's heads, scaled as its configuration asks.

    They are kept as Python floats: a buffer would be rounded by `model.to(torch.bfloat16)`.

    Args:
        num_heads: Query heads H.
        schedule: A name known to `linbias.slopes`.
        scale: None, a positive factor, or "interpolate": the factor train_length / S wherever a row has
            S > train_length keys.
        train_length: Tokens per training sequence; only "interpolate" uses it.

    Source of "interpolate": Al-Khateeb, Dey, Soboleva and Hestness, arXiv 2310.13017.

    Example:
        >>> double = ModelSlopes(2, scale=2.0)
        >>> double.left(torch.zeros(1, 2, 1, 4), num_keys=1)
        tensor([0.1250, 0.0078])
    """

    def __init__(
        self,
        num_heads: int,
        schedule: str = "paper",
        scale: str | float | None = None,
        train_length: int = 1,
    ) -> None:
        self._slopes = slopes(num_heads, schedule).tolist()
        self._scale = scale
        self._train_length = train_length

    def left(self, q: Tensor, num_keys: int, key_range: Tensor | None = None) -> Tensor:
        """Return the slopes of one call of attention.

        Args:
            q: [B, H, T, D]; only type and device are used.
            num_keys: Number of keys, padding included.
            key_range: [B, 2] or None: which keys of each row are no padding. "interpolate" counts those alone.

        Returns:
            [H], or [B, H] where rows differ; float32, or float64 for a float64 q.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        return self.scaled(constant(self._slopes, dtype, q.device), num_keys, key_range)

    def scaled(self, left: Tensor, num_keys: int, key_range: Tensor | None = None) -> Tensor:
        """Return slopes [H] times the factor of one call: [H], or [B, H] where rows differ."""
        if self._scale is None:
            return left
        if self._scale != "interpolate":
            return left * float(self._scale)
        if key_range is None:
            return left * min(1.0, self._train_length / num_keys) if num_keys else left
        keys_of_row = (key_range[:, 1:] - key_range[:, :1]).clamp(min=1)
        return left * (self._train_length / keys_of_row.to(left.dtype)).clamp(max=1.0)
