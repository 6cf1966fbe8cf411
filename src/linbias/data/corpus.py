"""Text to train and test on: Python's own source, files, or a Hugging Face data set.

Every source ends as three texts that share no document, so that a test measures what a model has
learned, not what it has memorised. "stdlib", Python's own source, is about 9 MB on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from linbias._run.hub import answers
from linbias.data import SPLITS
from linbias.data.data_sets import TEXTS, as_line, open_data_set
from linbias.data.tokenizers import KINDS, TokenIds, Tokenizer, byte_tokenizer, train_bpe

HELD_OUT = 0.05  # share of the valid split, and of the test split

# A word between the dots of a file's name that says which split it is.
_NAMES_OF_SPLITS = {
    "train": {"train"},
    "valid": {"valid", "validation", "val", "dev"},
    "test": {"test"},
}
_TEXT_SUFFIXES = {".txt", ".md", ".py"}  # a name that ends so means a file, not a data set
_DATA_SET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

# Parts of the standard library that some distributions leave out, that later versions drop, or
# that are data rather than source. Without them, the corpus is much the same on every machine.
_NOT_STDLIB = set(
    "site-packages dist-packages test tests idlelib lib2to3 distutils tkinter turtledemo "
    "ensurepip pydoc_data sitecustomize.py".split()
)


@dataclass(frozen=True)
class Corpus:
    """A tokenised text in three splits.

    Attributes:
        name: The name that `load_corpus` was given.
        source: Where the text comes from, in words.
        tokenizer: Turns text into the ids below and back.
        train: [tokens], unsigned integers; likewise `valid` and `test`.
        valid: Text to choose settings by.
        test: Text to report.
        num_bytes: UTF-8 bytes of each split's text, by the split's name.
        fingerprint: SHA-256 of the texts and the tokenizer; the same for the same ids.
        location: "stdlib", the absolute path of a file or folder, or a data set's id.
        splits: By split, a SHA-256 of what belongs to it, not of its content: the paths of its
            files in the folder, or the bytes at which one text was cut.
    """

    name: str
    source: str
    tokenizer: Tokenizer
    train: TokenIds
    valid: TokenIds
    test: TokenIds
    num_bytes: dict[str, int]
    fingerprint: str
    location: str
    splits: dict[str, str]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split}={len(getattr(self, split)):,} tokens" for split in SPLITS)
        return f"Corpus({self.name!r}, {sizes}, vocab_size={self.tokenizer.vocab_size:,})"


class _Splits(NamedTuple):
    """The text of each split, and what belongs to it: paths of files, or two offsets in a text."""

    texts: dict[str, bytes]
    members: dict[str, list[Any]]


def load_corpus(
    name: str = "stdlib",
    *,
    tokenizer: str = "bytes",
    vocab_size: int = 4096,
    max_bytes: int | None = None,
) -> Corpus:
    """Reads a text, splits it into train, valid and test, and tokenises it.

    A folder may name its splits: train.txt, valid.txt and test.txt, or wiki.train.tokens and so on
    (also validation, val or dev); its other files are left out. Elsewhere a hash of its path
    inside the folder sends each file to one split: 5 % of them to test, 5 % to valid, the others
    to train; a file that repeats another's content is left out. Fewer than three files, or a data
    set without splits of its own, are one text cut in the same proportions.

    Args:
        name: "stdlib"; a text file or a folder (every file in it that is not hidden); or the id of
            a Hugging Face data set with a column "text", "owner/name" or
            "owner/name:configuration". "wikitext-103" and "wikitext-2" are short for
            Salesforce/wikitext, "tiny-shakespeare" for karpathy/tiny_shakespeare.
        tokenizer: "bytes", or "bpe" for byte pairs learned from the train split.
        vocab_size: Number of tokens of "bpe".
        max_bytes: At most this many bytes of UTF-8 per split; None means all.

    Raises:
        ValueError: No such corpus; a folder without files; a file is binary (holds a NUL, or is
            not UTF-8); the text is too short to be split; or a choice above is not one.

    Example:
        >>> corpus = load_corpus("stdlib", max_bytes=100_000)
        >>> corpus.train.dtype, corpus.tokenizer.vocab_size, corpus.num_bytes["train"]
        (dtype('uint8'), 256, 100000)
    """
    if tokenizer not in KINDS:
        raise ValueError(f"load_corpus: tokenizer must be one of {KINDS}, got {tokenizer!r}")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"load_corpus: max_bytes must be positive, got {max_bytes}")
    if name == "stdlib":
        splits, source = _split_files(_stdlib_files()), "source of Python's standard library"
        location = name
    elif paths := matching_files(name):
        path = Path(name).expanduser()
        root = path if path.is_dir() else path.parent
        files = {path.relative_to(root).as_posix(): _read_text(path) for path in paths}
        named = _named_splits(files)
        splits = named or _split_files(files)
        num_files = len(paths) if named is None else sum(map(len, named.members.values()))
        source = f"{num_files} file{'s' * (num_files > 1)} of {name}"
        location = str(path.resolve())
    elif _is_data_set(name):
        splits = _data_set_splits(name, max_bytes)
        location = TEXTS.get(name, name)
        source = f"Hugging Face data set {location}"
    else:
        raise _no_such_corpus(name)
    texts = {split: _clip(text, max_bytes) for split, text in splits.texts.items()}
    if not all(texts.values()):
        total = sum(map(len, texts.values()))
        raise ValueError(
            f"load_corpus: name must hold text for three splits, got {total} bytes in {name}"
        )
    digest, token_maker = _tokenizer(texts, tokenizer, vocab_size)
    return Corpus(
        name=name,
        source=source,
        tokenizer=token_maker,
        **{split: token_maker.encode(texts[split]) for split in SPLITS},
        num_bytes={split: len(text) for split, text in texts.items()},
        fingerprint=digest,
        location=location,
        splits={
            split: hashlib.sha256(json.dumps(splits.members[split]).encode()).hexdigest()
            for split in SPLITS
        },
    )


def find_corpus(name: str) -> None:
    """Refuses what `load_corpus` would refuse for what lies behind a name, before text is read."""
    if name == "stdlib" or matching_files(name):
        return
    if not _is_data_set(name):
        raise _no_such_corpus(name)
    if not answers():  # else it shows when it is fetched
        _open(name, reachable=False)


def read_file(path: Path, *, max_bytes: int | None = None) -> bytes:
    """Reads a text file whole, or its first `max_bytes` bytes without a part of a character."""
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"read_file: max_bytes must be positive, got {max_bytes}")
    return _clip(_read_text(path), max_bytes)


def _stdlib_files() -> dict[str, bytes]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if _NOT_STDLIB.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            files[relative.as_posix()] = path.read_bytes()
    if len(files) < len(SPLITS):
        raise ValueError(
            f"load_corpus: stdlib must have its .py files, got {len(files)} in {folder}"
        )
    return {path: text for path, text in files.items() if why_binary(text) is None}


def matching_files(name: str) -> list[Path]:
    """A file, or all of a folder that are not hidden, sorted; none where there is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        paths = [
            file
            for file in path.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not any(file.is_file() for file in paths):
            raise ValueError(
                f"load_corpus: files must be text files that are not hidden, got none in {name}"
            )
    else:
        paths = [path]
    return sorted(file for file in paths if file.is_file())


def _read_text(path: Path) -> bytes:
    text = path.read_bytes()
    if reason := why_binary(text):
        raise ValueError(f"load_corpus: files must be UTF-8 text, got {reason} in {path}")
    if not text:
        raise ValueError(f"load_corpus: files must not be empty, got {path}")
    return text


def why_binary(text: bytes, start: int = 0) -> str | None:
    """Why bytes are no text, with the place, which counts from a start; None for a text."""
    if (offset := text.find(0)) >= 0:
        return f"a NUL at byte {start + offset}"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"a byte that is not UTF-8 at byte {start + error.start}"
    return None


def _named_splits(files: dict[str, bytes]) -> _Splits | None:
    """The splits that files beside each other are named for, if each of the three has one."""
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    for path in sorted(files):
        if "/" not in path and not path.endswith(".py"):
            words = set(path.lower().split("."))
            for split in SPLITS:
                if words & _NAMES_OF_SPLITS[split]:
                    names[split].append(path)
    if not all(names.values()):
        return None
    texts = {split: _join(files[path] for path in paths) for split, paths in names.items()}
    return _Splits(texts, {split: list(paths) for split, paths in names.items()})


def _split_files(files: dict[str, bytes]) -> _Splits:
    """Assigns each file to a split by a hash of its path, which is the same on every machine."""
    unique = {text: path for path, text in sorted(files.items(), reverse=True) if text}
    order = sorted(unique, key=lambda text: hashlib.sha256(os.fsencode(unique[text])).digest())
    if len(order) < len(SPLITS):
        return _cut_into_splits(_join(order))
    held_out = max(1, round(HELD_OUT * len(order)))
    parts = (order[2 * held_out :], order[:held_out], order[held_out : 2 * held_out])
    named = dict(zip(SPLITS, parts, strict=True))
    texts = {split: _join(part) for split, part in named.items()}
    return _Splits(texts, {s: sorted(unique[text] for text in p) for s, p in named.items()})


def _cut_into_splits(text: bytes) -> _Splits:
    """Cuts one text into a first part to train on and two shorter ones that follow it."""
    first, second = (before_character(text, round(len(text) * (1 - k * HELD_OUT))) for k in (2, 1))
    members = {"train": [0, first], "valid": [first, second], "test": [second, len(text)]}
    return _Splits({split: text[slice(*members[split])] for split in SPLITS}, members)


def _clip(text: bytes, max_bytes: int | None) -> bytes:
    return text if max_bytes is None else text[: before_character(text, max_bytes)]


def before_character(text: bytes, end: int) -> int:
    """The last byte offset at or before `end` that does not divide a UTF-8 character."""
    while 0 < end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _join(documents: Iterable[bytes]) -> bytes:
    return b"".join(text if text.endswith(b"\n") else text + b"\n" for text in documents)


def _data_set_splits(name: str, max_bytes: int | None) -> _Splits:
    rows = _open(name)
    if not all(split in rows for split in SPLITS):
        return _cut_into_splits(
            _column_text(rows.get("train") or next(iter(rows.values())), max_bytes)
        )
    return _Splits(
        {split: _column_text(rows[split], max_bytes) for split in SPLITS},
        {split: [split] for split in SPLITS},
    )


def _is_data_set(name: str) -> bool:
    """Tell whether a data set may have this name."""
    return bool(_DATA_SET_ID.fullmatch(name)) and Path(name).suffix not in _TEXT_SUFFIXES


def _open(name: str, reachable: bool | None = None) -> dict[str, Any]:
    id = TEXTS.get(name, name)
    try:
        return open_data_set(id, stream=False, reachable=reachable)
    except ValueError as error:
        raise _no_such_corpus(name, " that can be reached", f" ({error})") from error


def _no_such_corpus(name: str, more: str = "", reason: str = "") -> ValueError:
    return ValueError(
        "load_corpus: name must be 'stdlib', a file or folder that exists, or the id of "
        f"a Hugging Face data set{more}, got {name!r}{reason}"
    )


def _column_text(rows: Any, max_bytes: int | None) -> bytes:
    """The rows' text, a line end after each; an empty row, in WikiText, is a blank line."""
    parts: list[bytes] = []
    size = 0
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise ValueError(
                f"load_corpus: name must be of a data set with texts in its column 'text', got "
                f"one with {', '.join(row)}; a file of its texts will do"
            )
        parts.append(as_line(row["text"]))
        size += len(parts[-1])
        if max_bytes is not None and size >= max_bytes:
            break
    return b"".join(parts)


def _tokenizer(texts: dict[str, bytes], kind: str, vocab_size: int) -> tuple[str, Tokenizer]:
    """A fingerprint of the texts and the tokenizer, and the tokenizer."""
    digest = hashlib.sha256(json.dumps([kind, vocab_size if kind == "bpe" else 256]).encode())
    for split in SPLITS:
        digest.update(hashlib.sha256(texts[split]).digest())
    made = train_bpe(texts["train"], vocab_size) if kind == "bpe" else byte_tokenizer()
    return digest.hexdigest(), made
