"""Whole experiments by name: what `--preset` of `linbias train` and `linbias extrapolate` sets.

A preset gives options other defaults, so that those which are given win. The rest of it goes to
`TrainSettings`; its fields of the model are those of `--set`, which win as well.
"""

from dataclasses import dataclass
from typing import Any

import typer

from linbias.cli.console import err
from linbias.lm.settings import TrainSettings


@dataclass(frozen=True)
class Preset:
    """One experiment."""

    text: dict[str, str]  # arguments of `load_corpus`
    budget: dict[str, float | None]  # how long to train, a field of `TrainSettings`
    training: dict[str, Any]  # its other fields
    model: dict[str, Any]  # fields of `LinbiasConfig`


# As of the annotated implementation of ALiBi (labml_nn.transformers.alibi).
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
    """The callback of `--preset`: its values become the defaults of options."""
    if name is None:
        return None
    if name not in PRESETS:
        raise ValueError(f"--preset: must be one of {', '.join(PRESETS)}, got {name!r}")
    preset = PRESETS[name]
    defaults = {
        **preset.text,
        **preset.training,
        "train_lengths": preset.training["length"],
        "test_lengths": preset.training["validate_lengths"],
    }
    options = {parameter.name for parameter in context.command.params}
    context.default_map = {o: _word(defaults[o]) for o in options & defaults.keys()}
    return name


def show(name: str | None, text: dict[str, str], training: TrainSettings) -> None:
    """Print every setting that a preset has, with its value in this run."""
    if name is None:
        return
    preset = PRESETS[name]
    values = {
        **text,
        **{field: getattr(training, field) for field in preset.training},
        **{field: value for field, value in training.budget.items() if value is not None},
        **training.model,
    }
    err.print(f"{name}: {_in_words(values)}", soft_wrap=True, markup=False)


def all_in_words(name: str) -> str:
    """All that a preset sets."""
    preset = PRESETS[name]
    return _in_words({**preset.text, **preset.training, **preset.budget, **preset.model})


def _in_words(values: dict[str, Any]) -> str:
    words = {name: _word(value) for name, value in values.items()}
    return ", ".join(f"{n} {w!r}" if " " in w else f"{n} {w}" for n, w in words.items())


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
