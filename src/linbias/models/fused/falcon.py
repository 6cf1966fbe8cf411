"""Falcon with `alibi=True` (the falcon-rw models): the paper's slopes / sqrt(head size).

The cache of the reference code holds a copy of keys and values for each head that shares them;
ours holds them once.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, FalconConfig
from transformers.models.falcon import modeling_falcon as reference

from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused.family import Attended, Bias, Family, FusedAttention, Options
from linbias.schedules import slopes


class FusedFalconAttention(FusedAttention, reference.FalconAttention):
    """Returns what the layer adds [B, T, hidden size], and the weights."""

    def fused_forward(
        self, layout: TokenLayout, hidden_states: Tensor, layer_past: Cache | None = None, **_: Any
    ) -> Attended:
        qkv, dropout = self.query_key_value(hidden_states), self.attention_dropout.p
        gathered, weights = self.gather(qkv, layout, layer_past, dropout)
        return self.dense(gathered), weights

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_shared = 1 if self.multi_query else self.num_heads
        if self.new_decoder_architecture:
            num_shared = self.num_kv_heads
        # Per key/value head: its queries, then a key and a value. [B, T, G, queries + 2, D]
        by_group = qkv.unflatten(-1, (num_shared, -1, self.head_dim))
        *queries, k, v = by_group.transpose(1, 2).unbind(3)  # each [B, G, T, D]
        q = queries[0] if len(queries) == 1 else torch.stack(queries, dim=2).flatten(1, 2)
        return q, k, v


def bias(config: FalconConfig, options: Options) -> Bias:
    if not config.alibi:
        raise ValueError(
            "fuse: a Falcon model must have alibi = True, got False: it has rotary positions"
        )
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5
    return options.bias(
        slopes(config.num_attention_heads) * scale,
        scale=scale,
        train_length=config.max_position_embeddings,
    )


FAMILY = Family(
    body=reference.FalconModel,
    attention=reference.FalconAttention,
    arguments="self hidden_states alibi attention_mask position_ids layer_past use_cache "
    "output_attentions position_embeddings kwargs",
    fused={reference.FalconAttention: FusedFalconAttention},
    bias=bias,
    num_heads_name="num_heads",
)
