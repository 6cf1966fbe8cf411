"""MPT: the slopes of the next power of two, every second one first, down to 2^-alibi_bias_max.

Transformers always takes 2^-8 (transformers 5.23); the code that MPT was trained with reads the configuration, and so
do we. Nor are we bound to `max_seq_len`, beyond which the bias that Transformers makes does not reach.
"""

from typing import Any

from torch import Tensor
from transformers import Cache, MptConfig
from transformers.models.mpt import modeling_mpt as reference
from transformers.utils import logging

from linbias.schedules import slopes
from linbias.transformers.fused.bias import Bias, attend
from linbias.transformers.fused.family import DEFAULT, Family, Options
from linbias.transformers.fused.mask import FusedMask

logger = logging.get_logger(__name__)


def forward(
    layer: Any,
    mask: FusedMask,
    hidden_states: Tensor,
    past_key_values: Cache | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """`MptAttention.forward`, fused: returns what the layer adds [B, T, hidden size], and the weights."""
    qkv = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv)
    q, k, v = qkv.unflatten(-1, (3, layer.n_heads, layer.head_dim)).transpose(1, 3).unbind(2)
    gathered, weights = attend(layer, q, k, v, mask, past_key_values, layer.attn_dropout_p)
    return layer.out_proj(gathered), weights


def bias(config: MptConfig, options: Options = DEFAULT) -> Bias:
    """What the configuration says.

    Raises:
        ValueError: It asks for no ALiBi, or for what Transformers' MPT does not compute.
    """
    attention = config.attn_config
    if not attention.alibi:
        raise ValueError("fuse: an MPT model must have attn_config.alibi = True, got False")
    for name in ("qk_ln", "prefix_lm"):
        if getattr(attention, name, False):
            raise ValueError(
                f"fuse: attn_config.{name} must be False, since the MPT of Transformers does not have it, got True"
            )
    if attention.alibi_bias_max != 8:
        logger.warning_once(
            f"fuse: this MPT model has alibi_bias_max={attention.alibi_bias_max}. Its fused attention honours it; "
            "that of Transformers computes with 8 instead."
        )
    return options.bias(
        slopes(config.n_heads, "mpt", attention.alibi_bias_max),
        scale=attention.softmax_scale or (config.hidden_size / config.n_heads) ** -0.5,
        rounded=None,
        train_length=config.max_seq_len,
    )


FAMILY = Family(
    model_type="mpt",
    body=reference.MptModel,
    block=reference.MptBlock,
    attention=reference.MptAttention,
    language_model=reference.MptForCausalLM,
    arguments=(
        *("self", "hidden_states", "position_bias", "past_key_values", "attention_mask"),
        "kwargs",
    ),
    forward=forward,
    bias=bias,
    num_heads_name="n_heads",
)
