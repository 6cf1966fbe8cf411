"""From text to ids: the original's bytes from any text, whole or not at all."""

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

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from linbias.paper import prepare as preparing
from linbias.paper.dictionary import Dictionary
from linbias.paper.prepare import Split, prepare
from linbias.paper.store import read_data
from paper_training import write

SHARED = Path(__file__).resolve().parents[3] / "shared"
WIKITEXT, GOLDEN = SHARED / "data" / "wikitext-2", SHARED / "golden" / "fairseq"

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
    part_bytes=st.sampled_from([1, 5, 1000]),
)
@example("\r", "\n", -1, -1, 8, 1)
@example("a\n b", " ", -1, -1, 8, 1)
@example("a\r\nb\r", "<unk> c </s>", -1, -1, 1, 2)
def test_files_are_those_of_a_plain_reading_of_the_text(
    text, other, nwords, threshold, padding, part_bytes
):
    sizes = {"nwords": nwords, "threshold": threshold, "padding_factor": padding}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "_PART_BYTES", part_bytes)
        train = write(Path(folder, "a"), text)
        valid = write(Path(folder, "b"), other)
        out = Path(folder, "out")
        made = prepare({"train": train, "valid": valid}, out, **sizes)
        lines, others = oracle_words(train), oracle_words(valid)
        symbols = oracle_symbols(lines, nwords, threshold, padding)
        counts = Counter(word for line in lines for word in line)
        listed = "".join(f"{word} {counts[word]}\n" for word in symbols[4:])
        data, index = oracle_files(lines, symbols)
        valid_data, valid_index = oracle_files(others, symbols)
        files = {"dict.txt": listed.encode(), "train.bin": data, "train.idx": index}
        assert contents(out) == files | {"valid.bin": valid_data, "valid.idx": valid_index}
        replaced = sum(word not in symbols for line in others for word in line)
        num_ids = len(valid_data) // 2
        assert made.splits["valid"] == Split(len(others), num_ids, replaced)
        assert made.dictionary_size == len(symbols)


def test_words_are_parted_where_the_regular_expression_of_the_original_parts_them():
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    text = "x".join(every)
    assert text.split() == re.sub(r"\s+", " ", text).strip().split(" ")


@pytest.fixture(scope="module")
def zipf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zipf")
    return {
        split: write(folder / split, zipf_text(num_lines, 3000, seed))
        for seed, (split, num_lines) in enumerate([("train", 3000), ("valid", 90), ("test", 1)])
    }


