"""From text to a folder of ids, which is that of the original's preprocessing byte for byte.

Text is read by several processes (see `ranges`), in memory that grows with the words alone.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
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
    """How many lines, ids (with </s> of each line) and words that became <unk> a text has."""

    num_lines: int
    num_ids: int
    num_replaced: int


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made: the folder, the size of its dictionary, and what each text has."""

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
    """Numbers the words of texts, by split or of a data set, and writes a folder of ids, which
    appears once it is complete; `progress` gets the bytes read and, where known, to read.
    """
    source: Mapping[str, Path] | str
    source = texts if isinstance(texts, str) else {s: Path(path) for s, path in texts.items()}
    if not isinstance(source, str):
        _check_texts(source, dictionary)
    elif source not in WIKITEXT_WORDS:
        raise ValueError(
            f"prepare: data set must be one of {', '.join(WIKITEXT_WORDS)}, got {source!r}"
        )
    _check_settings(
        output, dictionary, nwords, threshold, workers=workers, padding_factor=padding_factor
    )
    output = Path(output).resolve()
    words = None if dictionary is None else Dictionary.read(dictionary)
    with _files(source, output, progress) as paths, _temporary_folder(output, "partial") as folder:
        ranges = {split: cut_into_ranges(paths[split]) for split in SPLITS if split in paths}
        counting = ranges["train"] if words is None else []
        done, total = 0, sum(r.num_bytes for r in chain(counting, *ranges.values()))

        def report(parts: Sequence[Range], results: Iterable[Result]) -> Iterator[Result]:
            nonlocal done
            for part, result in zip(parts, results, strict=True):
                done += part.num_bytes
                if progress is not None:
                    progress(done, total)
                yield result

        if words is None:
            counts: Counter[str] = Counter()
            with in_processes(_count, workers) as count:
                for counted in report(counting, count(counting)):
                    counts.update(counted)
            words = Dictionary.from_counts(counts, threshold, nwords, padding_factor)
        words.write(folder / "dict.txt")
        dtype, splits = ids_dtype(len(words)), {}
        with in_processes(partial(_encode, words, dtype), workers) as encode:
            for split, parts in ranges.items():
                encoded = report(parts, encode(parts))
                splits[split] = _write_split(folder / split, encoded, dtype)
        if output.exists():
            output.rmdir()
        os.replace(folder, output)
    return Prepared(folder=output, dictionary_size=len(words), splits=splits)


class _Encoded(NamedTuple):
    """The lines of a range as ids, with the size of each line."""

    ids: NDArray[Any]
    sizes: array[int]
    num_replaced: int


def _count(part: Range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in part.lines():
        counts.update(line.split())
    return counts


def _encode(dictionary: Dictionary, dtype: np.dtype[Any], part: Range) -> _Encoded:
    ids: list[int] = []
    sizes = array("i")
    misses = dictionary.ids.misses
    for line in part.lines():
        line_ids = dictionary.encode_line(line)
        ids += line_ids
        sizes.append(len(line_ids))
    return _Encoded(np.array(ids, dtype), sizes, dictionary.ids.misses - misses)


def _write_split(prefix: Path, parts: Iterable[_Encoded], dtype: np.dtype[Any]) -> Split:
    sizes = array("i")  # filled while the ids are written
    num_replaced = 0

    def chunks() -> Iterator[NDArray[Any]]:
        nonlocal num_replaced
        for part in parts:
            sizes.extend(part.sizes)
            num_replaced += part.num_replaced
            yield part.ids

    write_ids(prefix, sizes, chunks(), dtype)
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
        files, num_bytes = {split: folder / f"{split}.txt" for split in SPLITS}, 0
        try:
            rows = open_data_set(WIKITEXT_WORDS[texts], stream=True)
            for split, path in files.items():
                with path.open("wb") as file:
                    for number, row in enumerate(rows[split]):
                        num_bytes += file.write(as_line(row["text"]))
                        if progress is not None and number % 10_000 == 0:
                            progress(num_bytes, None)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"prepare: data set must be one that can be reached, got {texts!r} ({error})"
            ) from error
        yield files


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
    output: str | Path, dictionary: object, nwords: int, threshold: int, **counts: int
) -> None:
    for name, value in counts.items():
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
