"""The bias of an existing model, and its attention: `linbias.torch.attention` with a cache around it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import logging

from linbias.models.decoder.cache import attending_layer, decode, key_bound, use_growing_layers
from linbias.models.decoder.places import Places
from linbias.models.decoder.slopes import ModelSlopes
from linbias.torch import attention, attention_weights

logger = logging.get_logger(__name__)

# (slopes [H, 1], positions [1 or B, 1, S], dtype of the model) -> [1 or B, H, S]: what the reference code adds to the
# scores of key s.
Rounded = Callable[[Tensor, Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class Bias:
    """How the scores of a model fall with distance.

    Attributes:
        slopes: Of all its heads.
        scale: What q . k is multiplied by.
        rounded: None for exact slopes and distances. Else the bias as the reference code rounds it: a number per key,
            instead of slope * position.
        implementation: As in `linbias.torch.attention`.
    """

    slopes: ModelSlopes
    scale: float
    rounded: Rounded | None = None
    implementation: str = "auto"

    @property
    def is_plain(self) -> bool:
        """Whether the compiled core computes it as it is."""
        return self.rounded is None and self.implementation in ("auto", "cpu")


def attend(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Places,
    cache: Cache | None,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Let new tokens attend to the cached ones and to each other.

    Args:
        layer: The attention layer, with its `layer_idx` and `fused_bias`.
        q: [B, H, T, D].
        k, v: [B, G, T, D], of the new tokens.
        places: Where the new tokens stand.
        cache: Extended in place; None for no cache.
        dropout: Probability that a weight is dropped; used in training mode only.

    Returns:
        What the queries gather, [B, T, H * D], and their weights [B, H, T, S] if `places` asks for them.
    """
    bias: Bias = layer.fused_bias
    if (own := attending_layer(cache, layer.layer_idx)) is not None:
        if bias.rounded is not None:
            raise ValueError(
                f"{type(own).__name__}: the model must be fused with rounding='exact', got 'checkpoint', whose bias does not "
                "depend on distance alone"
            )
        slopes = bias.slopes.left(q, k.shape[2])
        return own.attend(q, k, v, slopes, bias.scale, places).transpose(1, 2).flatten(2), None
    bound = None
    if cache is not None:
        use_growing_layers(cache)
        if bias.is_plain and places.are_last and not (places.need_weights or layer.training):
            left = bias.slopes.left(q, cache.get_seq_length(layer.layer_idx) + k.shape[2])
            if (out := decode(cache, layer.layer_idx, q, k, v, left, bias.scale)) is not None:
                return out.transpose(1, 2).flatten(2), None
        k, v = cache.update(k, v, layer.layer_idx)
        bound = key_bound(cache.layers[layer.layer_idx])
    key_range, query_start = places.key_range, places.query_start
    left = bias.slopes.left(q, k.shape[2], key_range)
    if bias.rounded is not None:
        q, k = _with_rounding(q, k, key_range, left, bias.scale, bias.rounded)
        bound = None
    out = attention(
        q,
        k,
        v,
        left,
        scale=bias.scale,
        key_range=key_range,
        query_start=query_start,
        key_bound=bound,
        dropout=dropout if layer.training else 0.0,
        implementation=bias.implementation,
    )
    weights = None
    if places.need_weights:
        logger.warning_once(
            "output_attentions needs memory for all attention weights [B, H, T, S], and time to compute them, "
            "which fused attention itself does not"
        )
        weights = attention_weights(
            q, k, left, scale=bias.scale, key_range=key_range, query_start=query_start
        )
    return out.transpose(1, 2).flatten(2), weights


def _with_rounding(
    q: Tensor,
    k: Tensor,
    key_range: Tensor | None,
    left: Tensor,
    scale: float,
    rounded: Rounded,
) -> tuple[Tensor, Tensor]:
    """Queries and keys whose scores hold what rounding adds to slope * position.

    It is a number per key and head, so it fits into one more component of the keys for each head that shares them;
    the query of a head has 1 there, and 0 in the components of the others.
    """
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    positions = torch.arange(S, device=q.device)[None]
    if key_range is not None:
        positions = (positions - key_range[:, :1]).clamp(min=0)
    exact = left[:, None] * positions[:, None]
    error = (rounded(left[:, None], positions[:, None], q.dtype) - exact) / scale
    sharing = H // G
    component = torch.eye(sharing, dtype=q.dtype, device=q.device).repeat(G, 1)
    q = torch.cat([q, component[:, None].expand(B, H, T, sharing)], dim=-1)
    error = error.expand(B, H, S).unflatten(1, (G, sharing)).mT
    return q, torch.cat([k, error.to(k.dtype)], dim=-1)
