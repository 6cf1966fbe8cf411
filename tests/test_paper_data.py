"""The paper's data: the original's bytes from any text, whole or not at all, and bad files are refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
import sys
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from linbias.data import prepare as preparing
from linbias.data.batches import batch_order, block_tokens, blocks
from linbias.data.dictionary import Dictionary
from linbias.data.prepare import Split, prepare, prepare_dataset, read_data
from linbias.data.store import check_ids, ids_dtype, read_ids, write_ids

SHARED = Path(__file__).resolve().parents[2] / "shared"
WIKITEXT, GOLDEN = SHARED / "data" / "wikitext-2", SHARED / "golden" / "fairseq"
BATCHES = json.loads((Path(__file__).parent / "golden" / "paper_batch_order.json").read_text())

needs_golden = pytest.mark.skipif(
    not (WIKITEXT.is_dir() and GOLDEN.is_dir()), reason="no golden data in ../shared"
)

# White space and line ends of every kind, the special words, and words of 1 to 4 bytes a letter.
PIECES = [
    *("\n", "\r", "\r\n", " ", "\t", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u2028", "\u3000"),
    *("<s>", "<pad>", "</s>", "<unk>", "madeupword0000", "\ufeff", "\0", "a", "b", "ä", "€", "😀"),
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1).map("".join)


def oracle_words(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8") as file:
        return [re.findall(r"\S+", line) for line in file]


def oracle_symbols(lines: list[list[str]], nwords: int, threshold: int, padding: int) -> list[str]:
    counts = Counter(word for line in lines for word in line)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    kept = [word for word in ranked if word not in special and counts[word] >= threshold]
    symbols = special + (kept[: max(0, nwords - 4)] if nwords > 0 else kept)
    made_up = (f"madeupword{i:04d}" for i in itertools.count())
    while len(symbols) % padding:
        word = next(made_up)
        symbols += [word] * (word not in symbols)
    return symbols


def oracle_files(lines: list[list[str]], symbols: list[str]) -> tuple[bytes, bytes]:
    """.bin and .idx of a text with a small dictionary."""
    numbered = [
        [symbols.index(word) if word in symbols else 3 for word in line] + [2] for line in lines
    ]
    data = struct.pack(f"<{sum(map(len, numbered))}H", *itertools.chain(*numbered))
    sizes = [len(line) for line in numbered]
    starts = [2 * sum(sizes[:i]) for i in range(len(sizes))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, len(sizes))
    index += struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *starts)
    return data, index


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def zipf_text(num_lines: int, num_words: int, seed: int = 0) -> str:
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 40, num_lines)
    words = np.exp(random.random(sizes.sum()) * np.log(num_words)).astype(int)
    lines = np.split(words, np.cumsum(sizes)[:-1])
    return "".join(" " + " ".join(f"w{word:x}" for word in line) + " \n" for line in lines)


@given(
    text=TEXTS,
    other=TEXTS,
    nwords=st.sampled_from([-1, 0, 2, 5, 9]),
    threshold=st.sampled_from([-1, 2]),
    padding=st.sampled_from([1, 8]),
    range_bytes=st.sampled_from([1, 5, 1000]),
)
@example("\r", "\n", -1, -1, 8, 1)
@example("a\n b", " ", -1, -1, 8, 1)
@example("a\r\nb\r", "<unk> c </s>", -1, -1, 1, 2)
def test_files_are_those_of_a_plain_reading_of_the_text(
    text: str, other: str, nwords: int, threshold: int, padding: int, range_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_RANGE_BYTES", range_bytes)
        train = write(Path(folder, "a"), text)
        valid = write(Path(folder, "b"), other)
        out = Path(folder, "out")
        prepare(
            {"train": train, "valid": valid},
            out,
            nwords=nwords,
            threshold=threshold,
            padding_factor=padding,
        )
        lines = oracle_words(train)
        symbols = oracle_symbols(lines, nwords, threshold, padding)
        counts = Counter(word for line in lines for word in line)
        listed = "".join(f"{word} {counts[word]}\n" for word in symbols[4:])
        data, index = oracle_files(lines, symbols)
        valid_data, valid_index = oracle_files(oracle_words(valid), symbols)
        assert contents(out) == {
            "dict.txt": listed.encode(),
            "train.bin": data,
            "train.idx": index,
            "valid.bin": valid_data,
            "valid.idx": valid_index,
        }


def test_words_are_parted_where_the_regular_expression_of_the_original_parts_them() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    text = "x".join(every)
    assert text.split() == re.sub(r"\s+", " ", text).strip().split(" ")


@pytest.fixture(scope="module")
def zipf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("zipf")
    return {
        split: write(folder / split, zipf_text(num_lines, 3000, seed))
        for seed, (split, num_lines) in enumerate([("train", 3000), ("valid", 90), ("test", 1)])
    }


def test_workers_change_nothing(
    zipf: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = prepare(zipf, tmp_path / "alone")
    monkeypatch.setattr(preparing, "_RANGE_BYTES", 10_000)
    together = prepare(zipf, tmp_path / "together", workers=2)
    assert contents(alone.folder) == contents(together.folder)
    assert alone.splits == together.splits


def test_what_was_found_is_counted(tmp_path: Path) -> None:
    texts = {
        "train": write(tmp_path / "a", "the cat\n\nthe <unk>"),
        "valid": write(tmp_path / "b", "dog the\n"),
    }
    made = prepare(texts, tmp_path / "out")
    assert made.dictionary_size == 8
    assert made.splits == {"train": Split(3, 7, 0), "valid": Split(1, 3, 1)}


def test_dictionary_that_exists_is_used_as_it_is(zipf: dict[str, Path], tmp_path: Path) -> None:
    first = prepare(zipf, tmp_path / "first", nwords=500).folder
    again = prepare(
        {"test": zipf["test"]}, tmp_path / "again", dictionary=first / "dict.txt"
    ).folder
    assert contents(again) == {
        name: data
        for name, data in contents(first).items()
        if name in ("dict.txt", "test.bin", "test.idx")
    }


def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_RANGE_BYTES", 1 << 14)
    peaks = []
    for repeats in (2, 20):
        text = write(tmp_path / "text", ("some words " * 100 + "\n") * 20 * repeats)
        tracemalloc.start()
        prepare({"train": text}, tmp_path / f"out{repeats}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.1 * text.stat().st_size


def test_progress_rises_to_the_bytes_read(
    zipf: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_RANGE_BYTES", 20_000)
    calls: list[tuple[int, int | None]] = []
    prepare(zipf, tmp_path / "out", progress=lambda *call: calls.append(call))
    sizes = {split: path.stat().st_size for split, path in zipf.items()}
    total = sum(sizes.values()) + sizes["train"]  # counted, then encoded
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert len(done) > 10
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("call", [1, 2, 3, 4])  # two ranges are counted, then encoded
def test_interrupted_run_leaves_nothing(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_RANGE_BYTES", 6)
    text = write(tmp_path / "text", "a b c\n" * 2)
    calls = itertools.count(1)

    def interrupt(*_: object) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare({"train": text}, tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == [text]


def test_leavings_of_a_killed_run_go(tmp_path: Path) -> None:
    text = write(tmp_path / "text", "a\n")
    (tmp_path / ".out.partial").mkdir()
    write(tmp_path / ".out.partial" / "train.bin", "half")
    (tmp_path / "out").mkdir()  # empty, so it may be filled
    prepare({"train": text}, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text"]
    assert sorted(contents(tmp_path / "out")) == ["dict.txt", "train.bin", "train.idx"]


@pytest.mark.parametrize("workers", [1, 2])
def test_text_that_is_not_utf8_is_refused_with_its_place(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_RANGE_BYTES", 4)
    text = write(tmp_path / "text", b"fine\nstill\nna\xefve\n")
    message = r"prepare: texts must be UTF-8, got 0xef at byte 13 of .*text"
    with pytest.raises(ValueError, match=message):
        prepare({"train": text}, tmp_path / "out", workers=workers)
    assert list(tmp_path.iterdir()) == [text]


BAD_CALLS = [
    ("texts must be some of train, valid, test, got \\[\\]", {"texts": {}}),
    ("texts must be some of .*, got \\['dev'\\]", {"texts": {"dev": "text"}}),
    ("texts must have train, or dictionary be given", {"texts": {"valid": "text"}}),
    ("train must be a file with text, got no such file: none", {"texts": {"train": "none"}}),
    ("train must be a file with text, got no such file: used", {"texts": {"train": "used"}}),
    ("train must be a file with text, got an empty file: empty", {"texts": {"train": "empty"}}),
    ("out must be a new or empty folder, got 'used'", {"out": "used"}),
    ("out must be a new or empty folder, got 'text'", {"out": "text"}),
    ("out must be a folder that can be made, got '.*text/out'", {"out": "text/out"}),
    ("workers must be positive, got 0", {"workers": 0}),
    ("padding_factor must be positive, got 0", {"padding_factor": 0}),
    ("nwords and threshold must be left alone .* got 9 and -1", {"dictionary": "d", "nwords": 9}),
]


@pytest.mark.parametrize(("message", "call"), BAD_CALLS)
def test_bad_call_is_refused(
    message: str, call: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text", "a\n")
    write(tmp_path / "empty", "")
    (tmp_path / "used").mkdir()
    write(tmp_path / "used" / "dict.txt", "")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"prepare: {message}"):
        prepare(**{"texts": {"train": "text"}, "out": "out", **call})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def data_set(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for `datasets.load_dataset`; `.data` is what it returns, `.calls` what it got."""
    import datasets

    def rows(*texts: str) -> list[dict[str, str]]:
        return [{"text": text} for text in texts]

    fake = SimpleNamespace(calls=[])
    fake.data = {
        "test": rows("", " d <unk> \n"),
        "train": rows("", " = A = \n", "", " b c b \n"),
        "validation": rows(" b \n"),
    }

    def load_dataset(path: str, configuration: str, **options: object) -> object:
        fake.calls.append((path, configuration, options))
        return fake.data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return fake


