"""Baichuan-13B and Baichuan2-13B, from their own folders and without their code.

A pre-norm decoder with ALiBi, RMS norms and a gated feed-forward part; modules are named as the
original names its weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from linbias.models import fields
from linbias.models.decoder import decoder
from linbias.models.decoder.linbias import LinbiasForCausalLM
from linbias.models.decoder.positions import Alibi

_BAICHUAN2_VOCABULARY = 125_696


class BaichuanConfig(fields.CheckedConfig):
    """Describe a Baichuan model with ALiBi: the original's fields, and some of ours."""

    model_type = "baichuan"
    num_key_value_heads = property(lambda self: self.num_attention_heads)
    head_size = property(lambda self: self.hidden_size // self.num_attention_heads)
    train_length = property(lambda self: self.model_max_length)
    slope_schedule = "paper"
    attention_dropout = 0.0

    vocab_size: int = 64_000
    hidden_size: int = 5120
    intermediate_size: int = 13_696
    num_hidden_layers: int = 40
    num_attention_heads: int = 40
    hidden_act: str = "silu"
    model_max_length: int = 4096  # from which slope_scale="interpolate" acts, and no limit
    rms_norm_eps: float = 1e-6
    # Divide each row of the output weights by its norm; None: if the vocabulary is Baichuan2's.
    normalize_head: bool | None = None
    slope_scale: str | float | None = None
    attention_implementation: str = "auto"
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        fields.check_fields(self, _RULES)
        fields.check_shared_width(self)
        words = "absent: the models of 7B, which have it, have rotary positions instead of ALiBi"
        fields.require(
            self, "max_position_embeddings", self.max_position_embeddings is None, words
        )
        if kwargs.get("z_loss_weight"):  # a part of the loss that is not built
            raise ValueError(
                f"BaichuanConfig: z_loss_weight must be 0, got {kwargs['z_loss_weight']!r}"
            )
        if self.normalize_head is None:
            self.normalize_head = self.vocab_size == _BAICHUAN2_VOCABULARY
        super().__post_init__(**kwargs)


_RULES = {
    **fields.shared_rules(BaichuanConfig),
    "intermediate_size": fields.COUNT,
    "hidden_act": fields.ACTIVATION,
    "tie_word_embeddings": fields.Rule("False", lambda value: value is False),
    "normalize_head": fields.Rule(
        "None, True or False", lambda value: value is None or fields.FLAG.holds(value)
    ),
}


class SelfAttention(decoder.SelfAttention):
    names = ("W_pack", "o_proj")

    def __init__(self, config: BaichuanConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class FeedForward(nn.Module):
    """down(act(gate) * up)."""

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderBlock(decoder.DecoderBlock):
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(self, config: BaichuanConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer_index)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Identity()


class IndexedAlibi(Alibi):
    """Distances count every place of a row, as the original's do."""

    counts_hidden = True


class BaichuanPreTrainedModel(decoder.DecoderPreTrainedModel):
    config_class = BaichuanConfig


class BaichuanModel(decoder.Decoder, BaichuanPreTrainedModel):
    """Token ids to hidden states; call, padding and cache are those of `decoder.Decoder`."""

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = IndexedAlibi(config)
        self.dropout = nn.Identity()
        self.layers = nn.ModuleList(
            DecoderBlock(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()


class NormHead(nn.Linear):
    """The product with weights whose rows have norm 1."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        norms = torch.linalg.vector_norm(self.weight, dim=-1, dtype=wide).clamp(min=1e-12)
        return linear(hidden, self.weight) / norms.to(hidden.dtype)


class BaichuanForCausalLM(BaichuanPreTrainedModel, decoder.CausalGenerationMixin):
    """Predict the next token. Call, loss and logits are those of `LinbiasForCausalLM`."""

    forward = LinbiasForCausalLM.forward

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        head = NormHead if config.normalize_head else nn.Linear
        self.lm_head = head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
