"""MPT as its own code computes it, from folders that the MPT of Transformers refuses or runs with parts left out.

Transformers' class is that of MPT-7B and 30B. Other models have grouped heads, norms of queries and keys, biases,
another width of the feed-forward part, or scaled logits; and numbers of a type that Transformers refuses, such as
`"clip_qkv": 6` and `"attn_pdrop": 0.0`. Here the same modules, under the same names, have what a configuration asks
for, and always run fused. No code of the folder is run.

Written from the published code of llm-foundry; the attention is held against numbers that it computed.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import MptConfig, MptForCausalLM, PreTrainedConfig

from linbias.models import fields
from linbias.models.fused import fuse_by_default, mpt
from linbias.models.fused.family import check_texts, keep_mask_for_generate


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
    kv_n_heads: int | None = None
    qk_ln: bool = False
    qk_gn: bool = False


class LinbiasMptConfig(fields.CheckedConfig):
    """Describe an MPT model with ALiBi: the fields of the original config.json, in the original's defaults.

    Args:
        d_model: Width of the residual stream, a multiple of n_heads.
        n_heads: Query heads H.
        n_layers: Number of layers.
        expansion_ratio: Width inside the feed-forward part, in multiples of d_model.
        max_seq_len: Tokens per training sequence, from which slope_scale="interpolate" acts. No limit.
        vocab_size: Number of token ids.
        no_bias: Leave the biases of linear layers and norms out.
        norm_eps: Added to the variance in every norm.
        logit_scale: Factor on the logits, or "inv_sqrt_d_model".
        resid_pdrop: Dropout on what each layer adds.
        attn_config: `alibi` (True), `alibi_bias_max`, `attn_type` ("multihead_attention", "multiquery_attention", or
            "grouped_query_attention" with `kv_n_heads`), `attn_pdrop`, `clip_qkv`, `softmax_scale`, `qk_ln` (layer
            norms of queries and keys over all heads), `qk_gn` (over each head).
        initializer_range: Standard deviation of fresh weights.
        use_cache: Keep keys and values for decoding when the model is not training.
        tie_word_embeddings: Read the output weights from the token embedding.

    Raises:
        ValueError: A field breaks its rule, or asks for what is not built: rotary or learned positions, windows, capped
            scores, gated feed-forward parts, root-mean-square norms.

    Example:
        >>> attention = {"alibi": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2}
        >>> LinbiasMptConfig(d_model=48, n_heads=6, attn_config=attention).num_key_value_heads
        2
    """

    model_type = "mpt"
    sub_configs: ClassVar[dict[str, Any]] = {"attn_config": LinbiasMptAttentionConfig}
    attribute_map: ClassVar[dict[str, str]] = MptConfig.attribute_map | {
        "layer_norm_epsilon": "norm_eps"
    }

    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    expansion_ratio: float = 4
    max_seq_len: int = 2048
    vocab_size: int = 50_368
    no_bias: bool = False
    norm_eps: float = 1e-5
    logit_scale: float | str | None = None
    resid_pdrop: float = 0.0
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
        inner = 1 <= self.d_model * self.expansion_ratio <= fields.MAXIMA["intermediate_size"]
        words = (
            f"such that d_model * expansion_ratio is in [1, {fields.MAXIMA['intermediate_size']}]"
        )
        fields.require(self, "expansion_ratio", inner, words)
        mpt.check_supported(self, type(self).__name__)

    @property
    def inner_size(self) -> int:
        """Width inside the feed-forward part."""
        return int(self.d_model * self.expansion_ratio)

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values, G."""
        attention: Any = self.attn_config
        if attention.attn_type == "grouped_query_attention":
            return int(attention.kv_n_heads or self.n_heads)
        return 1 if attention.attn_type == "multiquery_attention" else self.n_heads


_POSITIVE_OR_NONE = fields.optional(fields.POSITIVE)
_RULES = {
    **dict.fromkeys(("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size"), fields.COUNT),
    **dict.fromkeys(("expansion_ratio", "norm_eps", "initializer_range"), fields.POSITIVE),
    "resid_pdrop": fields.PROBABILITY,
    **dict.fromkeys(("no_bias", "use_cache", "tie_word_embeddings"), fields.FLAG),
    "logit_scale": fields.Rule(
        "None, 'inv_sqrt_d_model' or a positive number",
        lambda value: value == "inv_sqrt_d_model" or _POSITIVE_OR_NONE.holds(value),
    ),
}
_ATTENTION_RULES = {
    "attn_type": fields.one_of(
        ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    ),
    **dict.fromkeys(("alibi", "qk_ln", "qk_gn"), fields.FLAG),
    "attn_pdrop": fields.ATTENTION_DROPOUT,
    "alibi_bias_max": fields.POSITIVE,
    **dict.fromkeys(("clip_qkv", "softmax_scale"), _POSITIVE_OR_NONE),
    "kv_n_heads": fields.optional(fields.COUNT),
}


class ScaledHead(nn.Linear):
    """Logits times a factor."""

    def __init__(self, config: LinbiasMptConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        scale = config.logit_scale
        self.scale = config.d_model**-0.5 if isinstance(scale, str) else float(scale or 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.scale


class LinbiasMptForCausalLM(MptForCausalLM):
    """An MPT model with ALiBi whose folder Transformers refuses, or runs with parts left out.

    Calls, caches, `generate`, training and the names of weights are those of Transformers' `MptForCausalLM`. It is fused from the
    start; `fuse(model, slope_scale=...)` sets options. Not applied: dropout on embedded tokens (`emb_pdrop`) and scaled
    gradients of the embedding (`embedding_fraction`), which matter in training alone.

    Example:
        >>> attention = {"alibi": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_ln": True}
        >>> config = LinbiasMptConfig(vocab_size=50, d_model=48, n_heads=6, n_layers=1, attn_config=attention)
        >>> LinbiasMptForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 50])
    """

    config_class = LinbiasMptConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = MptForCausalLM._tied_weights_keys

    def __init__(self, config: LinbiasMptConfig) -> None:
        super().__init__(config)
        for block in self.transformer.blocks:
            _complete(block, config)
        self.transformer.norm_f = _norm(config)
        if config.logit_scale is not None:
            self.lm_head = ScaledHead(config)
        fuse_by_default(self.transformer)
        check_texts(self.transformer)
        check_texts(self)
        self.create_masks_for_generate = keep_mask_for_generate
        self.post_init()


def _norm(config: LinbiasMptConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=not config.no_bias)


def _complete(block: Any, config: LinbiasMptConfig) -> None:
    """Give a block of Transformers what the configuration asks for."""
    attention: Any = config.attn_config
    size, inner, bias = config.d_model, config.inner_size, not config.no_bias
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
