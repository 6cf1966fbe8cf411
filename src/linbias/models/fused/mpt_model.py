"""MPT as its own code computes it, from folders that Transformers refuses or runs in part.

Transformers' class is that of MPT-7B and 30B. Here the same modules, under the same names, have
what a configuration asks for, and run fused. Written from the published code of llm-foundry.
"""

from functools import wraps
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import MptConfig, MptForCausalLM, PreTrainedConfig

from linbias.models import fields
from linbias.models.decoder.decoder import CausalGenerationMixin
from linbias.models.fused import fuse_by_default, mpt
from linbias.models.fused.family import adapt_calls, keep_mask_for_generate


class LinbiasMptAttentionConfig(PreTrainedConfig):
    """The `attn_config` of a `LinbiasMptConfig`, which checks it."""

    base_config_key = "attn_config"

    attn_type: str = "multihead_attention"
    # Whole numbers where Transformers wants them: its class may load what is saved here.
    attn_pdrop: float = 0
    clip_qkv: float | None = None
    softmax_scale: float | None = None
    alibi: bool = False
    alibi_bias_max: float = 8
    kv_n_heads: int | None = None  # for attn_type="grouped_query_attention"
    qk_ln: bool = False  # norms of queries and keys over all heads
    qk_gn: bool = False  # over each head


class LinbiasMptConfig(fields.CheckedConfig):
    """Describe an MPT model with ALiBi: the fields of the original config.json, and its defaults.

    A field that breaks its rule, or asks for what is not built, is a ValueError.
    """

    model_type = "mpt"
    sub_configs: ClassVar[dict[str, Any]] = {"attn_config": LinbiasMptAttentionConfig}
    attribute_map: ClassVar[dict[str, str]] = MptConfig.attribute_map | {
        "layer_norm_epsilon": "norm_eps"
    }

    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    expansion_ratio: float = 4  # width inside the feed-forward part, in multiples of d_model
    max_seq_len: int = 2048  # from which slope_scale="interpolate" acts; no limit
    vocab_size: int = 50_368
    no_bias: bool = False  # of linear layers and norms
    norm_eps: float = 1e-5
    logit_scale: float | str | None = None  # a factor, or "inv_sqrt_d_model"
    resid_pdrop: float = 0.0  # dropout on what each layer adds
    attn_config: dict[str, Any] | LinbiasMptAttentionConfig | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        given = self.attn_config
        if not isinstance(given, LinbiasMptAttentionConfig):
            fields.require(self, "attn_config", isinstance(given, dict), "a mapping")
            self.attn_config = LinbiasMptAttentionConfig(**(given or {}))
        super().__post_init__(**kwargs)
        fields.check_fields(self, _RULES)
        fields.check_fields(self.attn_config, _ATTENTION_RULES)
        heads, shared = self.n_heads, self.num_key_value_heads
        fields.check_shared_width(self, "d_model")
        fields.require(
            self.attn_config, "kv_n_heads", heads % shared == 0, f"a divisor of {heads} heads"
        )
        most = fields.MAXIMA["intermediate_size"]
        fits = 1 <= self.d_model * self.expansion_ratio <= most
        words = f"such that d_model * expansion_ratio is in [1, {most}]"
        fields.require(self, "expansion_ratio", fits, words)
        mpt.check_supported(self, type(self).__name__)

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values, G."""
        attention: Any = self.attn_config
        if attention.attn_type == "grouped_query_attention":
            return int(attention.kv_n_heads or self.n_heads)
        return 1 if attention.attn_type == "multiquery_attention" else self.n_heads


_RULES = {
    **fields.shared_rules(LinbiasMptConfig),
    "expansion_ratio": fields.POSITIVE,
    **dict.fromkeys(("no_bias", "tie_word_embeddings"), fields.FLAG),
    "logit_scale": fields.Rule(
        f"None, 'inv_sqrt_d_model' or {fields.POSITIVE.words}",
        lambda value: value in (None, "inv_sqrt_d_model") or fields.POSITIVE.holds(value),
    ),
}
_ATTENTION_RULES = {
    **fields.shared_rules(LinbiasMptAttentionConfig),
    "attn_type": fields.one_of(
        ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    ),
    **dict.fromkeys(("alibi", "qk_ln", "qk_gn"), fields.FLAG),
}


class ScaledHead(nn.Linear):
    """Logits times a factor."""

    def __init__(self, config: LinbiasMptConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        scale = config.logit_scale
        self.scale = config.d_model**-0.5 if isinstance(scale, str) else float(scale or 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.scale


class LinbiasMptForCausalLM(CausalGenerationMixin, MptForCausalLM):
    """An MPT model with ALiBi whose folder Transformers refuses, or runs with parts left out.

    Not applied, since they act in training alone: `emb_pdrop` and `embedding_fraction`.
    """

    config_class = LinbiasMptConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = MptForCausalLM._tied_weights_keys
    create_masks_for_generate = staticmethod(keep_mask_for_generate)

    def __init__(self, config: LinbiasMptConfig) -> None:
        super().__init__(config)
        for block in self.transformer.blocks:
            _complete(block, config)
        self.transformer.norm_f = _norm(config)
        if config.logit_scale is not None:
            self.lm_head = ScaledHead(config)
        fuse_by_default(self.transformer)
        adapt_calls(self.transformer)
        adapt_calls(self)
        self.post_init()

    @wraps(MptForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - _TAKEN:  # which Transformers' own drops
            caller = f"{type(self).__name__}.forward()"
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}")
        return super().forward(*args, **kwargs)


_TAKEN = {*signature(MptForCausalLM.forward).parameters}
_TAKEN |= {"position_ids", "token_type_ids", "num_items_in_batch"}


def _norm(config: LinbiasMptConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=not config.no_bias)


def _complete(block: Any, config: LinbiasMptConfig) -> None:
    """Give a block of Transformers what the configuration asks for."""
    attention: Any = config.attn_config
    size, bias = config.d_model, not config.no_bias
    inner = int(size * config.expansion_ratio)
    attn, shared = block.attn, config.num_key_value_heads
    attn.kv_n_heads = shared
    attn.Wqkv = nn.Linear(size, size + 2 * shared * attn.head_dim, bias=bias)
    attn.out_proj = nn.Linear(size, size, bias=bias)
    if attention.qk_ln or attention.qk_gn:
        widths = (size, shared * attn.head_dim) if attention.qk_ln else 2 * (attn.head_dim,)
        attn.q_ln, attn.k_ln = (
            nn.LayerNorm(width, config.norm_eps, bias=bias) for width in widths
        )
    block.norm_1, block.norm_2 = _norm(config), _norm(config)
    block.ffn.up_proj = nn.Linear(size, inner, bias=bias)
    block.ffn.down_proj = nn.Linear(inner, size, bias=bias)
    block.ffn.hidden_dropout = block.resid_attn_dropout.p = config.resid_pdrop