def test_data_set_is_prepared_like_its_text(data_set: SimpleNamespace, tmp_path: Path) -> None:
    progress: list[tuple[int, int | None]] = []
    prepare_dataset(
        "wikitext-103",
        tmp_path / "out",
        nwords=6,
        progress=lambda *call: progress.append(call),
    )
    assert data_set.calls == [("Salesforce/wikitext", "wikitext-103-v1", {"streaming": True})]
    texts = {"train": "\n = A = \n\n b c b \n", "valid": " b \n", "test": "\n d <unk> \n"}
    for split, text in texts.items():
        write(tmp_path / split, text)
    prepare({split: tmp_path / split for split in texts}, tmp_path / "same", nwords=6)
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "same", *texts}
    assert progress[0] == (1, None)
    total = sum(len(texts[split]) for split in ("train", "train", "valid", "test"))
    assert progress[-1] == (total, total)


def test_data_set_that_breaks_off_leaves_nothing(
    data_set: SimpleNamespace, tmp_path: Path
) -> None:
    def breaks_off():
        yield {"text": "a"}
        raise ConnectionError("no network")

    data_set.data["test"] = breaks_off()
    with pytest.raises(ValueError, match=r"can be reached, got 'wikitext-2' \(no network\)"):
        prepare_dataset("wikitext-2", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_data_set_is_not_fetched_for_nothing(data_set: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be one of wikitext-2, wikitext-103, got 'c4'"):
        prepare_dataset("c4", tmp_path / "out")
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        prepare_dataset("wikitext-2", write(tmp_path / "out", "file"))
    assert not data_set.calls


def test_dictionary_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    dictionary = Dictionary.from_counts({"b": 2, "ä": 2, "<unk>": 9, "madeupword0001": 7})
    dictionary.write(path)
    assert path.read_text("utf-8") == "madeupword0001 7\nb 2\nä 2\nmadeupword0000 0\n"
    again = Dictionary.read(path)
    assert (again.symbols, again.counts) == (dictionary.symbols, dictionary.counts)
    assert again.ids == dictionary.ids
    assert len(again) == 8
    assert list(tmp_path.iterdir()) == [path]


def test_line_marked_so_overwrites_a_word_and_keeps_its_mark(tmp_path: Path) -> None:
    text = "a 5\nb 4\na 3 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\n"
    dictionary = Dictionary.read(write(tmp_path / "dict.txt", text))
    assert dictionary.symbols[4:] == ["a", "b", "a", "<unk>"]
    assert dictionary.encode_line("a b <unk> other") == [6, 5, 7, 3, 2]
    dictionary.write(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == text


def test_dictionary_file_may_have_any_line_ends_and_words_with_spaces(tmp_path: Path) -> None:
    dictionary = Dictionary.read(write(tmp_path / "dict.txt", "two words 3\r\nx 1 \rlast 0"))
    assert dictionary.symbols[4:] == ["two words", "x", "last"]
    assert dictionary.counts[4:] == [3, 1, 0]


BAD_DICTIONARIES = {
    "line 2 of .*dict.txt must be a word and its count, got 'the\\\\n'": b"a 1\nthe\n",
    "line 1 of .* must be a word and its count, got 'the many": b"the many\n",
    "line 2 of .* must be a word and its count, got '\\\\n'": b"a 1\n\nb 1\n",
    "line 1 of .* must be a word and its count, got '3'": b"3",
    "line 3 of .* must be a new word, or end in #fairseq:overwrite, got 'a' again": b"a 1\nb 1\na 1",
    "line 1 of .* must be a new word, .* got '<unk>' again": b"<unk> 9\n",
    "line 2 of .* must be UTF-8": b"a 1\n\xff 1\n",
}


@pytest.mark.parametrize("message", BAD_DICTIONARIES)
def test_bad_dictionary_is_refused_with_its_line(message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "dict.txt", BAD_DICTIONARIES[message])
    with pytest.raises(ValueError, match=f"Dictionary.read: {message}"):
        Dictionary.read(path)


def test_ids_take_two_bytes_as_long_as_the_original_lets_them() -> None:
    sizes = (8, 65_499, 65_500, 267_744)
    assert [ids_dtype(size).str for size in sizes] == ["<u2", "<u2", "<u4", "<u4"]


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", ">i4"])
def test_ids_of_every_width_are_read_as_written(dtype: str, tmp_path: Path) -> None:
    write_ids(tmp_path / "x", [2, 0, 1], [np.array([5, 100]), np.array([7])], dtype)
    ids = read_ids(tmp_path / "x")
    assert ids.tokens.tolist() == [5, 100, 7]
    assert ids.tokens.dtype == np.dtype(dtype).newbyteorder("<")
    assert (ids.sizes.tolist(), ids.sizes.dtype) == ([2, 0, 1], np.int32)
    assert isinstance(ids.tokens, np.memmap)


def test_text_without_lines_is_read_as_written(tmp_path: Path) -> None:
    write_ids(tmp_path / "x", [], [])
    assert [len(part) for part in vars(read_ids(tmp_path / "x")).values()] == [0, 0]


BAD_WRITES = {
    "sizes must add up to the ids in chunks, got 2 and 1": ([2], [1], "u2"),
    "chunks must fit uint16, got 3 to 65536": ([2], [3, 65536], "u2"),
    "chunks must fit uint16, got -1 to -1": ([1], [-1], "u2"),
    "dtype must be one of .*, got f4": ([1], [1], "f4"),
}


@pytest.mark.parametrize("message", BAD_WRITES)
def test_bad_ids_are_not_written(message: str, tmp_path: Path) -> None:
    sizes, ids, dtype = BAD_WRITES[message]
    with pytest.raises(ValueError, match=f"write_ids: {message}"):
        write_ids(tmp_path / "x", sizes, [np.array(ids)], dtype)
    assert not list(tmp_path.iterdir())


def test_truncated_or_longer_file_is_refused(tmp_path: Path) -> None:
    write_ids(tmp_path / "x", [2, 3, 1], [np.arange(6)])
    for name in ("x.bin", "x.idx"):
        path = tmp_path / name
        data = path.read_bytes()
        for size in range(len(data)):
            path.write_bytes(data[:size])
            with pytest.raises(ValueError, match=rf"read_ids: .*{name} (is truncated|must begin)"):
                read_ids(tmp_path / "x")
        path.write_bytes(data + b"\0")
        with pytest.raises(ValueError, match=rf"read_ids: .*{name} is too long"):
            read_ids(tmp_path / "x")
        path.write_bytes(data)


def test_truncated_ids_are_refused_with_both_sizes(tmp_path: Path) -> None:
    write_ids(tmp_path / "x", [2, 3, 1], [np.arange(6)])
    write(tmp_path / "x.bin", (tmp_path / "x.bin").read_bytes()[:-1])
    message = r"x.bin is truncated: the 6 ids of x.idx need 12 bytes, got 11 bytes"
    with pytest.raises(ValueError, match=message):
        read_ids(tmp_path / "x")


@given(place=st.integers(0, 61), byte=st.integers(0, 255))
def test_changed_index_is_refused_or_says_the_same_ids(place: int, byte: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "x")
        write_ids(prefix, [2, 3, 1], [np.arange(6)])
        index = bytearray(Path(folder, "x.idx").read_bytes())
        assert len(index) == 62
        index[place] = byte
        Path(folder, "x.idx").write_bytes(index)
        try:
            ids = read_ids(prefix)
        except ValueError:
            return
        assert ids.tokens.tolist() == list(range(6))
        assert ids.sizes.tolist() == [2, 3, 1]


HEADER = struct.Struct("<9sQBQ")
BAD_HEADERS = {
    "must begin with MMIDIDX, got b'PK": (ValueError, b"PK\3\4 a zip file of some size"),
    "must be memory-mapped data, got .* TNTIDX": (NotImplementedError, b"TNTIDX\0\0" + b"\0" * 40),
    "got version 2 and": (ValueError, HEADER.pack(b"MMIDIDX\0\0", 2, 8, 0)),
    "integer ids, got version 1 and dtype code 7": (
        ValueError,
        HEADER.pack(b"MMIDIDX\0\0", 1, 7, 0),
    ),
    "is truncated: 18446744073709551615 lines need": (
        ValueError,
        HEADER.pack(b"MMIDIDX\0\0", 1, 8, 2**64 - 1),
    ),
    "must list lines one after another": (
        ValueError,
        HEADER.pack(b"MMIDIDX\0\0", 1, 8, 2) + struct.pack("<2i2q", 3, -1, 0, 6),
    ),
}


@pytest.mark.parametrize("message", BAD_HEADERS)
def test_foreign_index_is_refused(message: str, tmp_path: Path) -> None:
    error, index = BAD_HEADERS[message]
    write(tmp_path / "x.idx", index)
    write(tmp_path / "x.bin", b"\0" * 4)
    with pytest.raises(error, match=f"read_ids: .*x.idx {message}|read_ids: .*{message}"):
        read_ids(tmp_path / "x")


def test_folder_is_read_whole_or_refused(zipf: dict[str, Path], tmp_path: Path) -> None:
    folder = prepare(zipf, tmp_path / "data", nwords=100).folder
    dictionary, ids = read_data(folder, "valid")
    assert (len(dictionary), len(ids.sizes)) == (104, 90)
    with pytest.raises(
        ValueError, match=r"split must be one of .* \(test, train, valid\), got 'x"
    ):
        read_data(folder, "x")
    (folder / "valid.bin").unlink()
    with pytest.raises(ValueError, match=r"valid.bin must be in .*data, got no such file"):
        read_data(folder, "valid")
    write(folder / "dict.txt", "a 1\n")
    with pytest.raises(ValueError, match=r"train.bin must hold ids in \[0, 5\), the dictionary"):
        read_data(folder, "train")
    (folder / "dict.txt").unlink()
    with pytest.raises(ValueError, match=r"folder must hold dict.txt, got .*data"):
        read_data(folder, "train")
    with pytest.raises(ValueError, match=r"Dictionary.read: path must be a dict.txt, got .*data"):
        Dictionary.read(folder)


@pytest.mark.parametrize(("bad", "dtype"), [(9, "u2"), (70_000, "u4"), (-3, "i8")])
def test_id_outside_the_dictionary_is_named(bad: int, dtype: str) -> None:
    check_ids(np.array([0, 8, 3], dtype), 9, "valid.bin")
    check_ids(np.array([], dtype), 9, "valid.bin")
    message = rf"check_ids: valid.bin must hold ids in \[0, 9\), .* got {bad} at place 2"
    with pytest.raises(ValueError, match=message):
        check_ids(np.array([0, 8, bad, bad], dtype), 9, "valid.bin")


@given(num_ids=st.integers(0, 60), length=st.integers(1, 20))
def test_blocks_ask_for_every_id_once_after_the_id_before_it(num_ids: int, length: int) -> None:
    ids = np.arange(3, 3 + num_ids, dtype=np.uint16)
    spans = blocks(num_ids, length)
    assert len(spans) == -(-num_ids // length)
    assert all(stop - start == length for start, stop in spans[:-1])
    parts = [block_tokens(ids, start, stop) for start, stop in spans]
    assert [id for _, targets in parts for id in targets] == list(ids)
    assert [id for inputs, _ in parts for id in inputs] == [2, *ids][:num_ids]
    assert all(part.dtype == np.int64 for pair in parts for part in pair)


def oracle_batches(sizes: list[int], max_tokens: int, multiple: int) -> list[list[int]]:
    """Places in `sizes`, gathered one by one: what makes no full multiple waits in a tail."""
    batches: list[list[int]] = []
    ready: list[int] = []
    tail: list[int] = []
    for place in range(len(sizes)):
        tail.append(place)
        rows = ready + tail
        if len(rows) * max(sizes[row] for row in rows) > max_tokens:
            batches.append(ready)
            ready, rows = [], tail
        if len(rows) < multiple or len(rows) % multiple == 0:
            ready, tail = rows, []
    return [batch for batch in [*batches, ready, tail] if batch]


@given(
    num_ids=st.integers(0, 300),
    length=st.integers(1, 9),
    more=st.integers(0, 100),
    multiple=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 9),
    epoch=st.integers(1, 3),
)
def test_batches_are_those_of_the_greedy_rule_shuffled(
    num_ids: int, length: int, more: int, multiple: int, seed: int, epoch: int
) -> None:
    sizes = [int(stop - start) for start, stop in blocks(num_ids, length)]
    shuffled = np.random.RandomState(seed).permutation(len(sizes))
    order = sorted(range(len(sizes)), key=lambda block: (sizes[block], shuffled[block]))
    frozen = [
        [order[place] for place in batch]
        for batch in oracle_batches([sizes[block] for block in order], length + more, multiple)
    ]
    found = batch_order(num_ids, length, length + more, seed, epoch, multiple=multiple)
    assert sorted(found) == sorted(frozen)
    legacy = np.random.RandomState(seed + epoch)
    legacy.shuffle(frozen)
    assert found == frozen


def test_order_of_training_batches_is_the_original_s() -> None:
    setting = {name: BATCHES[name] for name in ("num_ids", "length", "max_tokens", "seed")}
    spans = blocks(BATCHES["num_ids"], BATCHES["length"])
    assert len(spans) == BATCHES["n_blocks"]
    assert spans[-1, 1] - spans[-1, 0] == BATCHES["last_block_len"]
    batches = batch_order(**setting, epoch=1)
    assert len(batches) == BATCHES["n_batches"]
    assert batches[:10] == BATCHES["first_10_batches_epoch1"]
    assert BATCHES["first_frozen_batch"] in batches
    assert batch_order(**setting, epoch=2) != batches


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_processes_share_the_batches_and_get_as_many(world: int) -> None:
    setting = {"num_ids": 100, "length": 5, "max_tokens": 10, "seed": 3, "epoch": 2}
    shares = [batch_order(**setting, rank=rank, world=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    dealt = [batch for turn in zip(*shares, strict=True) for batch in turn if batch]
    assert dealt == batch_order(**setting)


BAD_ORDERS = [
    ("length must be positive, got 0", {"length": 0}),
    ("max_tokens must be at least length = 5, got 4", {"max_tokens": 4}),
    ("epoch must be positive, got 0", {"epoch": 0}),
    ("multiple must be positive, got 0", {"multiple": 0}),
    ("rank must be in \\[0, world = 2\\), got 2", {"rank": 2, "world": 2}),
]


@pytest.mark.parametrize(("message", "change"), BAD_ORDERS)
def test_bad_order_is_refused(message: str, change: dict[str, int]) -> None:
    setting = {"num_ids": 100, "length": 5, "max_tokens": 10, "seed": 3, "epoch": 2}
    with pytest.raises(ValueError, match=f"batch_order: {message}"):
        batch_order(**{**setting, **change})
    with pytest.raises(ValueError, match="blocks: length must be positive, got 0"):
        blocks(7, 0)


@needs_golden
@pytest.mark.parametrize(
    ("name", "texts", "settings"),
    [
        ("wikitext-2", {"train": "train", "valid": "valid", "test": "test"}, {}),
        ("slices", {"valid": "slice20k", "test": "slice4k"}, {"dictionary": True}),
        ("wikitext-2-v1024", {"train": "train", "valid": "valid"}, {"nwords": 1024}),
    ],
)
def test_wikitext_2_becomes_the_original_s_files(
    name: str, texts: dict[str, str], settings: dict[str, object], tmp_path: Path
) -> None:
    if "dictionary" in settings:
        settings = {"dictionary": GOLDEN / "data" / "wikitext-2" / "dict.txt"}
    paths = {split: WIKITEXT / f"{text}.txt" for split, text in texts.items()}
    made = prepare(paths, tmp_path / "out", **settings)
    known = json.loads((GOLDEN / "data" / "data_counts.json").read_text("utf-8"))[name]
    ours, theirs = contents(made.folder), contents(GOLDEN / "data" / name)
    assert {file: ours[file] == data for file, data in theirs.items()} == dict.fromkeys(
        theirs, True
    )
    assert hashlib.sha256(ours["dict.txt"]).hexdigest() == known["dict"]["sha256"]
    assert made.dictionary_size == known["dict"]["types_incl_4_specials"]
    for split in set(texts) & set(known):
        assert hashlib.sha256(ours[f"{split}.bin"]).hexdigest() == known[split]["bin_sha256"]
        assert made.splits[split].num_lines == known[split]["lines"]
        assert made.splits[split].num_ids == known[split]["tokens_incl_eos"]


@needs_golden
def test_first_training_row_reads_the_original_s_ids() -> None:
    golden = json.loads((GOLDEN / "train" / "batch_order_A.json").read_text())
    _, ids = read_data(GOLDEN / "data" / "wikitext-2", "train")
    number = golden["first_10_batches_epoch1"][0][0]
    start, stop = blocks(len(ids.tokens), 64)[number]
    inputs, _ = block_tokens(ids.tokens, start, stop)
    assert inputs.tolist() == golden["first_batch_first_row_input_ids"]
