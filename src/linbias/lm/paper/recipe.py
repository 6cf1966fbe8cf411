"""How the paper's models are trained, as one checked record per model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from linbias.lm.settings import DEVICES, PRECISIONS


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
        batches_per_step: Batches whose gradients one step adds up, over all processes together:
            the original's `--update-freq` times its number of GPUs.
        steps: Updates of the weights.
        learning_rate: Peak of the schedule.
        warmup_steps: Steps that raise it from `initial_learning_rate` to `learning_rate`.
        initial_learning_rate: Where the warmup starts.
        period: Steps of the first cosine; None ends it with the run.
        min_learning_rate: Floor of the first cosine.
        t_mult: Factor on the length of each further cosine.
        shrink: Factor on the height of each further cosine.
        momentum: Of Nesterov's accelerated gradient.
        weight_decay: Share of a weight that a step takes away, per unit of learning rate.
        clip: Largest norm of the gradient of the mean loss in nats per token.
        precision: "fp32", "bf16", or "fp16" (GPU only), of matrix products; weights are float32.
        seed: Fixes the initial weights, the order of the batches, and dropout.
        validate_steps: Steps between validations; None validates after every pass over the
            training text, 0 never. The last step is validated too.
        save_steps: Steps between checkpoints.
        log_steps: Steps between lines of the log.
        device: "auto" takes a GPU where there is one; or "cpu".
        fsdp: Transformers' `fsdp_config`, for runs under torchrun; {} takes its defaults.

    Raises:
        ValueError: A field breaks its rule.

    Example:
        >>> Recipe(position="rotary", steps=100, warmup_steps=10).cosine_period
        90
    """

    position: str = "alibi"
    length: int = 512
    model: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 9216
    rows_multiple: int = 1
    batches_per_step: int = 8
    steps: int = 286_000
    learning_rate: float = 1.0
    warmup_steps: int = 16_000
    initial_learning_rate: float = 1e-7
    period: int | None = None
    min_learning_rate: float = 1e-4
    t_mult: float = 2.0
    shrink: float = 0.75
    momentum: float = 0.99
    weight_decay: float = 0.0
    clip: float = 0.1
    precision: str = "fp16"
    seed: int = 1
    validate_steps: int | None = None
    save_steps: int = 1000
    log_steps: int = 100
    device: str = "auto"
    fsdp: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("length", "rows_multiple", "batches_per_step", "steps"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("save_steps", "log_steps"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("period", self.period is None or self.period >= 1, "at least 1")
        multiple = self.save_steps % self.log_steps == 0
        self._require("save_steps", multiple, f"a multiple of log_steps, {self.log_steps}")
        for name in (
            "warmup_steps",
            "initial_learning_rate",
            "min_learning_rate",
            "weight_decay",
            "seed",
        ):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("validate_steps", (self.validate_steps or 0) >= 0, "at least 0")
        self._require("max_tokens", self.max_tokens >= self.length, f"at least {self.length}")
        for name in ("learning_rate", "shrink", "clip"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("t_mult", self.t_mult >= 1, "at least 1")
        self._require("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        self._require("precision", self.precision in PRECISIONS, f"one of {PRECISIONS}")
        self._require("device", self.device in DEVICES, "'auto' or 'cpu'")
        derived = sorted(set(self.model) & {"vocab_size", "train_length", "position"})
        self._require("model", not derived, f"without {derived}, which follow from other fields")

    @property
    def cosine_period(self) -> int:
        """Steps of the first cosine."""
        return self.period or max(1, self.steps - self.warmup_steps)

    def lasting(self, steps: int) -> Recipe:
        """The same recipe for another number of steps: warmup and cosine keep their shares."""
        factor = steps / self.steps
        period = None if self.period is None else max(1, round(self.period * factor))
        warmup_steps = round(self.warmup_steps * factor)
        return replace(self, steps=steps, warmup_steps=warmup_steps, period=period)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"Recipe: {name} must be {rule}, got {getattr(self, name)!r}")


# The README's flags, on eight GPUs. 286,000 steps are then about 200 passes over WikiText-103.
_ROWS = {
    **{f"L{length}": Recipe(length=length) for length in (64, 128, 256, 512, 1024, 1536, 2048)},
    "L3072": Recipe(length=3072, max_tokens=3072, batches_per_step=24),
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
    batches_per_step=1,
    steps=4000,
    warmup_steps=400,
    precision="bf16",
    validate_steps=500,
    save_steps=500,
    log_steps=20,
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
    batches_per_step=1,
    steps=2000,
    warmup_steps=200,
    precision="fp32",
    validate_steps=1000,
    save_steps=200,
    log_steps=20,
)

PRESETS = {**_ROWS, "small": _SMALL, "tiny": _TINY}
"""The rows of the paper's table, named by block length; `small` is for one GPU and `tiny` for two
CPU cores: minutes, on text of WikiText-2's size or more."""


def recipe_from_preset(
    preset: str, *, steps: int | None = None, model: dict[str, Any] | None = None, **changes: Any
) -> Recipe:
    """A preset with some of its fields changed.

    Args:
        preset: A name of `PRESETS`.
        steps: As for `Recipe.lasting`; None keeps those of the preset.
        model: Fields of `PaperConfig` that differ from those of the preset.
        changes: Other fields; None keeps the preset's value.

    Raises:
        ValueError: There is no such preset, or a field breaks its rule.

    Example:
        >>> recipe = recipe_from_preset("tiny", steps=20, model={"hidden_size": 64}, seed=None)
        >>> recipe.warmup_steps, recipe.model["hidden_size"], recipe.seed
        (2, 64, 1)
    """
    if preset not in PRESETS:
        raise ValueError(
            f"recipe_from_preset: preset must be one of {', '.join(PRESETS)}, got {preset!r}"
        )
    recipe = PRESETS[preset] if steps is None else PRESETS[preset].lasting(steps)
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(recipe, model={**recipe.model, **(model or {})}, **given)
