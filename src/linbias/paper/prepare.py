"""From text to a folder of ids: dict.txt, and .bin and .idx of each split.

    text  ->  counts of words  ->  dictionary  ->  ids of each line

The folder is the same, byte for byte, as that of the original's preprocessing, and either can be
used instead of the other. Text is read line by line, by several processes (see `ranges`), so
that memory grows with the number of words and not with the text.
"""

from __future__ import annotations

import itertools
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from linbias.data import SPLITS
from linbias.data.data_sets import WIKITEXT_WORDS, as_line, open_data_set
from linbias.paper.dictionary import Dictionary
from linbias.paper.ranges import Range, cut_into_ranges, in_processes
from linbias.paper.store import ids_dtype, write_ids

Progress = Callable[[int, int | None], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Split:
    """What `prepare` found in a text: lines, ids (one of </s> per line too), words now <unk>."""

    num_lines: int
    num_ids: int
    num_replaced: int


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made: the folder, the number of ids, and what it found, by split."""

    folder: Path
    dictionary_size: int
    splits: dict[str, Split]

    def to_dict(self) -> dict[str, Any]:
        """All but the folder as JSON values."""
        splits = {name: asdict(split) for name, split in self.splits.items()}
        return {"dictionary": self.dictionary_size, **splits}


def prepare(
    texts: Mapping[str, str | Path] | str,
    output: str | Path,
    *,
    dictionary: str | Path | None = None,
    workers: int = 1,
    nwords: int = -1,
    threshold: int = -1,
    padding_factor: int = 8,
    progress: Progress | None = None,
) -> Prepared:
    """Numbers the words of texts, and writes a folder of ids.

    A line ends at a line feed, a carriage return or both; the last may lack its end. Words are
    separated by white space of any kind, Unicode's included. The folder appears once it is
    complete: an interrupted run leaves nothing.

    Args:
        texts: Files of UTF-8 text by split, any of "train", "valid" and "test". Or a data set,
            "wikitext-103" or "wikitext-2", whose lines are streamed to a temporary folder.
        output: The folder to make; it must not exist, or be empty.
        dictionary: A dict.txt to use; None makes one from the train text.
        workers: Processes that read text. With more than one, a script must call this under
            `if __name__ == "__main__"`, as always with multiprocessing.
        nwords, threshold, padding_factor: As for `Dictionary.from_counts`.
        progress: Called with the bytes read and the bytes to read; the train text is read twice
            where its words are counted. While a data set is fetched, the latter are None.

    Raises:
        ValueError: An argument breaks a rule above; a text is missing, empty or not UTF-8; or a
            data set cannot be reached.

    Example:
        >>> from linbias.paper.store import read_ids
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder, "train.txt")
        ...     _ = text.write_text("the cat\\n\\nthe end\\n")
        ...     made = prepare({"train": text}, Path(folder, "data"))
        ...     ids = read_ids(made.folder / "train")
        >>> made.dictionary_size, ids.sizes.tolist(), ids.tokens.tolist()
        (8, [3, 1, 3], [4, 5, 2, 2, 4, 6, 2])
    """
    source: Mapping[str, Path] | str
    if isinstance(texts, str):
        source = texts
        if texts not in WIKITEXT_WORDS:
            raise ValueError(
                f"prepare: data set must be one of {', '.join(WIKITEXT_WORDS)}, got {texts!r}"
            )
    else:
        source = {split: Path(path) for split, path in texts.items()}
        _check_texts(source, dictionary)
    _check_settings(output, dictionary, workers, nwords, threshold, padding_factor)
    output = Path(output).resolve()
    words = None if dictionary is None else Dictionary.read(dictionary)
    with _files(source, output, progress) as paths, _temporary_folder(output, "partial") as folder:
        ranges = {split: cut_into_ranges(paths[split]) for split in SPLITS if split in paths}
        counting = ranges["train"] if words is None else []
        reporter = _Reporter(progress, [*counting, *itertools.chain(*ranges.values())])
        if words is None:
            counts: Counter[str] = Counter()
            with in_processes(_count, workers) as count:
                for counted in reporter.report(counting, count(counting)):
                    counts.update(counted)
            words = Dictionary.from_counts(counts, threshold, nwords, padding_factor)
        words.write(folder / "dict.txt")
        with in_processes(partial(_encode, words), workers) as encode:
            splits = {
                split: _write_split(
                    folder / split, reporter.report(parts, encode(parts)), len(words)
                )
                for split, parts in ranges.items()
            }
        if output.exists():
            output.rmdir()
        os.replace(folder, output)
    return Prepared(folder=output, dictionary_size=len(words), splits=splits)


class _Encoded(NamedTuple):
    """The lines of a range as ids [any number], with the size of each line."""

    ids: NDArray[Any]
    sizes: array[int]
    num_replaced: int


class _Reporter:
    """Reports the bytes that are done while it passes the results on."""

    def __init__(self, progress: Progress | None, ranges: Iterable[Range]) -> None:
        self.progress, self.done = progress, 0
        self.total = sum(part.num_bytes for part in ranges)

    def report(self, ranges: Sequence[Range], results: Iterable[Result]) -> Iterator[Result]:
        for part, result in zip(ranges, results, strict=True):
            self.done += part.num_bytes
            if self.progress is not None:
                self.progress(self.done, self.total)
            yield result


def _count(part: Range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in part.lines():
        counts.update(line.split())
    return counts


def _encode(dictionary: Dictionary, part: Range) -> _Encoded:
    ids: list[int] = []
    sizes = array("i")
    misses = dictionary.ids.misses
    for line in part.lines():
        line_ids = dictionary.encode_line(line)
        ids += line_ids
        sizes.append(len(line_ids))
    dtype = ids_dtype(len(dictionary))
    return _Encoded(np.array(ids, dtype), sizes, dictionary.ids.misses - misses)


def _write_split(prefix: Path, parts: Iterable[_Encoded], dictionary_size: int) -> Split:
    sizes = array("i")  # filled while the ids are written
    num_replaced = 0

    def chunks() -> Iterator[NDArray[Any]]:
        nonlocal num_replaced
        for part in parts:
            sizes.extend(part.sizes)
            num_replaced += part.num_replaced
            yield part.ids

    write_ids(prefix, sizes, chunks(), ids_dtype(dictionary_size))
    return Split(len(sizes), sum(sizes), num_replaced)


@contextmanager
def _files(
    texts: Mapping[str, Path] | str, output: Path, progress: Progress | None
) -> Iterator[Mapping[str, Path]]:
    """The files of texts by split; those of a data set are there while the block lasts."""
    if not isinstance(texts, str):
        yield texts
        return
    with _temporary_folder(output, "text") as folder:
        try:
            files = _fetch(texts, folder, progress)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"prepare: data set must be one that can be reached, got {texts!r} ({error})"
            ) from error
        yield files


def _fetch(name: str, folder: Path, progress: Progress | None) -> dict[str, Path]:
    """Writes a data set's splits as text, each row as a line; an empty row is a blank line."""
    rows = open_data_set(WIKITEXT_WORDS[name], stream=True)
    texts = {split: folder / f"{split}.txt" for split in SPLITS}
    num_bytes = 0
    for split, text in texts.items():
        with open(text, "wb") as file:
            for number, row in enumerate(rows[split]):
                num_bytes += file.write(as_line(row["text"]))
                if progress is not None and number % 10_000 == 0:
                    progress(num_bytes, None)
    return texts


