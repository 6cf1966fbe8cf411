"""BLOOM: the paper's slopes."""

from typing import Any

from torch import Tensor
from transformers import BloomConfig, Cache
from transformers.models.bloom import modeling_bloom as reference

from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused.family import Attended, Bias, Family, FusedAttention, Options
from linbias.schedules import slopes


class FusedBloomAttention(FusedAttention, reference.BloomAttention):
    """Returns the new residual stream [B, T, hidden size], and the weights."""

    def fused_forward(
        self,
        layout: TokenLayout,
        hidden_states: Tensor,
        residual: Tensor,
        layer_past: Cache | None = None,
        **_: Any,
    ) -> Attended:
        qkv, dropout = self.query_key_value(hidden_states), self.attention_dropout.p
        gathered, weights = self.gather(qkv, layout, layer_past, dropout)
        dropped = (self.hidden_dropout, self.training)
        return reference.dropout_add(self.dense(gathered), residual, *dropped), weights

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(3)
        return q, k, v


def bias(config: BloomConfig, options: Options) -> Bias:
    return options.bias(
        slopes(config.n_head),
        scale=(config.hidden_size // config.n_head) ** -0.5,
        train_length=getattr(config, "seq_length", None),
    )


FAMILY = Family(
    body=reference.BloomModel,
    attention=reference.BloomAttention,
    arguments="self hidden_states residual alibi attention_mask layer_past use_cache "
    "output_attentions kwargs",
    fused={reference.BloomAttention: FusedBloomAttention},
    bias=bias,
    num_heads_name="num_heads",
)
