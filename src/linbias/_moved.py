"""Modules that moved: the import of an old name says what to write now."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# An old module, which answers for what was below it too, and what to write in its place.
MOVED = {
    "linbias.data.hub": "linbias.data.data_sets",
    "linbias.data.reading": "linbias.lm.windows",
    "linbias.lm.methods": "linbias.methods",
    **{
        f"linbias.data.{name}": f"linbias.lm.paper.{name}"
        for name in ("batches", "blocks", "prepare", "ranges", "store")
    },
    "linbias.lm.train": "from linbias.lm import TrainSettings, train",
    "linbias.lm.evaluate": "from linbias.lm import evaluate",
    "linbias.lm.extrapolate": "from linbias.lm import extrapolate",
    "linbias.lm.generate": "from linbias.lm import generate",
    "linbias.lm.masked": "linbias.lm.hidden",
    "linbias.lm.spans": "linbias.lm.hidden",
    "linbias.lm.terminal": "linbias.cli.report",
    "linbias.paper": "linbias.lm.paper",
    "linbias.models.load": "from linbias.models import load",
    "linbias.models.padding": "linbias.models.places",
    "linbias.transformers": "linbias.models, which has its names (from linbias.models import fuse)",
    "linbias.runs": "linbias.lm.train and its like: what runs share is private",
}


class _Finder(MetaPathFinder):
    """Asked last, for what no other finder knows."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                raise ModuleNotFoundError(f"{name} has moved; write {new}", name=name)


def answer_for_moved_modules() -> None:
    """Let imports of modules that moved raise an error that names the new place."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
