"""From text to a folder of ids: dict.txt, and .bin and .idx of each split.

    text  ->  counts of words  ->  dictionary  ->  ids of each line

The folder is the same, byte for byte, as that of the original's preprocessing, and either may stand
for the other. Text is read line by line, by as many processes as are asked for: each takes the next
few megabytes, cut at a line end, and what they find is put together in the order of the text. So the
result does not depend on the number of processes, and memory grows with the words, not the text.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import signal
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from linbias.data.dictionary import Dictionary
from linbias.data.store import Ids, check_ids, ids_dtype, read_ids, write_ids

SPLITS = ("train", "valid", "test")
DATA_SETS = {  # texts with rare words already replaced by <unk>, as the paper uses them
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-v1"),
}

Progress = Callable[[int, int | None], None]
Result = TypeVar("Result")

_RANGE_BYTES = 4 << 20  # text that a process takes at a time


@dataclass(frozen=True)
class Split:
    """What `prepare` found in a text.

    Attributes:
        num_lines: Lines.
        num_ids: Ids, one of </s> per line included.
        num_replaced: Words that are not in the dictionary, and became <unk>.
    """

    num_lines: int
    num_ids: int
    num_replaced: int


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made.

    Attributes:
        folder: Where it is.
        dictionary_size: Number of ids.
        splits: By the split's name.
    """

    folder: Path
    dictionary_size: int
    splits: dict[str, Split]


