"""BLOOM: the paper's slopes; the reference code adds slope * key position, rounded to the type of the model."""

from typing import Any

import torch
from torch import Tensor
from transformers import BloomConfig, Cache
from transformers.models.bloom import modeling_bloom as reference

from linbias.models.fused.bias import Bias, attend
from linbias.models.fused.family import DEFAULT, Family, Options
from linbias.models.fused.mask import FusedMask
from linbias.schedules import slopes


def forward(
    layer: Any,
    mask: FusedMask,
    hidden_states: Tensor,
    residual: Tensor,
    layer_past: Cache | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """`BloomAttention.forward`, fused: returns the new residual stream [B, T, hidden size], and the weights."""
    q, k, v = layer._reshape(layer.query_key_value(hidden_states))
    gathered, weights = attend(layer, q, k, v, mask, layer_past, layer.attention_dropout.p)
    output = reference.dropout_add(
        layer.dense(gathered), residual, layer.hidden_dropout, layer.training
    )
    return output, weights


def rounded(slopes: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias as the reference code computes it."""
    return (slopes * positions).to(dtype)


def bias(config: BloomConfig, options: Options = DEFAULT) -> Bias:
    """What the configuration says."""
    return options.bias(
        slopes(config.n_head),
        scale=(config.hidden_size // config.n_head) ** -0.5,
        rounded=rounded,
        train_length=getattr(config, "seq_length", None),
    )


FAMILY = Family(
    model_type="bloom",
    body=reference.BloomModel,
    block=reference.BloomBlock,
    attention=reference.BloomAttention,
    language_model=reference.BloomForCausalLM,
    arguments=(
        *("self", "hidden_states", "residual", "alibi", "attention_mask", "layer_past"),
        *("use_cache", "output_attentions", "kwargs"),
    ),
    forward=forward,
    bias=bias,
    num_heads_name="num_heads",
)
