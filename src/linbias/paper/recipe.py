"""How the paper's models are trained, as one checked record per model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from linbias.lm.settings import DEVICES, PRECISIONS, Checked


@dataclass(frozen=True)
class Recipe(Checked):
    """What determines a run on some data: of most fields, `OPTIONS` says what they are."""

    position: str = "alibi"
    length: int = 512
    model: dict[str, Any] = field(default_factory=dict)  # fields of `PaperConfig`
    max_tokens: int = 9216
    rows_multiple: int = 1
    batches_per_step: int = 8
    steps: int = 286_000
    learning_rate: float = 1.0
    warmup_steps: int = 16_000
    initial_learning_rate: float = 1e-7
    period: int | None = None  # ends with the run
    min_learning_rate: float = 1e-4
    t_mult: float = 2.0
    shrink: float = 0.75
    momentum: float = 0.99
    weight_decay: float = 0.0
    clip: float = 0.1
    precision: str = "fp16"
    seed: int = 1
    validate_steps: int | None = None  # validates after every pass over the text
    save_steps: int = 1000
    log_steps: int = 100
    device: str = "auto"
    fsdp: dict[str, Any] | None = None  # Transformers' `fsdp_config`; {} takes its defaults
    context_parallel: int = 1  # processes that share each batch, some tokens of every block each

    def __post_init__(self) -> None:
        each, length, log_steps = self._require_of_each, self.length, self.log_steps
        counts = ("length", "rows_multiple", "batches_per_step", "steps", "save_steps")
        each("at least 1", lambda n: n >= 1, *counts, "log_steps", "period", "t_mult")
        each(f"a multiple of log_steps, {log_steps}", lambda n: n % log_steps == 0, "save_steps")
        rates = ("initial_learning_rate", "min_learning_rate", "weight_decay")
        each("at least 0", lambda n: n >= 0, "warmup_steps", *rates, "seed", "validate_steps")
        each(f"at least {length}", lambda n: n >= length, "max_tokens")
        each("above 0", lambda n: n > 0, "learning_rate", "shrink", "clip")
        each("in [0, 1)", lambda n: 0 <= n < 1, "momentum")
        each(f"one of {PRECISIONS}", PRECISIONS.__contains__, "precision")
        each("'auto' or 'cpu'", DEVICES.__contains__, "device")
        each(f"from 1 to length = {length}", lambda n: 1 <= n <= length, "context_parallel")
        shards, rule = self.context_parallel, "1 unless position is 'alibi'"
        self._require("context_parallel", shards == 1 or self.position == "alibi", rule, shards)
        derived = sorted(set(self.model) & {"vocab_size", "train_length", "position"})
        rule = f"without {derived}, which follow from other fields"
        self._require("model", not derived, rule, self.model)

    @property
    def cosine_period(self) -> int:
        """Steps of the first cosine."""
        return self.period or max(1, self.steps - self.warmup_steps)

    def learning_rate_after(self, steps: int) -> float:
        """The learning rate after so many steps: linear warmup, then cosines that restart, each
        longer by the factor `t_mult` and lower by `shrink` (arXiv 1608.03983).
        """
        init, peak, warmup = self.initial_learning_rate, self.learning_rate, self.warmup_steps
        if steps < warmup:
            return init + steps * ((peak - init) / warmup)
        t, period, height = float(steps - warmup), float(self.cosine_period), 1.0
        while t >= period:
            t, period, height = t - period, period * self.t_mult, height * self.shrink
        low, high = self.min_learning_rate * height, peak * height
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * t / period))

    def lasting(self, steps: int) -> Recipe:
        """The same recipe for another number of steps: warmup and cosine keep their shares."""
        factor = steps / self.steps
        period = None if self.period is None else max(1, round(self.period * factor))
        warmup_steps = round(self.warmup_steps * factor)
        return replace(self, steps=steps, warmup_steps=warmup_steps, period=period)


# The fields that are options of a command: what they are, and the original's flag.
OPTIONS: dict[str, tuple[str, str]] = {
    "length": ("Tokens per block.", "--tokens-per-sample"),
    "max_tokens": ("Most tokens in a batch.", "--max-tokens"),
    "rows_multiple": (
        "Batches of fewer blocks than this, or a multiple of it: 8 as in the README of August "
        "2021, 1 as in later ones.",
        "--required-batch-size-multiple",
    ),
    "batches_per_step": ("Batches per step, over all processes.", "--update-freq x GPUs"),
    "steps": ("Updates of the weights; warmup and cosine keep their shares.", "--max-update"),
    "warmup_steps": ("Steps that raise the learning rate.", "--warmup-updates"),
    "learning_rate": ("Peak of the schedule.", "--lr, or --max-lr in 2021"),
    "initial_learning_rate": ("Where the warmup starts.", "--warmup-init-lr"),
    "min_learning_rate": ("Floor of the first cosine.", "--min-lr, or --lr in 2021"),
    "period": ("Steps of the first cosine.", "--lr-period-updates"),
    "t_mult": ("Factor on the length of each further cosine.", "--t-mult"),
    "shrink": ("Factor on the height of each further cosine.", "--lr-shrink"),
    "clip": ("Largest norm of the gradient.", "--clip-norm"),
    "momentum": ("Of Nesterov's accelerated gradient.", "--momentum"),
    "weight_decay": ("Share of a weight that a step takes away.", "--weight-decay"),
    "precision": ("'fp32', 'bf16', or on a GPU 'fp16'.", "--fp16"),
    "seed": ("Fixes weights, order of the text and dropout.", "--seed"),
    "validate_steps": ("Steps between validations; 0: none.", "--validate-interval-updates"),
    "save_steps": ("Steps between checkpoints.", "--save-interval-updates"),
    "log_steps": ("Steps between lines of history.jsonl.", "--log-interval"),
    "device": ("'auto' takes a GPU where there is one; or 'cpu'.", ""),
}

# Fields of `PaperConfig`, each with the original's name of it.
SIZES = {
    "hidden_size": "decoder_embed_dim",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_embed_dim",
    "train_length": "tokens_per_sample",
    "adaptive_factor": "adaptive_input_factor",
}
RATES = {
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "softmax_dropout": "adaptive_softmax_dropout",
}


# The rows of the paper's table, by block length, with the README's flags on eight GPUs: 286,000
# steps are about 200 passes over WikiText-103.
_ROWS = {
    **{f"L{length}": Recipe(length=length) for length in (64, 128, 256, 512, 1024, 1536, 2048)},
    "L3072": Recipe(length=3072, max_tokens=3072, batches_per_step=24),
}
_SMALL = Recipe(  # minutes on one GPU
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
_TINY = Recipe(  # minutes on two cores
    length=128,
    model={
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "cutoffs": [2000, 10000],
        **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
        **dict.fromkeys(("activation_dropout", "softmax_dropout"), 0.0),
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


def recipe_from_preset(
    preset: str, *, steps: int | None = None, model: dict[str, Any] | None = None, **changes: Any
) -> Recipe:
    """A preset lasting `steps`, with other values in some fields; None keeps the preset's."""
    if preset not in PRESETS:
        raise ValueError(
            f"recipe_from_preset: preset must be one of {', '.join(PRESETS)}, got {preset!r}"
        )
    recipe = PRESETS[preset] if steps is None else PRESETS[preset].lasting(steps)
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(recipe, model={**recipe.model, **(model or {})}, **given)