def prepare(
    texts: Mapping[str, str | Path],
    out: str | Path,
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
    parted by white space of any kind, Unicode's included. The folder appears once it is complete:
    an interrupted run leaves nothing.

    Args:
        texts: Files of UTF-8 text by split: any of "train", "valid" and "test".
        out: The folder to make; it must not exist, or be empty.
        dictionary: A dict.txt to use; None makes one from the train text.
        workers: Processes to read text with. With more than one, a script that calls this must
            stand under `if __name__ == "__main__"`, as always with multiprocessing.
        nwords: As for `Dictionary.from_counts`, as are `threshold` and `padding_factor`.
        threshold: See there.
        padding_factor: See there.
        progress: Called with bytes read and bytes to read; text is read twice if it is counted.

    Raises:
        ValueError: An argument breaks a rule above, or a text is missing, empty or not UTF-8.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder, "train.txt")
        ...     _ = text.write_text("the cat\\n\\nthe end\\n")
        ...     made = prepare({"train": text}, Path(folder, "data"))
        ...     ids = read_ids(made.folder / "train")
        >>> made.dictionary_size, ids.sizes.tolist(), ids.tokens.tolist()
        (8, [3, 1, 3], [4, 5, 2, 2, 4, 6, 2])
    """
    paths = {split: Path(path) for split, path in texts.items()}
    _check_texts(paths, dictionary)
    _check_settings(out, dictionary, workers, nwords, threshold, padding_factor)
    out = Path(out).resolve()
    known = None if dictionary is None else Dictionary.read(dictionary)
    ranges = {split: _ranges(paths[split]) for split in SPLITS if split in paths}
    counting = ranges["train"] if known is None else []
    bar = _Bar(progress, [*counting, *itertools.chain(*ranges.values())])
    with _folder_for_now(out, "partial") as folder:
        if known is None:
            counts: Counter[str] = Counter()
            with _workers(_count, workers) as count:
                for found in bar.watch(counting, count(counting)):
                    counts.update(found)
            known = Dictionary.from_counts(counts, threshold, nwords, padding_factor)
        known.write(folder / "dict.txt")
        with _workers(partial(_encode, known), workers) as encode:
            splits = {
                split: _write_split(folder / split, bar.watch(parts, encode(parts)), len(known))
                for split, parts in ranges.items()
            }
        if out.exists():
            out.rmdir()
        os.replace(folder, out)
    return Prepared(out, len(known), splits)


def prepare_dataset(
    name: str,
    out: str | Path,
    *,
    dictionary: str | Path | None = None,
    workers: int = 1,
    nwords: int = -1,
    threshold: int = -1,
    padding_factor: int = 8,
    progress: Progress | None = None,
) -> Prepared:
    """As `prepare`, for a Hugging Face data set, whose lines are streamed to a temporary folder.

    Args:
        name: "wikitext-103" or "wikitext-2".
        out: As for `prepare`, as is all that follows.
        dictionary: See there.
        workers: See there.
        nwords: See there.
        threshold: See there.
        padding_factor: See there.
        progress: See there; first called with the bytes that have come, and None.

    Raises:
        ValueError: As `prepare`; or the data set is another, or cannot be reached.
    """
    if name not in DATA_SETS:
        raise ValueError(
            f"prepare_dataset: name must be one of {', '.join(DATA_SETS)}, got {name!r}"
        )
    _check_settings(out, dictionary, workers, nwords, threshold, padding_factor)
    with _folder_for_now(Path(out).resolve(), "text") as folder:
        try:
            texts = _fetch(name, folder, progress)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"prepare_dataset: name must be a data set that can be reached, got {name!r} "
                f"({error})"
            ) from error
        return prepare(
            texts,
            out,
            dictionary=dictionary,
            workers=workers,
            nwords=nwords,
            threshold=threshold,
            padding_factor=padding_factor,
            progress=progress,
        )


def read_data(folder: str | Path, split: str) -> tuple[Dictionary, Ids]:
    """Opens a folder that `prepare`, or the original, made.

    Args:
        folder: Holds dict.txt, and .bin and .idx of the split.
        split: "train", "valid" or "test".

    Raises:
        ValueError: A file is missing or damaged, or an id is outside the dictionary.
    """
    if not Path(folder, "dict.txt").is_file():
        raise ValueError(f"read_data: folder must hold dict.txt, got {str(folder)!r}")
    if not Path(folder, f"{split}.idx").is_file():
        there = ", ".join(sorted(path.stem for path in Path(folder).glob("*.idx"))) or "none"
        raise ValueError(f"read_data: split must be one of {folder} ({there}), got {split!r}")
    dictionary, ids = Dictionary.read(Path(folder, "dict.txt")), read_ids(Path(folder, split))
    check_ids(ids.tokens, len(dictionary), str(Path(folder, f"{split}.bin")))
    return dictionary, ids


class _Range(NamedTuple):
    """Whole lines of a file: bytes start to stop."""

    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def lines(self) -> Iterator[str]:
        """The lines that a text file has here: a carriage return ends one, too."""
        with open(self.path, "rb") as file:
            place = file.seek(self.start)
            while place < self.stop:
                data = file.readline()
                try:
                    yield from io.StringIO(data.decode(), newline=None)
                except UnicodeDecodeError as error:
                    at = error.start
                    raise ValueError(
                        f"prepare: texts must be UTF-8, got 0x{data[at]:02x} at byte {place + at} "
                        f"of {self.path}"
                    ) from error
                place += len(data)


class _Encoded(NamedTuple):
    """The lines of a range as ids [any number], with the size of each line."""

    ids: NDArray[Any]
    sizes: array[int]
    num_replaced: int


class _Bar:
    """Passes results on, and reports the bytes that they stand for."""

    def __init__(self, progress: Progress | None, ranges: Iterable[_Range]) -> None:
        self.progress, self.done = progress, 0
        self.total = sum(part.num_bytes for part in ranges)

    def watch(self, ranges: Sequence[_Range], results: Iterable[Result]) -> Iterator[Result]:
        for part, result in zip(ranges, results, strict=True):
            self.done += part.num_bytes
            if self.progress is not None:
                self.progress(self.done, self.total)
            yield result


def _ranges(path: Path) -> list[_Range]:
    ranges: list[_Range] = []
    with open(path, "rb") as file:
        size, start = file.seek(0, os.SEEK_END), 0
        while start < size:
            file.seek(start + _RANGE_BYTES - 1)
            file.readline()
            ranges.append(_Range(path, start, min(file.tell(), size)))
            start = file.tell()
    return ranges


def _count(part: _Range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in part.lines():
        counts.update(line.split())
    return counts


def _encode(dictionary: Dictionary, part: _Range) -> _Encoded:
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
def _workers(
    function: Callable[[_Range], Result], number: int
) -> Iterator[Callable[[Sequence[_Range]], Iterable[Result]]]:
    """As map with that function, by so many processes."""
    if number == 1:
        yield partial(map, function)
        return
    pool = ProcessPoolExecutor(number, get_context("spawn"), _start_worker, (function,))
    try:
        yield partial(_map, pool, 2 * number)
    finally:
        pool.shutdown(cancel_futures=True)


def _map(pool: Executor, ahead: int, ranges: Sequence[_Range]) -> Iterator[Any]:
    """Results in order; only so many are made ahead, lest they pile up."""
    waiting: deque[Future[Any]] = deque()
    for part in ranges:
        waiting.append(pool.submit(_do, part))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_function: Callable[[_Range], Any]  # what this worker does


def _start_worker(function: Callable[[_Range], Any]) -> None:
    global _function  # noqa: PLW0603 (a worker process does one thing)
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process says when to stop
    Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    main = parent_process()
    assert main is not None
    main.join()
    os._exit(1)


def _do(part: _Range) -> Any:
    return _function(part)


def _fetch(name: str, folder: Path, progress: Progress | None) -> dict[str, Path]:
    """Writes a data set's splits as text, a row a line; an empty row is a blank line."""
    import datasets  # takes a second to import

    path, configuration = DATA_SETS[name]
    data = datasets.load_dataset(path, configuration, streaming=True)
    texts = {split: folder / f"{split}.txt" for split in SPLITS}
    num_bytes = 0
    for split, text in texts.items():
        with open(text, "wb") as file:
            for number, row in enumerate(data["validation" if split == "valid" else split]):
                num_bytes += file.write(row["text"].removesuffix("\n").encode() + b"\n")
                if progress is not None and number % 10_000 == 0:
                    progress(num_bytes, None)
    return texts


@contextmanager
def _folder_for_now(beside: Path, purpose: str) -> Iterator[Path]:
    """An empty folder that is there for the block only; what a killed run left in it goes."""
    folder = beside.with_name(f".{beside.name}.{purpose}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"prepare: out must be a folder that can be made, got {str(beside)!r} ({error})"
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
    out: str | Path,
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
    if Path(out).exists() and not (Path(out).is_dir() and not any(Path(out).iterdir())):
        raise ValueError(f"prepare: out must be a new or empty folder, got {str(out)!r}")
