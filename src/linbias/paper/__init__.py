"""The paper's own path: its data format, recipe, checkpoints and numbers.

`linbias.paper.prepare`, `train`, `checkpoint` and `evaluate` hold the steps. Nothing heavy loads before it is asked for:
the processes that count and number words have no use for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linbias.paper.config import PaperConfig
    from linbias.paper.model import PaperForCausalLM, PaperModel

__all__ = ["PaperConfig", "PaperForCausalLM", "PaperModel"]
_HOMES = {"PaperConfig": "config", "PaperForCausalLM": "model", "PaperModel": "model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
