"""Whole experiments by name: what `--preset` of `linbias train` and `linbias extrapolate` sets.

A preset gives the options of a command other defaults, so that an option that is given wins. The rest of it goes
to `TrainSettings` as it is, and its fields of the model are those of `--set`, which win as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from linbias.lm.settings import TrainSettings


@dataclass(frozen=True)
class Preset:
    """One experiment.

    Attributes:
        text: Arguments of `load_corpus`.
        budget: How long to train, as a field of `TrainSettings`.
        training: Other fields of `TrainSettings`.
        model: Fields of `LinbiasConfig`.
    """

    text: dict[str, str]
    budget: dict[str, float | None]
    training: dict[str, Any]
    model: dict[str, Any]


# The text, sizes and optimizer are those of the annotated implementation of ALiBi (labml_nn.transformers.alibi).
PRESETS = {
    "annotated": Preset(
        text={"corpus": "tiny-shakespeare", "tokenizer": "characters"},
        budget={"epochs": 128},
        training={
            "length": 64,
            "validate_lengths": (80,),
            "validate_steps": 0.1,
            "prompt": "It is ",
            "batch_size": 128,
            "learning_rate": 6e-4,
            "learning_rate_floor": 0.1,
            "warmup_steps": 40,
            "weight_decay": 0.1,
            "clip": 1.0,
        },
        model={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "tie_word_embeddings": False,
        },
    )
}
_NONE = Preset({}, {}, {}, {})


def named(name: str | None) -> Preset:
    """The preset of a name; without one, a preset that sets nothing."""
    return _NONE if name is None else PRESETS[name]


def apply(context: typer.Context, name: str | None) -> str | None:
    """Give the options that are not on the command line the preset's values as defaults: the callback of `--preset`."""
    if name is None:
        return None
    if name not in PRESETS:
        raise ValueError(f"--preset: must be one of {', '.join(PRESETS)}, got {name!r}")
    preset = PRESETS[name]
    lengths = {
        "train_lengths": preset.training["length"],
        "test_lengths": preset.training["validate_lengths"],
    }
    defaults = {**preset.text, **preset.training, **lengths}
    options = [parameter.name for parameter in context.command.params]
    context.default_map = {
        option: _word(defaults[option]) for option in options if option in defaults
    }
    return name


def describe(name: str, text: dict[str, str], training: TrainSettings) -> str:
    """What a run with a preset does, in words: every setting that the preset has, with its value in this run."""
    preset = PRESETS[name]
    values = {
        **text,
        **{field: getattr(training, field) for field in preset.training},
        **{field: value for field, value in training.budget.items() if value is not None},
        **training.model,
    }
    return f"{name}: {in_words(values)}"


def in_words(values: dict[str, Any]) -> str:
    """Names and values as a list."""
    words = {name: _word(value) for name, value in values.items()}
    return ", ".join(f"{n} {w!r}" if " " in w else f"{n} {w}" for n, w in words.items())


def all_in_words(preset: Preset) -> str:
    """All that a preset sets."""
    return in_words({**preset.text, **preset.training, **preset.budget, **preset.model})


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