@contextmanager
def _temporary_folder(beside: Path, purpose: str) -> Iterator[Path]:
    """An empty folder beside another, deleted when the block ends or by the next run."""
    folder = beside.with_name(f".{beside.name}.{purpose}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"prepare: output must be a folder that can be made, got {str(beside)!r} ({error})"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_texts(paths: Mapping[str, Path], dictionary: str | Path | None) -> None:
    if not paths or not set(paths) <= set(SPLITS):
        raise ValueError(f"prepare: texts must be some of {', '.join(SPLITS)}, got {[*paths]}")
    if "train" not in paths and dictionary is None:
        raise ValueError(f"prepare: texts must have train, or dictionary be given, got {[*paths]}")
    for split, path in paths.items():
        if not path.is_file() or not path.stat().st_size:
            fault = "an empty file" if path.is_file() else "no such file"
            raise ValueError(f"prepare: {split} must be a file with text, got {fault}: {path}")


def _check_settings(
    output: str | Path,
    dictionary: str | Path | None,
    workers: int,
    nwords: int,
    threshold: int,
    padding_factor: int,
) -> None:
    for name, value in {"workers": workers, "padding_factor": padding_factor}.items():
        if value < 1:
            raise ValueError(f"prepare: {name} must be positive, got {value}")
    if dictionary is not None and (nwords, threshold) != (-1, -1):
        raise ValueError(
            "prepare: nwords and threshold must be left alone where dictionary is given, "
            f"got {nwords} and {threshold}"
        )
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"prepare: output must be a new or empty folder, got {str(output)!r}")
