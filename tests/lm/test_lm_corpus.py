"""Corpora and tokenizers: nothing is lost, nothing is in two splits, and bad text is refused."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from linbias._run import hub
from linbias.data import corpus as corpora
from linbias.data import tokenizers as tokenizing
from linbias.data.corpus import SPLITS, find_corpus, load_corpus
from linbias.data.tokenizers import Tokenizer, byte_tokenizer, train_bpe

SAMPLE = "".join(f"def f{i}(x):\n    return x * {i}  # größer als {i - 1}\n\n" for i in range(200))
BPE = train_bpe(SAMPLE.encode(), 300)


def write_files(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


# As st.text(), which on a new machine first spends 5 seconds on a table of all characters.
CODES = st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
TEXTS = st.lists(CODES).map(lambda codes: "".join(map(chr, codes)))


@given(TEXTS)
def test_bytes_are_ids_and_decode_to_the_text(text):
    ids = byte_tokenizer().encode(text)
    assert ids.dtype == np.uint8
    assert bytes(ids) == text.encode()
    assert byte_tokenizer().decode(ids) == text


@given(TEXTS)
def test_any_text_survives_byte_pairs(text):
    assert BPE.decode(BPE.encode(text)) == text


def test_byte_pairs_are_always_the_same_shorten_text_and_fit_their_type():
    ids = BPE.encode(SAMPLE)
    assert (BPE.vocab_size, ids.dtype) == (300, np.uint16)
    assert len(ids) < 0.6 * len(SAMPLE.encode())
    assert ids.max() < 300
    assert train_bpe(SAMPLE.encode(), 300).backend.to_str() == BPE.backend.to_str()
    assert len(byte_tokenizer().encode("")) == len(BPE.encode(b"")) == 0
    assert byte_tokenizer().decode([0x61, 0xC3]) == "a\ufffd"  # half a character
    with pytest.raises(ValueError, match=r"train_bpe: vocab_size must be above 256 .* got 256"):
        train_bpe(b"text", 256)


def test_encoding_does_not_depend_on_the_pieces_a_text_is_cut_into(monkeypatch):
    text = SAMPLE + "a\r\nb\x0bc\u2028d\n\n\n   e"
    whole = BPE.encode(text)
    monkeypatch.setattr(tokenizing, "_PIECE_BYTES", 1)
    monkeypatch.setattr(tokenizing, "_BATCH_PIECES", 3)
    assert np.array_equal(BPE.encode(text), whole)
    assert np.array_equal(BPE.backend.encode(text).ids, whole)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), BPE], ids=["bytes", "bpe"])
def test_saved_tokenizer_loads_here_and_in_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    ids = tokenizer.encode(SAMPLE).tolist()
    assert Tokenizer.load(tmp_path).encode(SAMPLE).tolist() == ids
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(SAMPLE).input_ids == ids
    assert theirs.decode(ids) == SAMPLE


def test_stdlib_holds_source_only_and_is_split_about_90_5_5_and_always_alike():
    corpus = load_corpus()
    total = sum(corpus.num_bytes.values())
    assert 5e6 < total < 20e6
    assert 0.85 < corpus.num_bytes["train"] / total < 0.95
    assert min(corpus.num_bytes.values()) / total > 0.02
    assert {split: len(getattr(corpus, split)) for split in SPLITS} == corpus.num_bytes
    assert corpus.fingerprint == load_corpus("stdlib").fingerprint
    paths = corpora._stdlib_files().keys()
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= paths
    folders = {part for path in paths for part in Path(path).parts}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
    assert not any(path.startswith("_sysconfigdata") for path in paths)


def test_no_file_and_no_content_is_in_two_splits():
    files = {f"{i}.txt": b"text %d\n" % (i // 2) for i in range(100)}  # each content twice
    texts = corpora._split_files(files).texts
    assert corpora._split_files(dict(reversed(files.items()))).texts == texts
    lines = [line for split in SPLITS for line in texts[split].splitlines()]
    assert len(lines) == len(set(lines)) == 50
    assert [len(texts[split].splitlines()) for split in ("valid", "test")] == [2, 2]


def test_split_of_a_folder_does_not_depend_on_how_its_path_is_spelled(tmp_path, monkeypatch):
    files = {f"corp/{'sub/' * (i % 2)}{i}.txt": b"text %d\n" % i for i in range(40)}
    write_files(tmp_path, files)
    (tmp_path / "link").symlink_to("corp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ["corp", "./corp", "corp/", "corp/../corp", f"{tmp_path}/corp", "~/corp", "link"]
    loaded = [load_corpus(name) for name in spellings]
    assert len({corpus.fingerprint for corpus in loaded}) == 1
    assert len({tuple(corpus.splits.values()) for corpus in loaded}) == 1
    assert {corpus.location for corpus in loaded} == {str(tmp_path / "corp")}


def test_a_split_is_told_from_another_of_the_same_files(tmp_path):
    write_files(tmp_path / "corp", {f"{i}.txt": b"text %d\n" % i for i in range(40)})
    within, above = load_corpus(f"{tmp_path}/corp"), load_corpus(str(tmp_path))
    assert not set(within.splits.values()) & set(above.splits.values())
    (tmp_path / "corp" / "7.txt").write_text("edited")
    edited = load_corpus(f"{tmp_path}/corp")
    assert edited.splits == within.splits and edited.fingerprint != within.fingerprint


def test_three_files_are_one_split_each(tmp_path):
    files = {"a\udcff.txt": b"aaa", "b/c.txt": b"bbb\n", "d.md": b"ddd", ".x/h": b"hid"}
    write_files(tmp_path, files)  # a name need not be UTF-8
    corpus = load_corpus(str(tmp_path))
    texts = sorted(corpus.tokenizer.decode(getattr(corpus, split)) for split in SPLITS)
    assert texts == ["aaa\n", "bbb\n", "ddd\n"]


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("wiki.train.tokens", "wiki.validation.tokens", "wiki.test.tokens"),
        ("Train.md", "dev.md", "TEST.md"),
    ],
)
def test_files_that_are_named_for_the_splits_are_those(names, tmp_path):
    """By a hash of the paths, the text to test on would be trained on."""
    texts = dict(zip(names, (b"to train on", b"to choose by", b"to report"), strict=True))
    others = {f"notes {i}.txt": b"of something else %d" % i for i in range(30)}
    corpus = load_corpus(str(write_files(tmp_path, texts | others)))
    found = [bytes(getattr(corpus, split)).strip() for split in SPLITS]
    assert found == list(texts.values())
    assert corpus.source == f"3 files of {tmp_path}"


def test_files_that_merely_share_words_with_the_splits_are_hashed(tmp_path):
    code = {f"{name}.py": b"# " + name.encode() for name in ("train", "valid", "test")}
    deeper = {f"a/{name}.txt": b"a " + name.encode() for name in ("train", "valid", "test")}
    some = {"train.txt": b"one", "test.txt": b"two", "contrain.txt": b"three", "x.txt": b"four"}
    for number, files in enumerate((code, deeper, some)):
        folder = write_files(tmp_path / str(number), files)
        corpus = load_corpus(str(folder))
        read = {bytes(getattr(corpus, split)).strip() for split in SPLITS}
        assert b"\n".join(sorted(files.values())) == b"\n".join(
            sorted(line for text in read for line in text.split(b"\n"))
        )


def test_one_file_is_cut_into_contiguous_parts_between_characters(tmp_path):
    text = "ä€😀" * 101 + "\n"
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    corpus = load_corpus(str(tmp_path / "one.txt"))
    parts = [corpus.tokenizer.decode(getattr(corpus, split)) for split in SPLITS]
    assert "".join(parts) == text
    shares = [round(n / len(text.encode()), 2) for n in corpus.num_bytes.values()]
    assert shares == [0.9, 0.05, 0.05]
    clipped = load_corpus(str(tmp_path / "one.txt"), max_bytes=10)
    assert clipped.num_bytes == {"train": 9, "valid": 9, "test": 9}


def test_fingerprint_tells_texts_and_tokenizers_apart(tmp_path):
    path = tmp_path / "one.txt"
    prints = set()
    for text in (SAMPLE, SAMPLE.replace("f7", "g7")):
        path.write_text(text, encoding="utf-8")
        prints.add(load_corpus(str(path)).fingerprint)
        for size in (280, 290):
            prints.add(load_corpus(str(path), tokenizer="bpe", vocab_size=size).fingerprint)
    assert len(prints) == 6


def rows(*texts: str) -> list[dict[str, object]]:
    return [{"text": text, "id": 0} for text in texts]


def test_data_set_keeps_its_own_splits_and_blank_lines(data_sets):
    train = rows(" = A = \n", "", "a")
    data_sets.data = {"test": rows("c"), "train": train, "validation": rows("b")}
    corpus = load_corpus("wikitext-103")
    decoded = [corpus.tokenizer.decode(getattr(corpus, split)) for split in SPLITS]
    assert decoded == [" = A = \n\na\n", "b\n", "c\n"]
    call = ("Salesforce/wikitext", "wikitext-103-raw-v1", {"streaming": False})
    assert data_sets.calls == [call]
    assert load_corpus("tiny-shakespeare").location == "karpathy/tiny_shakespeare"


def test_data_set_without_splits_is_cut(data_sets):
    data_sets.data = {"train": rows(*map(str, range(10, 50)))}
    corpus = load_corpus("someone/numbers:small")
    assert data_sets.calls[0][:2] == ("someone/numbers", "small")
    joined = "".join(corpus.tokenizer.decode(getattr(corpus, split)) for split in SPLITS)
    assert joined == "".join(f"{i}\n" for i in range(10, 50))


def test_reading_a_data_set_stops_at_max_bytes(data_sets):
    def endless():
        while True:
            yield {"text": "more"}

    data_sets.data = {"train": endless(), "validation": endless(), "test": endless()}
    assert load_corpus("a/b", max_bytes=17).num_bytes["train"] == 17


def test_data_set_out_of_reach_is_refused_without_waiting(monkeypatch):
    import datasets
    from huggingface_hub import constants, get_session

    def hang(*_: object, **__: object) -> None:
        waited.append(ended.wait(30))

    ended, waited = threading.Event(), []
    monkeypatch.setattr(hub, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(type(get_session()), "head", hang)
    monkeypatch.setattr(datasets, "load_dataset", None)  # which would try again and again
    for function in (find_corpus, load_corpus):
        with pytest.raises(
            ValueError, match=r"got 'tiny-shakespeare' \(.* does not answer, .* --corpus text\.txt"
        ):
            function("tiny-shakespeare")
    assert waited == [] and not constants.HF_HUB_OFFLINE
    ended.set()


def test_a_corpus_is_found_before_it_is_read(tmp_path):
    find_corpus("stdlib")
    find_corpus(str(write_files(tmp_path, {"a.txt": b"a"})))
    with pytest.raises(ValueError, match="name must be 'stdlib', a file"):
        find_corpus(f"{tmp_path}/b.txt")


def test_folder_without_or_with_a_damaged_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"folder must hold tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)


REFUSED = [
    (b"ab\0", {}, "files must be UTF-8 text, got a NUL at byte 2 in .*bad"),
    (b"a\xff", {}, "files must be UTF-8 text, got a byte that is not UTF-8 at byte 1 in .*bad"),
    (b"", {}, "files must not be empty, got .*bad"),
    (b"a", {}, "must hold text for three splits, got 2 bytes"),
    (b"", {"tokenizer": "words"}, r"tokenizer must be one of \('bytes', .*\), got 'words'"),
    (b"", {"max_bytes": 0}, "max_bytes must be positive, got 0"),
    (b"", {"name": "./missing.txt"}, "name must be 'stdlib', a file.* got './missing.txt'"),
    (b"", {"name": "missing.txt"}, "name must be 'stdlib', a file.* got 'missing.txt'"),
    (b"", {"name": "missing/*"}, "name must be 'stdlib', a file.* got 'missing/\\*'"),
    (b"", {"name": "a/b"}, "column 'text', got one with line, id"),
]


@pytest.mark.parametrize(("content", "call", "message"), REFUSED)
def test_a_corpus_that_cannot_be_is_refused(content, call, message, tmp_path, data_sets):
    data_sets.data = {"train": [{"line": "a", "id": 0}]}
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match=f"load_corpus: .*{message}"):
        load_corpus(**{"name": str(tmp_path / "bad"), **call})
