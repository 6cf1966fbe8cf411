"""Language models that are trained short and tested long.

Each name loads what it needs (PyTorch, Transformers) when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from linbias import _extras

if TYPE_CHECKING:
    from linbias.lm.evaluation import evaluate
    from linbias.lm.extrapolation import extrapolate
    from linbias.lm.generation import generate
    from linbias.lm.report.summary import read_results
    from linbias.lm.settings import ExtrapolateSettings, TrainSettings
    from linbias.lm.streaming import StreamScorer, stream
    from linbias.lm.training import train

__all__ = [
    "ExtrapolateSettings",
    "StreamScorer",
    "TrainSettings",
    "evaluate",
    "extrapolate",
    "generate",
    "read_results",
    "stream",
    "train",
]

_MODULES = {
    "ExtrapolateSettings": "settings",
    "StreamScorer": "streaming",
    "TrainSettings": "settings",
    "evaluate": "evaluation",
    "extrapolate": "extrapolation",
    "generate": "generation",
    "read_results": "report.summary",
    "stream": "streaming",
    "train": "training",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'linbias.lm' has no attribute {name!r}")
    _extras.require("linbias.lm")
    return getattr(import_module(f"linbias.lm.{_MODULES[name]}"), name)
