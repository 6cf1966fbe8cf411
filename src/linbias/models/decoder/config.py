"""The settings of the project's own language models: checked records, saved as config.json."""

from typing import Any, ClassVar

from linbias.methods import DECODER, ENCODER, methods_of
from linbias.models import fields

POSITIONS, ENCODER_POSITIONS = methods_of(DECODER), methods_of(ENCODER)
BLOCKS = ("sequential", "parallel", "parallel_fused")


class LinbiasConfig(fields.CheckedConfig):
    """Describe a language model and how it learns the order of its tokens.

    The defaults are the small byte-level model of `linbias extrapolate`.

    Args:
        vocab_size: Number of token ids; 256 reads bytes.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Query heads H.
        num_key_value_heads: Key/value heads G, of which H is a multiple. None means H, or 1
            (multi-query) where block is "parallel" or "parallel_fused".
        head_size: Numbers per head, D. None means hidden_size / num_attention_heads.
        intermediate_size: Width inside the feed-forward part. None means 4 * hidden_size.
        position: "alibi", "forget", "cable", "sinusoidal", "learned", "rotary", "t5" or "none";
            see `linbias.models.decoder.positions`.
        encoder_position: None for a model that predicts the next token. A name makes one that
            reads in both directions (`LinbiasForMaskedLM`) by this method instead of `position`:
            "symmetric", "directional", "asymmetric", "random", "littlebird", "window",
            "sinusoidal", "learned", "rotary", "t5" or "none"; see
            `linbias.models.decoder.bidirectional`.
        window: Distance from a query beyond which encoder_position "window" hides keys.
        block: "sequential" (attention, then feed-forward), "parallel" (both read the same normed
            input), or "parallel_fused" (so, from one product, with SwiGLU and RMS norms).
        train_length: Tokens per training sequence: the rows of the learned table, and the length
            from which slope_scale="interpolate" acts.
        slope_schedule: ALiBi slopes, a name known to `linbias.slopes`.
        slope_scale: Factor on the ALiBi slopes; "interpolate" multiplies by train_length / S
            wherever a row has S > train_length keys (arXiv 2310.13017). S is that of each call, so
            that cached decoding beyond train_length no longer equals one forward over the whole
            text.
        rotary_base: Ratio of the slowest rotary wavelength to the fastest.
        t5_num_buckets: Distances that the T5 bias tells apart; the nearer half exactly, the rest
            by logarithm.
        t5_max_distance: Distance from which on the T5 bias no longer changes.
        hidden_dropout: Dropout on the embedded tokens and on what each block adds.
        attention_dropout: Dropout on the attention weights.
        layer_norm_eps: Added to the variance in every layer norm.
        initializer_range: Standard deviation of fresh weights.
        tie_word_embeddings: Read the output weights from the token embedding.
        attention_implementation: Name handed to `linbias.torch.attention`; only "alibi", "forget"
            and "cable" use it. Transformers' own `attn_implementation` is not used.
        use_cache: Keep keys and values for decoding when the model is not training.

    Raises:
        TypeError: There is no such field.
        ValueError: A field breaks its rule; the message names the field, the rule and the value.

    Example:
        >>> LinbiasConfig(block="parallel").num_key_value_heads
        1
    """

    model_type = "linbias"

    vocab_size: int = 256
    hidden_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    head_size: int = None  # type: ignore[assignment]  # likewise
    intermediate_size: int = None  # type: ignore[assignment]  # likewise
    position: str = "alibi"
    encoder_position: str | None = None
    window: int = 32
    block: str = "sequential"
    train_length: int = 128
    slope_schedule: str = "paper"
    slope_scale: str | float | None = None
    rotary_base: float = 10000.0
    t5_num_buckets: int = 32
    t5_max_distance: int = 128
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention_implementation: str = "auto"
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        fields.check_fields(self, _RULES)
        heads = self.num_attention_heads if self.block == "sequential" else 1
        self._fill("num_key_value_heads", heads)
        if self._fill("head_size", self.hidden_size // self.num_attention_heads):
            fields.check_shared_width(self)
        self._fill("intermediate_size", 4 * self.hidden_size)
        fields.check_fields(self, _RULES_ONCE_FILLED)
        groups = self.num_key_value_heads
        shared_evenly = self.num_attention_heads % groups == 0
        rule = f"a multiple of {groups} key/value heads"
        fields.require(self, "num_attention_heads", shared_evenly, rule)
        fields.check_positions(self)
        if self.encoder_position is not None:
            fields.check_even(self, "encoder_position")
        if self.encoder_position == "t5":
            rule = "at least 4 for encoder_position='t5'"
            fields.require(self, "t5_num_buckets", self.t5_num_buckets >= 4, rule)
        super().__post_init__(**kwargs)

    @property
    def method(self) -> str:
        return self.encoder_position or self.position

    @property
    def head_dim(self) -> int:
        """What Transformers calls `head_size`: its engine sizes pages by it."""
        return self.head_size

    def _fill(self, name: str, value: int) -> bool:
        """Fill in a field that was left open; say whether it was."""
        is_open = getattr(self, name) is None
        if is_open:
            setattr(self, name, value)
        return is_open


class LinbiasSeq2SeqConfig(LinbiasConfig):
    """Describe an encoder that reads in both directions, and a decoder that sees it.

    The arguments of `LinbiasConfig` mean the same here: `encoder_position` is the position method
    of the encoder, `position` that of the decoder, and all sizes are those of either.
    Cross-attention has no positions. `block` stays "sequential".

    Args:
        decoder_layers: Number of the decoder's blocks. None means num_hidden_layers.
        decoder_start_token_id: Begins what the decoder reads. None means bos_token_id.

    Raises:
        TypeError, ValueError: As of `LinbiasConfig`.

    Example:
        >>> config = LinbiasSeq2SeqConfig(num_hidden_layers=6, decoder_layers=2, bos_token_id=2)
        >>> config.encoder_position, config.position, config.decoder_start_token_id
        ('symmetric', 'alibi', 2)
    """

    model_type = "linbias-seq2seq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *LinbiasConfig.keys_to_ignore_at_inference,
        "encoder_last_hidden_state",
    ]

    encoder_position: str = "symmetric"
    decoder_layers: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._fill("decoder_layers", self.num_hidden_layers)
        fields.check_fields(self, _SEQ2SEQ_RULES)
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = kwargs.get("bos_token_id")


_RULES = {
    **fields.shared_rules(LinbiasConfig),
    "position": fields.one_of(POSITIONS),
    "encoder_position": fields.optional(fields.one_of(ENCODER_POSITIONS)),
    "block": fields.one_of(BLOCKS),
    "tie_word_embeddings": fields.FLAG,
}
_RULES_ONCE_FILLED = dict.fromkeys(
    ("num_key_value_heads", "head_size", "intermediate_size"), fields.COUNT
)
_SEQ2SEQ_RULES = {
    "encoder_position": fields.one_of(ENCODER_POSITIONS),
    "block": fields.Rule(
        "'sequential' in a sequence-to-sequence model", lambda value: value == "sequential"
    ),
    "decoder_layers": fields.COUNT,
    "is_encoder_decoder": fields.Rule("True for this model", lambda value: value is True),
}
