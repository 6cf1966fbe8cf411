"""ALiBi, attention with linear biases: the definition in NumPy.

The front ends are submodules that load when they are first named, and their framework with them:
`linbias.torch`, `linbias.jax`, `linbias.models`; `linbias.cpu` is the compiled core for NumPy
arrays, `linbias.compat` runs well-known ALiBi code under its own names. The project's own idea, to
read: `linbias.near_to_far`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from linbias import _extras, near_to_far
from linbias.definition import (
    attention,
    attention_backward,
    attention_weights,
    bias,
    distances,
    merge,
)
from linbias.explain import Explanation, explain
from linbias.schedules import slopes

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "attention",
    "attention_backward",
    "attention_weights",
    "bias",
    "distances",
    "explain",
    "merge",
    "near_to_far",
    "slopes",
]

_LOADED_WHEN_NAMED = (
    "compat",
    "cpu",
    "data",
    "explore",
    "jax",
    "lm",
    "models",
    "torch",
)

if not TYPE_CHECKING:  # a type checker asks for the import to be written out

    def __getattr__(name: str) -> object:
        if name in _LOADED_WHEN_NAMED:
            return import_module(f"linbias.{name}")
        if name == "plots":
            raise ImportError("linbias.plots went: Matplotlib draws what linbias.bias gives")
        raise AttributeError(f"module 'linbias' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """The public names, without parts that this install cannot load: `help` asks for each."""
        parts = (f"linbias.{name}" for name in _LOADED_WHEN_NAMED)
        there = [part for part in parts if part not in _extras.PARTS or not _extras.missing(part)]
        own = [name for name in globals() if name.startswith("__")]
        return sorted([*own, *__all__, *(part.rpartition(".")[2] for part in there)])
