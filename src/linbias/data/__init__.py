"""Text as tokens: `load_corpus` reads any text, splits it and tokenises it.

Importing this does not import torch: worker processes that need `SPLITS` start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from linbias import _extras

if TYPE_CHECKING:
    from linbias.data.corpus import Corpus, load_corpus

__all__ = ["Corpus", "load_corpus"]

SPLITS = ("train", "valid", "test")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'linbias.data' has no attribute {name!r}")
    _extras.require("linbias.data")
    return getattr(import_module("linbias.data.corpus"), name)
