"""The settings of the paper's language model, saved as config.json."""

from itertools import pairwise
from typing import Any

from linbias.methods import PAPER, methods_of
from linbias.models import fields

POSITIONS = methods_of(PAPER)
_MOST_BANDS = 64


class PaperConfig(fields.CheckedConfig):
    """The paper's language model, on WikiText-103; fields without a word are `LinbiasConfig`'s."""

    model_type = "linbias-paper"

    vocab_size: int = 267744
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    position: str = "alibi"
    train_length: int = 512
    cutoffs: tuple[int, ...] = (20000, 60000)  # first id of each band but the first
    adaptive_factor: float = 4.0  # by which each band is narrower than the one before
    dropout: float = 0.3  # of the embedded input, and of what each sub-layer adds
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1  # after the ReLU
    softmax_dropout: float = 0.2  # of the softmax' input, and inside its tails
    layer_norm_eps: float = 1e-5
    final_norm: bool = False  # whether a layer norm follows the last block
    # Whether the loss, as that of the original, leaves out the tail term of the second id of each
    # tail band: the original compares ids relative to their band with that of <pad>.
    ignore_tail_pad: bool = True
    slope_schedule: str = "paper"
    slope_scale: str | float | None = None
    rotary_base: float = 10000.0
    t5_num_buckets: int = 32
    t5_max_distance: int = 128
    attention_implementation: str = "auto"
    use_cache: bool = True
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int = 2

    def __post_init__(self, **kwargs: Any) -> None:
        fields.check_fields(self, _RULES)
        fields.check_shared_width(self)
        fields.check_positions(self)
        if self.position == "sinusoidal":
            rule = "at least 4 for position='sinusoidal'"
            fields.require(self, "hidden_size", self.hidden_size >= 4, rule)
        self._check_bands()
        self.cutoffs = tuple(self.cutoffs)  # JSON has lists only
        super().__post_init__(**kwargs)

    @property
    def head_size(self) -> int:
        """Numbers per head, D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def bands(self) -> list[tuple[int, int, int]]:
        """First id, one past the last id, and embedding width of every band."""
        edges = pairwise((0, *self.cutoffs, self.vocab_size))
        return [
            (start, stop, int(self.hidden_size // self.adaptive_factor**index))
            for index, (start, stop) in enumerate(edges)
        ]

    def _check_bands(self) -> None:
        """Check that every band has a second id, which counts as its padding, and a width."""
        cutoffs: Any = self.cutoffs
        listed = isinstance(cutoffs, list | tuple) and all(map(fields.is_integer, cutoffs))
        edges = (0, *cutoffs, self.vocab_size) if listed else ()
        wide = listed and all(stop - start >= 2 for start, stop in pairwise(edges))
        rule = f"ids that cut [0, {self.vocab_size}) into bands of 2 or more, or [] for one band"
        fields.require(self, "cutoffs", wide, rule)
        few = len(self.cutoffs) < _MOST_BANDS
        fields.require(self, "cutoffs", few, f"ids that make {_MOST_BANDS} bands at most")
        smallest = min(stop - start for start, stop in pairwise(edges))
        within = fields.is_integer(self.pad_token_id) and 0 <= self.pad_token_id < smallest
        fields.require(self, "pad_token_id", within, f"in [0, {smallest}), the smallest band")
        try:
            widths = [width for *_, width in self.bands]
        except ArithmeticError:  # its powers leave the range of floats
            widths = [0]
        rule = f"a factor that leaves {len(self.cutoffs) + 1} bands of {self.hidden_size} a width"
        holds = min(widths) >= 1 and max(widths) <= fields.MAXIMA["hidden_size"]
        fields.require(self, "adaptive_factor", holds, rule)


_RULES = {
    **fields.shared_rules(PaperConfig),
    "intermediate_size": fields.COUNT,
    "position": fields.one_of(POSITIONS),
    "adaptive_factor": fields.POSITIVE,
    **dict.fromkeys(("dropout", "activation_dropout", "softmax_dropout"), fields.PROBABILITY),
    **dict.fromkeys(("final_norm", "ignore_tail_pad"), fields.FLAG),
}
