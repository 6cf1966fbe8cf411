"""BLOOM: the paper's slopes; the reference code adds slope * key position, rounded to the type of the model."""

from typing import Any

import torch
from torch import Tensor
from transformers import BloomConfig, Cache
from transformers.models.bloom import modeling_bloom as reference

from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused.bias import Bias, attend
from linbias.models.fused.family import Family, FusedAttention, Options
from linbias.models.prepacked import linear_gelu
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
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.split(self.query_key_value(hidden_states))
        gathered, weights = attend(self, q, k, v, layout, layer_past, self.attention_dropout.p)
        output = reference.dropout_add(
            self.dense(gathered), residual, self.hidden_dropout, self.training
        )
        return output, weights

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(3)
        return q, k, v


class FusedBloomMLP(reference.BloomMLP):
    """Its GELU is one step with the layer before it, where the reference takes eight passes over memory."""

    @property
    def is_sliced(self) -> bool:
        return bool(self.pretraining_tp > 1 and self.slow_but_exact)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        if self.is_sliced:
            return super().forward(hidden_states, residual)
        output = self.dense_4h_to_h(linear_gelu(self.dense_h_to_4h, hidden_states, "tanh"))
        return reference.dropout_add(output, residual, self.hidden_dropout, self.training)


def rounded(slopes: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias as the reference code computes it."""
    return (slopes * positions).to(dtype)


def bias(config: BloomConfig, options: Options) -> Bias:
    """What the configuration says."""
    return options.bias(
        slopes(config.n_head),
        scale=(config.hidden_size // config.n_head) ** -0.5,
        rounded=rounded,
        train_length=getattr(config, "seq_length", None),
    )


FAMILY = Family(
    body=reference.BloomModel,
    attention=reference.BloomAttention,
    language_model=reference.BloomForCausalLM,
    arguments="self hidden_states residual alibi attention_mask layer_past use_cache "
    "output_attentions kwargs",
    fused={reference.BloomAttention: FusedBloomAttention, reference.BloomMLP: FusedBloomMLP},
    bias=bias,
    num_heads_name="num_heads",
)
