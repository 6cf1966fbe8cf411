"""How the paper's models are trained, as one checked record per model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Recipe:
    """What determines a run, besides its data and the number of processes.

    The defaults are the paper's model for blocks of 512 tokens, one row of `PRESETS`.

    Attributes:
        position: "alibi", "sinusoidal", "rotary", "t5" or "none".
        length: Tokens per block, the paper's L.
        model: Fields of `PaperConfig` that differ from its defaults; the vocabulary, `position` and
            `train_length` follow from the data and the fields above.
        max_tokens: Most tokens in a batch, which one process reads at once; at least `length`.
        rows_multiple: Batches have fewer than this many blocks, or a multiple of it: the original's
            `--required-batch-size-multiple`.
        batches_per_update: Batches whose gradients one update adds up, over all processes together:
            the original's `--update-freq` times its number of GPUs.
        updates: Updates of the weights.
        lr: Peak of the learning rate.
        warmup: Updates that raise it from `warmup_init_lr` to `lr`.
        warmup_init_lr: Where the warmup starts.
        period: Updates of the first cosine; None ends it with the run.
        min_lr: Floor of the first cosine.
        t_mult: Factor on the length of each further cosine.
        lr_shrink: Factor on the height of each further cosine.
        momentum: Of Nesterov's accelerated gradient.
        weight_decay: Share of a weight that an update takes away, per unit of learning rate.
        clip: Largest norm of the gradient of the mean loss in nats per token.
        precision: "fp32", "bf16", or "fp16" (GPU only) for matrix products; weights are float32.
        seed: Fixes the initial weights, the order of the batches, and dropout.
        validate_every: Updates between validations; None validates after every pass over the
            training text, 0 never. The last update is validated too.
        save_every: Updates between checkpoints.
        log_every: Updates between lines of the log.
        device: "auto" takes a GPU where there is one; or "cpu".
        fsdp: Transformers' `fsdp_config`, for runs under torchrun; {} takes its defaults.

    Raises:
        ValueError: A field breaks its rule.

    Example:
        >>> Recipe(position="rotary", updates=100, warmup=10).cosine_period
        90
    """

    position: str = "alibi"
    length: int = 512
    model: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 9216
    rows_multiple: int = 1
    batches_per_update: int = 8
    updates: int = 286_000
    lr: float = 1.0
    warmup: int = 16_000
    warmup_init_lr: float = 1e-7
    period: int | None = None
    min_lr: float = 1e-4
    t_mult: float = 2.0
    lr_shrink: float = 0.75
    momentum: float = 0.99
    weight_decay: float = 0.0
    clip: float = 0.1
    precision: str = "fp16"
    seed: int = 1
    validate_every: int | None = None
    save_every: int = 1000
    log_every: int = 100
    device: str = "auto"
    fsdp: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("length", "rows_multiple", "batches_per_update", "updates"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("save_every", "log_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("period", self.period is None or self.period >= 1, "at least 1")
        multiple = self.save_every % self.log_every == 0
        self._require("save_every", multiple, f"a multiple of log_every, {self.log_every}")
        for name in ("warmup", "warmup_init_lr", "min_lr", "weight_decay", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("validate_every", (self.validate_every or 0) >= 0, "at least 0")
        self._require("max_tokens", self.max_tokens >= self.length, f"at least {self.length}")
        for name in ("lr", "lr_shrink", "clip"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("t_mult", self.t_mult >= 1, "at least 1")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        self._require("precision", self.precision in PRECISIONS, f"one of {PRECISIONS}")
        self._require("device", self.device in ("auto", "cpu"), "'auto' or 'cpu'")
        derived = sorted(set(self.model) & {"vocab_size", "train_length", "position"})
        self._require("model", not derived, f"without {derived}, which follow from other fields")

    @property
    def cosine_period(self) -> int:
        """Updates of the first cosine."""
        return self.period or max(1, self.updates - self.warmup)

    def lasting(self, updates: int) -> Recipe:
        """The same recipe for another number of updates: warmup and cosine keep their shares."""
        factor = updates / self.updates
        period = None if self.period is None else max(1, round(self.period * factor))
        warmup = round(self.warmup * factor)
        return replace(self, updates=updates, warmup=warmup, period=period)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"Recipe: {name} must be {rule}, got {getattr(self, name)!r}")


# The README's flags, on eight GPUs. 286,000 updates are then about 200 passes over WikiText-103.
_ROWS = {
    **{f"L{length}": Recipe(length=length) for length in (64, 128, 256, 512, 1024, 1536, 2048)},
    "L3072": Recipe(length=3072, max_tokens=3072, batches_per_update=24),
}
_SMALL = Recipe(
    model={
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 2048,
        "cutoffs": [4000, 16000],
        "dropout": 0.1,
    },
    max_tokens=16384,
    batches_per_update=1,
    updates=4000,
    warmup=400,
    precision="bf16",
    validate_every=500,
    save_every=500,
    log_every=20,
)
_TINY = Recipe(
    length=128,
    model={
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "cutoffs": [2000, 10000],
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "softmax_dropout": 0.0,
    },
    max_tokens=512,
    batches_per_update=1,
    updates=2000,
    warmup=200,
    precision="fp32",
    validate_every=1000,
    save_every=200,
    log_every=20,
)

PRESETS = {**_ROWS, "small": _SMALL, "tiny": _TINY}
"""The rows of the paper's table, named by block length; `small` is for one GPU and `tiny` for two
CPU cores: minutes, on text of WikiText-2's size or more."""
