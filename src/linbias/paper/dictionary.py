"""The words of a text and their ids, numbered and stored as the paper's code does it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from pathlib import Path

from linbias._run.files import new_file

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = "#fairseq:overwrite"


class Dictionary:
    """The id of every word: four special ones, then words by falling count."""

    BOS, PAD, EOS, UNK = 0, 1, 2, 3

    def __init__(self) -> None:
        self.symbols: list[str] = []  # by id
        self.counts: list[int] = []  # how often each occurred; 0 of the special ones
        self.ids = _Ids()
        for word in SPECIALS:
            self._add(word, 0)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        threshold: int = -1,
        nwords: int = -1,
        padding_factor: int = 8,
    ) -> Dictionary:
        """Numbers words by falling count, then by code points: up to `nwords` if that is above 0,
        none rarer than `threshold`, and made-up ones up to a multiple of `padding_factor`.
        """
        dictionary = cls()
        words = sorted(
            (-count, word)
            for word, count in counts.items()
            if count >= threshold and word not in SPECIALS
        )
        for count, word in words[: max(0, nwords - len(SPECIALS)) if nwords > 0 else None]:
            dictionary._add(word, -count)
        made_up = (f"madeupword{number:04d}" for number in itertools.count())
        unused = (word for word in made_up if word not in dictionary.ids)
        while len(dictionary) % padding_factor:
            dictionary._add(next(unused), 0)
        return dictionary

    @classmethod
    def read(cls, path: str | Path) -> Dictionary:
        """Reads a dict.txt, of this project or of fairseq: line k has word k + 4 and its count."""
        if not Path(path).is_file():
            raise ValueError(f"Dictionary.read: path must be a dict.txt, got {str(path)!r}")
        data = Path(path).read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            number = data.count(b"\n", 0, error.start) + 1
            raise ValueError(f"Dictionary.read: line {number} of {path} must be UTF-8") from error
        dictionary = cls()
        for number, line in enumerate(io.StringIO(text, newline=None), 1):
            where = f"line {number} of {path}"
            entry = _parse(line)
            if entry is None:
                raise ValueError(
                    f"Dictionary.read: {where} must be a word and its count, got {line[:60]!r}"
                )
            word, count, overwrite = entry
            if word in dictionary.ids and not overwrite:
                raise ValueError(
                    f"Dictionary.read: {where} must be a new word, or end in {_OVERWRITE}, "
                    f"got {word!r} again"
                )
            dictionary._add(word, count)
        return dictionary

    def write(self, path: str | Path) -> None:
        """Writes a dict.txt that `read` reads back."""
        seen = set(SPECIALS)
        with new_file(Path(path)) as file:
            for word, count in zip(self.symbols[4:], self.counts[4:], strict=True):
                mark = f" {_OVERWRITE}" if word in seen else ""
                file.write(f"{word} {count}{mark}\n".encode())
                seen.add(word)

    def encode_line(self, line: str) -> list[int]:
        """The ids of a line's words, parted by white space of any kind, and that of </s>."""
        return [*map(self.ids.__getitem__, line.split()), self.EOS]

    def __len__(self) -> int:
        return len(self.symbols)

    def _add(self, word: str, count: int) -> None:
        self.ids[word] = len(self.symbols)
        self.symbols.append(word)
        self.counts.append(count)


def _parse(line: str) -> tuple[str, int, bool] | None:
    """The word and count of a line, and whether it may overwrite; None if it is no such line."""
    entry = line.rstrip()
    overwrite = entry.endswith(f" {_OVERWRITE}")
    word, _, count = entry.removesuffix(f" {_OVERWRITE}").rpartition(" ")
    try:
        return (word, int(count), overwrite) if word else None
    except ValueError:
        return None


def check_words(own: Path, other: Path, function: str) -> None:
    """Refuses a dict.txt `other`, if there is one, that differs where both have a word."""
    if not other.is_file():
        return
    expected, others = Dictionary.read(own).symbols, Dictionary.read(other).symbols
    for id, (word, instead) in enumerate(zip(expected, others, strict=False)):
        if word != instead:
            raise ValueError(
                f"{function}: data must have the words of {own}, where {id} is {word!r}; "
                f"got {instead!r} in {other}"
            )


class _Ids(dict[str, int]):
    """The id of each word. Any other word has the id of <unk>, and is counted in `misses`."""

    misses = 0

    def __missing__(self, word: str) -> int:
        self.misses += 1
        return Dictionary.UNK
