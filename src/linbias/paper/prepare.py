"""From text to a folder of ids, which is that of the original's preprocessing byte for byte.

Texts are read line by line, in memory that grows with the words alone.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linbias.data import SPLITS
from linbias.data.data_sets import WIKITEXT_WORDS, as_line, open_data_set
from linbias.paper.dictionary import Dictionary
from linbias.paper.store import ids_dtype, write_ids

Progress = Callable[[int, int | None], None]

_PART_BYTES = 1 << 20  # of whole lines that are read at a time


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
    _check_settings(output, dictionary, nwords, threshold, padding_factor)
    output = Path(output).resolve()
    words = None if dictionary is None else Dictionary.read(dictionary)
    with _files(source, output, progress) as paths, _temporary_folder(output, "partial") as folder:
        splits = [split for split in SPLITS if split in paths]
        to_read = splits if words is not None else ["train", *splits]  # counted, then encoded
        done, total = 0, sum(paths[split].stat().st_size for split in to_read)

        def lines_of(split: str) -> Iterator[str]:
            nonlocal done
            for lines, num_bytes in _parts(paths[split]):
                yield from lines
                done += num_bytes
                if progress is not None:
                    progress(done, total)

        if words is None:
            counts: Counter[str] = Counter()
            for line in lines_of("train"):
                counts.update(line.split())
            words = Dictionary.from_counts(counts, threshold, nwords, padding_factor)
        words.write(folder / "dict.txt")
        made: dict[str, Split] = {}
        for split in splits:
            before = words.ids.misses
            ids = map(words.encode_line, lines_of(split))
            sizes = write_ids(folder / split, ids, ids_dtype(len(words)))
            made[split] = Split(len(sizes), int(sizes.sum()), words.ids.misses - before)
        if output.exists():
            output.rmdir()
        os.replace(folder, output)
    return Prepared(folder=output, dictionary_size=len(words), splits=made)


def _parts(path: Path) -> Iterator[tuple[io.StringIO, int]]:
    """The lines of a UTF-8 file, some at a time, with their bytes; a carriage return ends a line,
    too.
    """
    with path.open("rb") as file:
        while data := b"".join(file.readlines(_PART_BYTES)):
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"prepare: texts must be UTF-8, got 0x{data[error.start]:02x} at byte "
                    f"{file.tell() - len(data) + error.start} of {path}"
                ) from error
            yield io.StringIO(text, newline=None), len(data)


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
    output: str | Path, dictionary: object, nwords: int, threshold: int, padding_factor: int
) -> None:
    if padding_factor < 1:
        raise ValueError(f"prepare: padding_factor must be positive, got {padding_factor}")
    if dictionary is not None and (nwords, threshold) != (-1, -1):
        raise ValueError(
            "prepare: nwords and threshold must be left alone where dictionary is given, "
            f"got {nwords} and {threshold}"
        )
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"prepare: output must be a new or empty folder, got {str(output)!r}")
