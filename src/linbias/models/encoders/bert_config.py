"""The settings of an ALiBi encoder: one flat, checked record, saved as config.json."""

from typing import Any

from linbias.models import fields


class LinbiasBertConfig(fields.CheckedConfig):
    """Describe a BERT with symmetric ALiBi and a gated feed-forward part.

    The defaults are those of MosaicBERT and DNABERT-2 but for the sizes. A field that breaks its
    rule is a ValueError with its name, the rule and the value.
    """

    model_type = "linbias_bert"

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072  # inside the feed-forward part
    type_vocab_size: int = 2
    hidden_act: str = "gelu"  # of the masked language model's head
    feed_forward_act: str = "gelu"
    gate_first: bool = True  # which half of the gated projection goes through the activation
    query_key_norm: bool = False  # over the whole width, before the split into heads
    residual_norm: bool = False  # a second norm of the residual stream after attention
    pooler: bool = False  # a tanh layer on the first token
    train_length: int = 512  # from which slope_scale="interpolate" acts; no limit
    slope_schedule: str = "paper"
    slope_scale: str | float | None = None  # as of `fuse`
    hidden_dropout: float = 0.1  # on the embedded tokens and on what each layer adds
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None  # None: hidden_dropout
    layer_norm_eps: float = 1e-12
    head_norm_eps: float = 1e-12  # of the masked language model's head
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention_implementation: str = "auto"
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        fields.check_fields(self, _RULES)
        fields.check_shared_width(self)
        super().__post_init__(**kwargs)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


_RULES = {
    **fields.shared_rules(LinbiasBertConfig),
    "intermediate_size": fields.COUNT,
    **dict.fromkeys(("hidden_act", "feed_forward_act"), fields.ACTIVATION),
    **dict.fromkeys(("gate_first", "query_key_norm", "residual_norm", "pooler"), fields.FLAG),
    "tie_word_embeddings": fields.FLAG,
}