def test_dictionary_that_exists_is_used_as_it_is(zipf, tmp_path):
    first = prepare(zipf, tmp_path / "first", nwords=500).folder
    texts = {"test": zipf["test"]}
    again = prepare(texts, tmp_path / "again", dictionary=first / "dict.txt").folder
    everything = contents(first)
    files = ("dict.txt", "test.bin", "test.idx")
    assert contents(again) == {name: everything[name] for name in files}


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_PART_BYTES", 1 << 14)
    peaks = []
    for repeats in (2, 20):
        text = write(tmp_path / "text", ("some words " * 100 + "\n") * 20 * repeats)
        tracemalloc.start()
        prepare({"train": text}, tmp_path / f"out{repeats}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.1 * text.stat().st_size


def test_progress_rises_to_the_bytes_read(zipf, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_PART_BYTES", 20_000)
    calls: list[tuple[int, int | None]] = []
    prepare(zipf, tmp_path / "out", progress=lambda *call: calls.append(call))
    sizes = {split: path.stat().st_size for split, path in zipf.items()}
    total = sum(sizes.values()) + sizes["train"]  # counted, then encoded
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert len(done) > 10
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("call", [1, 2, 3, 4])  # two parts are counted, then encoded
def test_interrupted_run_leaves_nothing(call, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_PART_BYTES", 5)
    text = write(tmp_path / "text", "a b c\n" * 2)
    calls = itertools.count(1)

    def interrupt(*_: object) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare({"train": text}, tmp_path / "out", progress=interrupt)
    assert list(tmp_path.iterdir()) == [text]


def test_leavings_of_a_killed_run_go(tmp_path):
    text = write(tmp_path / "text", "a\n")
    (tmp_path / ".out.partial").mkdir()
    write(tmp_path / ".out.partial" / "train.bin", "half")
    (tmp_path / "out").mkdir()  # empty, so it may be filled
    prepare({"train": text}, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text"]
    assert sorted(contents(tmp_path / "out")) == ["dict.txt", "train.bin", "train.idx"]


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_PART_BYTES", 4)
    text = write(tmp_path / "text", b"fine\nstill\nna\xefve\n")
    message = r"prepare: texts must be UTF-8, got 0xef at byte 13 of .*text"
    with pytest.raises(ValueError, match=message):
        prepare({"train": text}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [text]


BAD_CALLS = [
    ("texts must be some of train, valid, test, got \\[\\]", {"texts": {}}),
    ("texts must be some of .*, got \\['dev'\\]", {"texts": {"dev": "text"}}),
    ("texts must have train, or dictionary be given", {"texts": {"valid": "text"}}),
    ("train must be a file with text, got no such file: none", {"texts": {"train": "none"}}),
    ("train must be a file with text, got no such file: used", {"texts": {"train": "used"}}),
    ("train must be a file with text, got an empty file: empty", {"texts": {"train": "empty"}}),
    ("output must be a new or empty folder, got 'used'", {"output": "used"}),
    ("output must be a new or empty folder, got 'text'", {"output": "text"}),
    ("output must be a folder that can be made, got '.*text/out'", {"output": "text/out"}),
    ("padding_factor must be positive, got 0", {"padding_factor": 0}),
    ("nwords and threshold must be left alone .* got 9 and -1", {"dictionary": "d", "nwords": 9}),
]


@pytest.mark.parametrize(("message", "call"), BAD_CALLS)
def test_bad_call_is_refused(message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "text", "a\n")
    write(tmp_path / "empty", "")
    (tmp_path / "used").mkdir()
    write(tmp_path / "used" / "dict.txt", "")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"prepare: {message}"):
        prepare(**{"texts": {"train": "text"}, "output": "out", **call})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def data_set(data_sets):
    lines = {"test": ["", " d <unk> \n"], "validation": [" b \n"]}
    lines["train"] = ["", " = A = \n", "", " b c b \n"]
    data_sets.data = {split: [{"text": line} for line in lines[split]] for split in lines}
    return data_sets


def test_data_set_is_prepared_like_its_text(data_set, tmp_path):
    progress = []
    out = tmp_path / "out"
    prepare("wikitext-103", out, nwords=6, progress=lambda *call: progress.append(call))
    options = {"streaming": True}
    assert data_set.calls == [("Salesforce/wikitext", "wikitext-103-v1", options)]
    texts = {"train": "\n = A = \n\n b c b \n", "valid": " b \n", "test": "\n d <unk> \n"}
    for split, text in texts.items():
        write(tmp_path / split, text)
    prepare({split: tmp_path / split for split in texts}, tmp_path / "same", nwords=6)
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "same", *texts}
    assert progress[0] == (1, None)
    total = sum(len(texts[split]) for split in ("train", "train", "valid", "test"))
    assert progress[-1] == (total, total)


def test_data_set_that_breaks_off_leaves_nothing(data_set, tmp_path):
    def breaks_off():
        yield {"text": "a"}
        raise ConnectionError("no network")

    data_set.data["test"] = breaks_off()
    with pytest.raises(ValueError, match=r"can be reached, got 'wikitext-2' \(no network\)"):
        prepare("wikitext-2", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_data_set_is_not_fetched_for_nothing(data_set, tmp_path):
    message = "prepare: data set must be one of wikitext-2, wikitext-103, got 'c4'"
    with pytest.raises(ValueError, match=message):
        prepare("c4", tmp_path / "out")
    with pytest.raises(ValueError, match="output must be a new or empty folder"):
        prepare("wikitext-2", write(tmp_path / "out", "file"))
    assert not data_set.calls


def test_folder_is_read_whole_or_refused(zipf, tmp_path):
    folder = prepare(zipf, tmp_path / "data", nwords=100).folder

    def refused(message, split):
        with pytest.raises(ValueError, match=message):
            read_data(folder, split)

    dictionary, ids = read_data(folder, "valid")
    assert (len(dictionary), (ids == dictionary.EOS).sum()) == (104, 90)  # lines
    refused(r"split must be one of .* \(test, train, valid\), got 'x'", "x")
    (folder / "valid.bin").unlink()
    refused(r"valid.bin must be in .*data, got no such file", "valid")
    write(folder / "dict.txt", "a 1\n")
    refused(r"train.bin must hold ids in \[0, 5\), the dictionary", "train")
    (folder / "dict.txt").unlink()
    refused(r"folder must hold dict.txt, got .*data", "train")
    with pytest.raises(ValueError, match=r"Dictionary.read: path must be a dict.txt, got .*data"):
        Dictionary.read(folder)


LONG = pytest.mark.thorough


@pytest.mark.skipif(not (WIKITEXT.is_dir() and GOLDEN.is_dir()), reason="no golden data")
@pytest.mark.parametrize(
    ("name", "texts", "settings"),
    [
        pytest.param("wikitext-2", ["train", "valid", "test"], {}, marks=LONG),
        ("slices", ["slice20k", "slice4k"], {"dictionary": True}),
        pytest.param("wikitext-2-v1024", ["train", "valid"], {"nwords": 1024}, marks=LONG),
    ],
)
def test_wikitext_2_becomes_the_original_s_files(name, texts, settings, tmp_path):
    if "dictionary" in settings:
        settings = {"dictionary": GOLDEN / "data" / "wikitext-2" / "dict.txt"}
    names = {"slice20k": "valid", "slice4k": "test"}
    paths = {names.get(text, text): WIKITEXT / f"{text}.txt" for text in texts}
    made = prepare(paths, tmp_path / "out", **settings)
    known = json.loads((GOLDEN / "data" / "data_counts.json").read_text("utf-8"))[name]
    ours, theirs = contents(made.folder), contents(GOLDEN / "data" / name)
    assert all(ours[file] == data for file, data in theirs.items())
    assert hashlib.sha256(ours["dict.txt"]).hexdigest() == known["dict"]["sha256"]
    assert made.dictionary_size == known["dict"]["types_incl_4_specials"]
    for split in set(paths) & set(known):
        assert hashlib.sha256(ours[f"{split}.bin"]).hexdigest() == known[split]["bin_sha256"]
        assert made.splits[split].num_lines == known[split]["lines"]
        assert made.splits[split].num_ids == known[split]["tokens_incl_eos"]
