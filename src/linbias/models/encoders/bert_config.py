"""The settings of an ALiBi encoder: one flat, checked record, saved as config.json."""

from typing import Any

from linbias.models import fields


class LinbiasBertConfig(fields.CheckedConfig):
    """Describe a BERT whose attention knows order by ALiBi, symmetric on both sides, with a gated feed-forward part.

    The defaults are those of MosaicBERT and DNABERT-2 but for the sizes. `linbias.models.load` reads
    the configurations of the original folders.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream, a multiple of num_attention_heads.
        num_hidden_layers: Number of layers.
        num_attention_heads: Heads H.
        intermediate_size: Width inside the feed-forward part.
        type_vocab_size: Number of token types.
        hidden_act: Activation of the masked language model's head.
        feed_forward_act: Activation in the feed-forward part.
        gate_first: Whether the first half of the gated projection goes through the activation, or the second.
        query_key_norm: Layer norms of queries and keys over the whole width, before the split into heads.
        residual_norm: A second layer norm of the residual stream after attention.
        pooler: A tanh layer on the first token.
        train_length: Tokens per training sequence, from which slope_scale="interpolate" acts. No limit.
        slope_schedule: A name known to `linbias.slopes`.
        slope_scale: Factor on the slopes: None, a positive number, or "interpolate", train_length / S for a text of
            S > train_length tokens (arXiv 2310.13017).
        hidden_dropout: Dropout on the embedded tokens and on what each layer adds.
        attention_dropout: Dropout on the attention weights.
        classifier_dropout: Before a classifier; None means hidden_dropout.
        layer_norm_eps: Added to the variance in every layer norm but the head's.
        head_norm_eps: That of the masked language model's head.
        initializer_range: Standard deviation of fresh weights.
        tie_word_embeddings: Read the output weights of the masked language model from the token embedding.
        attention_implementation: As `implementation` of `linbias.torch.attention`.
        original: Of a model that came from an original folder: its `family`, its `config`, and the `prefix` before
            the names of its weights, with which `linbias convert` goes back.

    Raises:
        ValueError: A field breaks its rule; the message names the field, the rule and the value.

    Example:
        >>> LinbiasBertConfig(hidden_size=48, num_attention_heads=6).head_size
        8
    """

    model_type = "linbias_bert"

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    feed_forward_act: str = "gelu"
    gate_first: bool = True
    query_key_norm: bool = False
    residual_norm: bool = False
    pooler: bool = False
    train_length: int = 512
    slope_schedule: str = "paper"
    slope_scale: str | float | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None
    layer_norm_eps: float = 1e-12
    head_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention_implementation: str = "auto"
    pad_token_id: int | None = 0
    original: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        fields.check_fields(self, _RULES)
        fields.check_shared_width(self)
        pad = self.pad_token_id
        is_token = pad is None or (fields.is_integer(pad) and 0 <= pad < self.vocab_size)
        fields.require(self, "pad_token_id", is_token, f"None or in [0, {self.vocab_size})")
        super().__post_init__(**kwargs)

    @property
    def head_size(self) -> int:
        """Numbers per head, D."""
        return self.hidden_size // self.num_attention_heads


_RULES = {
    **{name: rule for name, rule in fields.SHARED.items() if name in LinbiasBertConfig.__annotations__},
    **dict.fromkeys(("intermediate_size", "type_vocab_size"), fields.COUNT),
    **dict.fromkeys(("hidden_act", "feed_forward_act"), fields.ACTIVATION),
    **dict.fromkeys(
        ("gate_first", "query_key_norm", "residual_norm", "pooler", "tie_word_embeddings"), fields.FLAG
    ),
    "hidden_dropout": fields.PROBABILITY,
    "classifier_dropout": fields.optional(fields.PROBABILITY),
    **dict.fromkeys(("head_norm_eps", "initializer_range"), fields.POSITIVE),
    "id2label": fields.SHARED["id2label"],
}  # fmt: skip
