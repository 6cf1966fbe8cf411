"""The bias of an existing model, which attends as the position methods of our own models do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import logging

from linbias.models.decoder import attend as attending
from linbias.models.decoder.cache import use_growing_layers
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.positions import AttendOptions, LinearBias
from linbias.models.decoder.slopes import ModelSlopes

logger = logging.get_logger(__name__)

# (slopes [H, 1], positions [1 or B, 1, S], dtype of the model) -> [1 or B, H, S]: what the
# reference code adds to the scores of key s.
Rounded = Callable[[Tensor, Tensor, torch.dtype], Tensor]


@dataclass(frozen=True, kw_only=True)
class Bias(LinearBias):
    """How the scores of a model fall with distance.

    Attributes:
        slopes: Of all its heads.
        scale: What q . k is multiplied by.
        implementation: As in `linbias.torch.attention`.
    """

    slopes: ModelSlopes
    scale: float
    implementation: str = "auto"

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        slopes = self.slopes.left(q, num_keys, options.key_range)
        return {"slopes": slopes, "scale": self.scale}

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
        logger.warning_once(
            "output_attentions needs memory for all attention weights [B, H, T, S], and time to "
            "compute them, which fused attention itself does not"
        )
        return super().weights(q, k, options)


@dataclass(frozen=True, kw_only=True)
class RoundedBias(Bias):
    """A bias as the reference code rounds it: a number per key, instead of slope * position."""

    rounded: Rounded
    uses_key_bound = False
    why_not_slopes = (
        "the model must be fused with rounding='exact', got 'checkpoint', whose bias does not "
        "depend on distance alone"
    )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        return super().attend(*self._with_rounding(q, k, options), v, options)

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
        return super().weights(*self._with_rounding(q, k, options), options)

    def _with_rounding(
        self, q: Tensor, k: Tensor, options: AttendOptions
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys whose scores hold what rounding adds to slope * position.

        It is a number per key and head, so it fits into one more component of the keys for each
        head that shares them; the query of a head has 1 there, and 0 in the components of the
        others.
        """
        (B, H, T, _), (_, G, S, _) = q.shape, k.shape
        positions = torch.arange(S, device=q.device)[None]
        if options.key_range is not None:
            positions = (positions - options.key_range[:, :1]).clamp(min=0)
        left = self.slopes.left(q, S, options.key_range)
        exact = left[:, None] * positions[:, None]
        error = (self.rounded(left[:, None], positions[:, None], q.dtype) - exact) / self.scale
        sharing = H // G
        component = torch.eye(sharing, dtype=q.dtype, device=q.device).repeat(G, 1)
        q = torch.cat([q, component[:, None].expand(B, H, T, sharing)], dim=-1)
        error = error.expand(B, H, S).unflatten(1, (G, sharing)).mT
        return q, torch.cat([k, error.to(k.dtype)], dim=-1)


def attend(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    cache: Cache | None,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """As `attend` of all models, for an attention layer with its `layer_idx` and `fused_bias`.

    Weights are dropped with probability `dropout` in training mode only.
    """
    if cache is not None:
        use_growing_layers(cache)
    how = attending.How(
        method=layer.fused_bias,
        layout=layout,
        cache=cache,
        layer=layer.layer_idx,
        dropout=dropout if layer.training else None,
    )
    return attending.attend(q, k, v, how)
