"""The text that a model is scored on: a file by its name, whole, or a split of a corpus."""

from __future__ import annotations

import warnings
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from linbias._run.files import read_json
from linbias.data import SPLITS
from linbias.data.corpus import load_corpus, read_file
from linbias.models.loading import Files, encode, encoder


@dataclass(frozen=True)
class TokenText:
    """A text as a model's tokens.

    Attributes:
        name: As it was given.
        split: "train", "valid" or "test"; None for a file that was read whole.
        ids: [N], integers.
        num_bytes: UTF-8 bytes of the text.
        total_bytes: UTF-8 bytes of the file; of a split, those that were read.
    """

    name: str
    split: str | None
    ids: NDArray[np.integer[Any]]
    num_bytes: int
    total_bytes: int

    def scored(self, num_scored: int) -> dict[str, float]:
        """How much of the text so many predictions from its start are: bytes, and their share."""
        is_all = num_scored == len(self.ids) - 1
        num_bytes = (
            self.num_bytes if is_all else round(self.num_bytes * num_scored / len(self.ids))
        )
        return {"text_bytes": self.total_bytes, "share": num_bytes / self.total_bytes}

    def describe(self, num_scored: int) -> str:
        """What was scored, by so many predictions from the start, in words.

        Example:
            >>> text = TokenText("a.txt", None, np.zeros(101), num_bytes=500, total_bytes=1000)
            >>> text.describe(50)
            'a.txt: scored 50 of 100 tokens, 248 of 1,000 bytes (24.8% of the file)'
        """
        share = self.scored(num_scored)["share"]
        what = "the file" if self.split is None else f"the {self.split} split"
        return (
            f"{self.name}: scored {num_scored:,} of {len(self.ids) - 1:,} tokens, "
            f"{round(share * self.total_bytes):,} of {self.total_bytes:,} bytes ({share:.1%} of {what})"
        )


def read_text(
    model: str | Path | Files, name: str, split: str | None = None, *, max_bytes: int | None = None
) -> TokenText:
    """Reads a text as the tokens of a model (a folder, a name or its `Files`).

    A file that is given by its name is read whole, unless `split` asks for a split of it; any
    other corpus, as for `load_corpus`, gives its test split by default. `max_bytes` reads at most
    so many, of the file or of each split. A folder that `linbias.lm.train` made remembers its
    corpus: where the same place is read now, but not the split that was held out (a file whole; or
    files came or went, so that the corpus is split otherwise), a `UserWarning` says so: the model
    may have been trained on the text.

    Raises:
        ValueError: There is no such corpus or split, it is no UTF-8 text, or the model has no
            readable tokenizer.
    """
    files = Files.at("read_text", model, "model")
    if split is not None and split not in SPLITS:
        raise ValueError(f"read_text: split must be one of {', '.join(SPLITS)}, got {split!r}")
    path = Path(name).expanduser()
    if split is None and path.is_file():
        content, total_bytes = read_file(path, max_bytes=max_bytes), path.stat().st_size
        _warn_of_trained_text(Path(files.name), path.resolve())
        return _as_tokens(files, name, None, content, total_bytes)
    split = split or "test"
    corpus = load_corpus(name, max_bytes=max_bytes)
    _warn_of_trained_text(Path(files.name), Path(corpus.location), corpus.splits)
    content = getattr(corpus, split).tobytes()  # the ids of the byte tokenizer are the bytes
    return _as_tokens(files, name, split, content, len(content))


_BLOCK = 1 << 16  # bytes that are read at a time
_LONG_LINE = 1 << 20  # bytes after which a line is cut


def stream_text(
    model: str | Path | Files, file: BinaryIO, name: str
) -> Iterator[tuple[NDArray[np.integer[Any]], int]]:
    """Reads a text of any length as the tokens of a model, a few thousand at a time.

    Pieces, as ids [n] and their UTF-8 bytes, end where a line does, since tokens hardly ever cross
    a line end; the tokenizers of linbias never make such. `file` is read as bytes, and a pipe will
    do.

    Raises:
        ValueError: The text of that name holds a NUL, is not UTF-8, or ends inside a character;
            what came before has been given.
    """
    encode, decoder = encoder(model), getincrementaldecoder("utf-8")()
    num_read, pending = 0, ""
    rule = "stream_text: text must be UTF-8"
    while True:
        block = file.read(_BLOCK)
        if (at := block.find(0)) >= 0:
            raise ValueError(f"{rule}, got a NUL at byte {num_read + at:,} of {name}")
        unfinished = len(decoder.getstate()[0])
        try:
            pending += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = num_read - unfinished + error.start
            what = (
                f"another byte at {at:,}" if block else f"an end inside a character at byte {at:,}"
            )
            raise ValueError(f"{rule}, got {what} of {name}") from error
        num_read += len(block)
        cut = len(pending) if not block else pending.rfind("\n") + 1
        if cut == 0 and len(pending) >= _LONG_LINE:
            cut = len(pending)
        if cut:
            piece, pending = pending[:cut].encode(), pending[cut:]
            yield encode(piece), len(piece)
        if not block:
            return


def _as_tokens(
    files: Files, name: str, split: str | None, content: bytes, total_bytes: int
) -> TokenText:
    ids = encode(files, content)
    if len(ids) < 2:
        raise ValueError(f"read_text: text must hold two tokens or more, got {len(ids)} in {name}")
    return TokenText(
        name=name, split=split, ids=ids, num_bytes=len(content), total_bytes=total_bytes
    )


def _warn_of_trained_text(model: Path, here: Path, splits: dict[str, str] | None = None) -> None:
    """Warns if the model's run read this place, and did not hold out what is scored.

    `splits` says how it is split, as `Corpus.splits`; None where it is read whole.
    """
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
