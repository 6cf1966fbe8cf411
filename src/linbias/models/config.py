"""The settings of a language model: one flat, checked record, saved as config.json."""

import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from linbias.schedules import SCHEDULES

POSITIONS = ("alibi", "sinusoidal", "learned", "rotary", "t5", "none")
BLOCKS = ("sequential", "parallel")


class LinbiasConfig(PreTrainedConfig):
    """Describe a decoder-only language model and how it is told the order of its tokens.

    The defaults are the small byte-level model of `linbias extrapolate`. Values given as None are
    filled in, so that a finished configuration holds numbers only.

    Args:
        vocab_size: Number of token ids; 256 reads bytes.
        hidden_size: Width of the residual stream, a multiple of num_attention_heads.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Query heads H.
        num_key_value_heads: Key/value heads G, of which H is a multiple. None means H, or 1
            (multi-query) where block is "parallel".
        intermediate_size: Width inside the feed-forward part. None means 4 * hidden_size.
        position: "alibi", "sinusoidal", "learned", "rotary", "t5" or "none"; see
            `linbias.models.positions`.
        block: "sequential" (attention, then feed-forward) or "parallel" (both read the same normed
            input).
        train_length: Tokens per training sequence. It sizes the learned table and anchors
            slope_scale.
        slope_schedule: ALiBi slopes, a name known to `linbias.slopes`.
        slope_scale: Factor on the ALiBi slopes at inference. None leaves them; a positive number
            multiplies them; "interpolate" multiplies by train_length / S wherever a row has S >
            train_length keys (arXiv 2310.13017). S is that of each call: with "interpolate" the
            slopes shrink while a cached decode goes beyond train_length, so it no longer equals
            one forward over the whole text.
        rotary_base: Ratio of the slowest rotary wavelength to the fastest.
        t5_num_buckets: Distances that the T5 bias tells apart; the nearer half exactly, the rest
            by logarithm.
        t5_max_distance: Distance from which on the T5 bias no longer changes.
        hidden_dropout: Dropout on the embedded tokens and on what each block adds.
        attention_dropout: Dropout on the attention weights.
        layer_norm_eps: Added to the variance in every layer norm.
        initializer_range: Standard deviation of fresh weights.
        tie_word_embeddings: Read the output weights from the token embedding.
        attention_implementation: Name handed to `linbias.torch.attention`; only "alibi" uses it.
            (Transformers' own `attn_implementation` chooses among kernels that know nothing of
            slopes, and is not used.)
        use_cache: Keep keys and values for decoding when the model is not training.

    Raises:
        ValueError: A field breaks its rule; the message names the field, the rule and the value.

    Example:
        >>> LinbiasConfig(block="parallel").num_key_value_heads
        1
    """

    model_type = "linbias"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 256
    hidden_size: int = 192
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    intermediate_size: int = None  # type: ignore[assignment]  # likewise
    position: str = "alibi"
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
        self._check_counts("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        self._check_counts("train_length", "t5_num_buckets", "t5_max_distance")
        heads = 1 if self.block == "parallel" else self.num_attention_heads
        self._fill("num_key_value_heads", heads)
        self._fill("intermediate_size", 4 * self.hidden_size)
        self._check_counts("num_key_value_heads", "intermediate_size")
        self._check_names()
        self._check_fit()
        self._check_numbers()
        super().__post_init__(**kwargs)

    @property
    def head_size(self) -> int:
        """Numbers per head, D."""
        return self.hidden_size // self.num_attention_heads

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._require(name, whole and value >= 1, "an integer of at least 1")

    def _check_fit(self) -> None:
        """Check the sizes against each other."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        rule = f"a multiple of {groups} key/value heads"
        self._require("num_attention_heads", heads % groups == 0, rule)
        rule = f"a multiple of {heads} heads"
        self._require("hidden_size", self.hidden_size % heads == 0, rule)
        if self.position == "rotary":
            rule = f"even per head for position='rotary' ({heads} heads)"
            self._require("hidden_size", self.head_size % 2 == 0, rule)
        if self.position == "sinusoidal":
            rule = "even for position='sinusoidal'"
            self._require("hidden_size", self.hidden_size % 2 == 0, rule)
        self._require("t5_num_buckets", self.t5_num_buckets >= 2, "at least 2")
        exact = self.t5_num_buckets // 2
        rule = f"above half of t5_num_buckets, {exact}"
        self._require("t5_max_distance", self.t5_max_distance > exact, rule)

    def _check_names(self) -> None:
        choices = {"position": POSITIONS, "block": BLOCKS, "slope_schedule": SCHEDULES}
        for name, known in choices.items():
            self._require(name, getattr(self, name) in known, f"one of {known}")
        implementation = self.attention_implementation
        named = isinstance(implementation, str) and implementation != ""
        self._require("attention_implementation", named, "the name of an implementation")

    def _check_numbers(self) -> None:
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and 0 <= value < 1, "a number in [0, 1)")
        for name in ("layer_norm_eps", "initializer_range", "rotary_base"):
            self._require(name, _is_positive(getattr(self, name)), "a positive number")
        scale = self.slope_scale
        known = scale is None or scale == "interpolate" or _is_positive(scale)
        self._require("slope_scale", known, "None, 'interpolate' or a positive number")

    def _fill(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            setattr(self, name, value)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"LinbiasConfig: {name} must be {rule}, got {getattr(self, name)!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf
