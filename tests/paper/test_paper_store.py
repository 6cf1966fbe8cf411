"""The files of the paper's data: written and read back the same, and damaged ones are refused."""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linbias.paper.dictionary import Dictionary
from linbias.paper.store import check_ids, ids_dtype, read_ids, write_ids
from paper_training import write


def test_dictionary_survives_writing_and_reading(tmp_path):
    path = tmp_path / "dict.txt"
    dictionary = Dictionary.from_counts({"b": 2, "ä": 2, "<unk>": 9, "madeupword0001": 7})
    dictionary.write(path)
    assert path.read_text("utf-8") == "madeupword0001 7\nb 2\nä 2\nmadeupword0000 0\n"
    again = Dictionary.read(path)
    assert (again.symbols, again.counts) == (dictionary.symbols, dictionary.counts)
    assert again.ids == dictionary.ids
    assert len(again) == 8
    assert list(tmp_path.iterdir()) == [path]


def test_line_marked_so_overwrites_a_word_and_keeps_its_mark(tmp_path):
    text = "a 5\nb 4\na 3 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\n"
    dictionary = Dictionary.read(write(tmp_path / "dict.txt", text))
    assert dictionary.symbols[4:] == ["a", "b", "a", "<unk>"]
    assert dictionary.encode_line("a b <unk> other") == [6, 5, 7, 3, 2]
    dictionary.write(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == text


def test_dictionary_file_may_have_any_line_ends_and_words_with_spaces(tmp_path):
    dictionary = Dictionary.read(write(tmp_path / "dict.txt", "two words 3\r\nx 1 \rlast 0"))
    assert dictionary.symbols[4:] == ["two words", "x", "last"]
    assert dictionary.counts[4:] == [3, 1, 0]


BAD_DICTIONARIES = {
    "line 2 of .*dict.txt must be a word and its count, got 'the\\\\n'": b"a 1\nthe\n",
    "line 1 of .* must be a word and its count, got 'the many": b"the many\n",
    "line 2 of .* must be a word and its count, got '\\\\n'": b"a 1\n\nb 1\n",
    "line 1 of .* must be a word and its count, got '3'": b"3",
    "line 3 of .* must be a new word, or end in #fairseq:overwrite, got 'a'": b"a 1\nb 1\na 1",
    "line 1 of .* must be a new word, .* got '<unk>' again": b"<unk> 9\n",
    "line 2 of .* must be UTF-8": b"a 1\n\xff 1\n",
}


@pytest.mark.parametrize("message", BAD_DICTIONARIES)
def test_bad_dictionary_is_refused_with_its_line(message, tmp_path):
    path = write(tmp_path / "dict.txt", BAD_DICTIONARIES[message])
    with pytest.raises(ValueError, match=f"Dictionary.read: {message}"):
        Dictionary.read(path)


def test_ids_take_two_bytes_as_long_as_the_original_lets_them():
    sizes = (8, 65_499, 65_500, 267_744)
    assert [ids_dtype(size).str for size in sizes] == ["<u2", "<u2", "<u4", "<u4"]


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2", "u4", "u8", ">i4"])
def test_ids_of_every_width_are_read_as_written(dtype, tmp_path):
    assert write_ids(tmp_path / "x", [[5, 100], [], [7]], dtype).tolist() == [2, 0, 1]
    ids = read_ids(tmp_path / "x")
    assert ids.tolist() == [5, 100, 7]
    assert ids.dtype == np.dtype(dtype).newbyteorder("<")
    assert isinstance(ids, np.memmap)


def test_text_without_lines_is_read_as_written(tmp_path):
    write_ids(tmp_path / "x", [])
    assert len(read_ids(tmp_path / "x")) == 0


def test_ids_of_no_integer_type_and_too_large_ones_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"write_ids: dtype must be one of .*, got f4"):
        write_ids(tmp_path / "x", [[1]], "f4")
    with pytest.raises(OverflowError):
        write_ids(tmp_path / "x", [[3, 65536]], "u2")
    assert not list(tmp_path.iterdir())


def test_truncated_or_longer_file_is_refused(tmp_path):
    write_ids(tmp_path / "x", [[0, 1], [2, 3, 4], [5]])
    sizes = r": the 6 ids of x\.idx need 12 bytes, got \d+ bytes"
    cut = {"x.bin": f"is truncated{sizes}", "x.idx": "(is truncated|must begin)"}
    for name, got in cut.items():
        path = tmp_path / name
        data = path.read_bytes()
        for size in range(len(data)):
            path.write_bytes(data[:size])
            with pytest.raises(ValueError, match=rf"read_ids: .*{name} {got}"):
                read_ids(tmp_path / "x")
        path.write_bytes(data + b"\0")
        with pytest.raises(ValueError, match=rf"read_ids: .*{name} is too long"):
            read_ids(tmp_path / "x")
        path.write_bytes(data)


@given(place=st.integers(0, 61), byte=st.integers(0, 255))
def test_changed_index_is_refused_or_says_the_same_ids(place, byte):
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "x")
        write_ids(prefix, [[0, 1], [2, 3, 4], [5]])
        index = bytearray(Path(folder, "x.idx").read_bytes())
        assert len(index) == 62
        index[place] = byte
        Path(folder, "x.idx").write_bytes(index)
        try:
            ids = read_ids(prefix)
        except ValueError:
            return
        assert ids.tolist() == list(range(6))


def header(version: int, dtype: int, num_lines: int) -> bytes:
    return struct.pack("<9sQBQ", b"MMIDIDX\0\0", version, dtype, num_lines)


BAD_HEADERS = {
    "must begin with MMIDIDX, got b'PK": b"PK\3\4 a zip file of some size",
    "must be memory-mapped data, got .* TNTIDX": b"TNTIDX\0\0" + b"\0" * 40,
    "got version 2 and": header(2, 8, 0),
    "integer ids, got version 1 and dtype code 7": header(1, 7, 0),
    "is truncated: 18446744073709551615 lines need": header(1, 8, 2**64 - 1),
    "must list lines one after another": header(1, 8, 2) + struct.pack("<2i2q", 3, -1, 0, 6),
}


@pytest.mark.parametrize("message", BAD_HEADERS)
def test_foreign_index_is_refused(message, tmp_path):
    error = NotImplementedError if "TNTIDX" in message else ValueError
    write(tmp_path / "x.idx", BAD_HEADERS[message])
    write(tmp_path / "x.bin", b"\0" * 4)
    with pytest.raises(error, match=f"read_ids: .*x.idx {message}|read_ids: .*{message}"):
        read_ids(tmp_path / "x")


@pytest.mark.parametrize(("bad", "dtype"), [(9, "u2"), (70_000, "u4"), (-3, "i8")])
def test_id_outside_the_dictionary_is_named(bad, dtype):
    check_ids(np.array([0, 8, 3], dtype), 9, "valid.bin")
    check_ids(np.array([], dtype), 9, "valid.bin")
    message = rf"check_ids: valid.bin must hold ids in \[0, 9\), .* got {bad} at index 2"
    with pytest.raises(ValueError, match=message):
        check_ids(np.array([0, 8, bad, bad], dtype), 9, "valid.bin")
