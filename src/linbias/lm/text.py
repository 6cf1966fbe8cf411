"""The text that a model is scored on: a file by its name, whole, or a split of a corpus."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from linbias._run.files import read_json
from linbias.data import SPLITS
from linbias.data.corpus import before_character, load_corpus, read_file, why_binary
from linbias.models.loading import Files, encode, encoder


@dataclass(frozen=True)
class TokenText:
    """A text as a model's tokens."""

    name: str  # as it was given
    split: str | None  # None for a file that was read whole
    ids: NDArray[np.integer[Any]]  # [N]
    num_bytes: int  # of the text
    total_bytes: int  # of the file; of a split, those that were read

    def scored(self, num_scored: int) -> dict[str, float]:
        """How much of the text so many predictions from its start are: bytes, and their share."""
        num_bytes = self.num_bytes
        if num_scored < len(self.ids) - 1:
            num_bytes = round(num_bytes * num_scored / len(self.ids))
        return {"text_bytes": self.total_bytes, "share": num_bytes / self.total_bytes}

    def describe(self, num_scored: int) -> str:
        """What was scored, by so many predictions from the start, in words."""
        share = self.scored(num_scored)["share"]
        what = "the file" if self.split is None else f"the {self.split} split"
        return (
            f"{self.name}: scored {num_scored:,} of {len(self.ids) - 1:,} tokens, "
            f"{round(share * self.total_bytes):,} of {self.total_bytes:,} bytes "
            f"({share:.1%} of {what})"
        )


def read_text(
    model: str | Path | Files, name: str, split: str | None = None, *, max_bytes: int | None = None
) -> TokenText:
    """A file or a split (or "test") as tokens; warns of text that the model was trained on."""
    files = Files.at("read_text", model, "model")
    if split is not None and split not in SPLITS:
        raise ValueError(f"read_text: split must be one of {', '.join(SPLITS)}, got {split!r}")
    path = Path(name).expanduser()
    if split is None and path.is_file():
        content, total_bytes = read_file(path, max_bytes=max_bytes), path.stat().st_size
        _warn_of_trained_text(Path(files.name), path.resolve())
    else:
        split = split or "test"
        corpus = load_corpus(name, max_bytes=max_bytes)
        _warn_of_trained_text(Path(files.name), Path(corpus.location), corpus.splits)
        content = getattr(corpus, split).tobytes()  # the ids of the byte tokenizer are the bytes
        total_bytes = len(content)
    ids = encode(files, content)
    if len(ids) < 2:
        raise ValueError(f"read_text: text must hold two tokens or more, got {len(ids)} in {name}")
    return TokenText(
        name=name, split=split, ids=ids, num_bytes=len(content), total_bytes=total_bytes
    )


_BLOCK = 1 << 16  # bytes that are read at a time
_LONG_LINE = 1 << 20  # bytes after which a line is cut


def stream_text(
    model: str | Path | Files, file: BinaryIO, name: str
) -> Iterator[tuple[NDArray[np.integer[Any]], int]]:
    """The tokens of a text of any length, some lines at a time, with their bytes."""
    encode, pending, start = encoder(model), b"", 0
    while True:
        block = file.read(_BLOCK)
        pending += block
        cut = pending.rfind(b"\n") + 1 if block else len(pending)
        if cut == 0 and len(pending) >= _LONG_LINE:
            cut = before_character(pending, len(pending) - 3) or len(pending)
        part, pending = pending[:cut], pending[cut:]
        if reason := why_binary(part, start):
            raise ValueError(f"stream_text: text must be UTF-8, got {reason} of {name}")
        if part:
            yield encode(part), len(part)
        if not block:
            return
        start += cut


def _warn_of_trained_text(model: Path, here: Path, splits: dict[str, str] | None = None) -> None:
    """Warns if the model's run read this place, and did not hold out what is scored."""
    if model.parent.name == "checkpoints":
        model = model.parents[1]
    try:
        run = read_json(model / "settings.json", "read_text")
        location, trained = Path(run["location"]), run["corpus"]["splits"]
    except (ValueError, LookupError, TypeError, OSError):
        return  # no run of `train`, or one that its own folder no longer describes
    if splits == trained or not (location.is_relative_to(here) or here.is_relative_to(location)):
        return
    words = (
        f"text must be one that the model was not trained on, got {here}, of which the run in "
        f"{model} read a part (split 'test' is what it has not read)"
        if splits is None
        else f"corpus must be split as in training to hold no text of it, got {here} split "
        f"otherwise than the run in {model} (it read {location}); the model may have been trained "
        "on what is scored"
    )
    warnings.warn(f"read_text: {words}", stacklevel=3)
