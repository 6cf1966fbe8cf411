"""`linbias embed --spans`: vectors of passages, each of which has seen its whole document."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from pyarrow import parquet
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from linbias.models import Document, LinbiasBertModel, embed, load
from linbias.models.embedding.spans import sentences
from test_embed import alone, run, write_encoder

pytestmark = pytest.mark.usefixtures("same_start")

TEXTS = ["So near. So far away! Z\u00fcrich?", "one", "The end is far. " * 20 + "Near it."]
LONG = "." * 300_000 + " " * 300_000
PAIRS = [[(0, 8), (9, 21), (22, 29), (3, 12)], [(0, 3)], [(300, 328), (0, 15)]]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "so", "far", "a", "##way", "near", ".", "z\u00fcrich"]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "encoder")


@pytest.fixture
def words_encoder(tmp_path: Path) -> Path:
    """An encoder whose tokens are words and parts of words, between [CLS] and [SEP]."""
    folder = write_encoder(tmp_path / "words", vocab_size=len(WORDS))
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder)
    return folder


def assert_close(ours: Any, expected: torch.Tensor) -> None:
    assert np.abs(ours - expected.numpy()).max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("normalize", [False, True])
def test_each_vector_is_the_mean_over_its_span_of_the_whole_document(
    encoder: Path, normalize: bool
) -> None:
    result = embed(encoder, TEXTS, spans=PAIRS, normalize=normalize, batch_tokens=64)
    plain = embed(encoder, TEXTS, normalize=normalize, batch_tokens=64)
    assert np.array_equal(result.vectors, plain.vectors)
    assert result.spans == tuple(map(tuple, PAIRS)) and plain.spans == plain.span_vectors == ()
    for text, pairs, ours in zip(TEXTS, PAIRS, result.span_vectors, strict=True):
        hidden = alone(encoder, text)
        assert ours.shape == (len(pairs), 32) and ours.dtype == np.float32
        for vector, (begin, end) in zip(ours, pairs, strict=True):
            first = len(text[:begin].encode())
            expected = hidden[first : first + len(text[begin:end].encode())].mean(0)
            assert_close(vector, expected / expected.norm() if normalize else expected)


def test_forty_passages_of_20_000_tokens_come_from_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = write_encoder(tmp_path / "encoder", train_length=512, num_hidden_layers=1)
    text = "to be or not to be, " * 1000
    hidden = alone(encoder, text)
    lengths: list[int] = []
    own = LinbiasBertModel.forward

    def count(self: Any, ids: torch.Tensor, **inputs: Any) -> Any:
        lengths.append(ids.shape[1])
        return own(self, ids, **inputs)

    monkeypatch.setattr(LinbiasBertModel, "forward", count)
    result = embed(encoder, [text], spans=500)
    assert lengths == [20_000] and len(result.spans[0]) == 40
    assert_close(result.span_vectors[0], hidden.unflatten(0, (40, 500)).mean(1))
    assert_close(result.vectors, hidden.mean(0)[None])


def test_a_span_holds_each_token_of_which_it_has_a_character(words_encoder: Path) -> None:
    #        0123456789012345678
    text = "  So far away. Near"
    tokens = [2, 4, 5, 6, 7, 9, 8, 3]
    holds = {(2, 4): (1, 2), (0, 6): (1, 3), (9, 13): (3, 5), (10, 11): (4, 5), (0, 19): (1, 7)}
    hidden = load(words_encoder, dtype=torch.float64)(torch.tensor([tokens])).last_hidden_state[0]
    result = embed(words_encoder, [text], spans=[list(holds)])
    assert result.num_tokens == (8,)
    expected = [hidden[first:end].mean(0) for first, end in holds.values()]
    assert_close(result.span_vectors[0], torch.stack(expected).detach())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Near. Far away!  Where?\n", ["Near.", "Far away!", "Where?"]),
        ("no stop at all", ["no stop at all"]),
        ('He said "Stop!" and left. (Really.) \u201cYes.\u201d Well... OK', [
            'He said "Stop!" and left.', "(Really.)", "\u201cYes.\u201d", "Well...", "OK"]),
        ("As J. S. Bach wrote, e.g. here, 3.14 etc. of it.", [
            "As J. S. Bach wrote, e.g. here, 3.14 etc. of it."]),
        ("1. One line\nwraps here. 2. Two", ["1. One line\nwraps here.", "2. Two"]),
        ("A heading\n\nits text.\r\n \r\nmore", ["A heading", "its text.", "more"]),
        ("\u8fd1\u3044\u3002\u300c\u9060\u3044\uff01\u300d\u306f\u3044", [
            "\u8fd1\u3044\u3002", "\u300c\u9060\u3044\uff01\u300d", "\u306f\u3044"]),
        ("\u092f\u0939\u0964 \u0935\u0939\u0964", ["\u092f\u0939\u0964", "\u0935\u0939\u0964"]),
        (f"{LONG}a{LONG}", [f"{LONG}a{LONG}".rstrip()]),
    ],
    ids=range(9),
)  # fmt: skip
def test_sentences(text: str, expected: list[str]) -> None:
    assert [text[begin:end] for begin, end in sentences(text)] == expected


def test_tokens_are_counted_without_cutting_a_character(encoder: Path) -> None:
    (spans,) = embed(encoder, ["ab\u00fccd e"], spans=3).spans
    assert spans == ((0, 2), (2, 5), (5, 7))  # the third token is the first half of a character
    (spans,) = embed(encoder, ["\u00fc\u20ac"], spans=1).spans
    assert spans == ((0, 1), (1, 2))


@pytest.mark.parametrize("spans", ["sentences", 7, lambda text: [(0, 3), (1, len(text))]])
def test_the_spans_that_were_found_give_the_same_vectors_when_given(
    encoder: Path, words_encoder: Path, spans: Any
) -> None:
    for folder, texts in ((encoder, TEXTS), (words_encoder, ["So far. \u200b\n\nAway near"])):
        found = embed(folder, texts, spans=spans)
        assert found.spans and found.span_vectors
        # Anything that iterates over pairs of integers will do.
        for given in (found.spans, [np.array(pairs) for pairs in found.spans], [
            (pair for pair in pairs) for pairs in found.spans
        ]):  # fmt: skip
            again = embed(folder, texts, spans=given)
            assert again.spans == found.spans
            for ours, theirs in zip(again.span_vectors, found.span_vectors, strict=True):
                assert np.array_equal(ours, theirs)


def test_a_splitter_sees_what_is_read_and_its_spans_without_tokens_are_left_out(
    words_encoder: Path,
) -> None:
    seen: list[str] = []

    def split(text: str) -> Any:
        seen.append(text)
        return [(0, 3), (3, 4), (4, len(text))]

    text = "  So   far away. Near"
    result = embed(words_encoder, [text], spans=split, max_length=5)  # [CLS] So far a [SEP]
    assert seen == ["So   far a"] and result.spans == (((2, 5), (6, 12)),)
    assert result.num_shortened == 1
    for spans, expected in ((1, ((2, 7), (7, 11), (11, 12))), ("sentences", ((2, 12),))):
        assert embed(words_encoder, [text], spans=spans, max_length=5).spans == (expected,)
    with pytest.raises(ValueError, match=r"spans must have 2 <= begin < end <= 12, the .*17\)"):
        embed(words_encoder, [text], spans=[[(2, 17)]], max_length=5)


def test_all_formats_hold_the_spans_and_a_finished_run_returns_them(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    made = embed(encoder, TEXTS, spans="sentences")
    num_spans = sum(map(len, made.spans))
    for ending in ("npy", "jsonl", "parquet"):
        words = [encoder, tmp_path / "in.jsonl", "--spans", "sentences"]
        result = run(*words, "-o", tmp_path / f"v.{ending}", "--json")
        assert json.loads(result.stdout)["num_spans"] == num_spans == 25
    assert np.array_equal(np.load(tmp_path / "v.spans.npy"), np.concatenate(made.span_vectors))
    named = json.loads((tmp_path / "v.ids.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "v.parquet").to_pydict()
    columns = {name: [record[name] for record in records] for name in records[0]}
    assert list(columns) == list(table) == ["id", "num_tokens", "vector", "spans", "span_vectors"]
    listed = json.loads(json.dumps(made.spans))
    assert named["spans"] == columns["spans"] == table["spans"] == listed
    for rows in (columns["span_vectors"], table["span_vectors"]):
        for ours, expected in zip(rows, made.span_vectors, strict=True):
            assert np.array_equal(np.asarray(ours, np.float32), expected)
    written = {path: path.read_bytes() for path in tmp_path.glob("v.*")}
    monkeypatch.setattr(LinbiasBertModel, "forward", None)
    documents = [Document(f"{tmp_path / 'in.jsonl'}:{i}", x) for i, x in enumerate(TEXTS, 1)]
    for ending in ("npy", "jsonl", "parquet"):
        output = tmp_path / f"v.{ending}"
        found = embed(encoder, documents, output, spans="sentences")
        assert found.spans == made.spans and np.array_equal(found.vectors, made.vectors)
        for ours, expected in zip(found.span_vectors, made.span_vectors, strict=True):
            assert np.array_equal(ours, expected)
        with pytest.raises(ValueError, match=r"\(spans is 'sentences' there and 9 here; span_off"):
            embed(encoder, documents, output, spans=9)
        with pytest.raises(ValueError, match=r"\(spans is 'sentences' there and None here"):
            embed(encoder, documents, output)
    shown = run(*words, "-o", tmp_path / "v.npy").stdout
    assert ", 25 passages; 32 numbers each" in shown and "finished before" in shown
    assert {path: path.read_bytes() for path in tmp_path.glob("v.*")} == written
    (tmp_path / "v.npy").unlink()
    (tmp_path / "v.ids.json").unlink()
    with pytest.raises(ValueError, match=r"output must not exist, got .*v\.spans\.npy"):
        embed(encoder, TEXTS, tmp_path / "v.npy")


@pytest.mark.parametrize("ending", ["npy", "jsonl", "parquet"])
def test_an_output_of_before_there_were_spans_is_still_finished(
    encoder: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linbias.models.embedding import embed as module

    written = module.WRITERS[f".{ending}"]

    def write(output: Path, made: Any, settings: dict[str, Any]) -> None:
        written(output, made, {k: v for k, v in settings.items() if "span" not in k})

    monkeypatch.setitem(module.WRITERS, f".{ending}", write)
    made = embed(encoder, TEXTS, tmp_path / f"v.{ending}")
    monkeypatch.setattr(LinbiasBertModel, "forward", None)
    found = embed(encoder, TEXTS, tmp_path / f"v.{ending}")
    assert np.array_equal(found.vectors, made.vectors) and found.spans == found.span_vectors == ()


def test_a_killed_run_goes_on_with_the_same_spans_only(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, _: int) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "v.npy"
    same = {"folder": encoder, "documents": TEXTS, "output": output, "batch_tokens": 32}
    with pytest.raises(KeyboardInterrupt):
        embed(**same, spans=PAIRS, progress=stop)
    assert [path.name for path in tmp_path.glob("v*")] == ["v.npy.partial"]
    other = [[(0, 8), (9, 21), (22, 29), (3, 13)], *PAIRS[1:]]
    for spans, message in (
        (None, r"\(spans is 'pairs' there and None here; span_offsets is"),
        (other, r"v\.npy\.partial \(span_offsets is '\w+' there and '\w+' here\)"),
        (lambda text: [(0, 1)], r"\(spans is 'pairs' there and 'function' here; span_offsets"),
    ):
        with pytest.raises(ValueError, match=message):
            embed(**same, spans=spans)
    lengths: list[int] = []
    own = LinbiasBertModel.forward

    def count(self: Any, ids: torch.Tensor, **inputs: Any) -> Any:
        lengths.append(ids.shape[1])
        return own(self, ids, **inputs)

    monkeypatch.setattr(LinbiasBertModel, "forward", count)
    resumed = embed(**same, spans=PAIRS)
    assert lengths == [30, 3]  # and not 328
    whole = embed(encoder, TEXTS, spans=PAIRS, batch_tokens=32)
    for ours, expected in zip(resumed.span_vectors, whole.span_vectors, strict=True):
        assert np.array_equal(ours, expected)
    assert np.array_equal(np.load(tmp_path / "v.spans.npy"), np.concatenate(whole.span_vectors))


def test_a_vector_of_a_span_that_is_not_finite_names_its_document(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linbias.models.embedding import embed as module

    compute = module._compute

    def spoil(*arguments: Any) -> Any:
        rows = compute(*arguments)
        rows[-1] = np.nan
        return rows

    monkeypatch.setattr(module, "_compute", spoil)
    with pytest.raises(ValueError, match="vectors must be finite, got another of document 1"):
        embed(encoder, ["near", "a"], spans=[[(0, 1)], [(0, 1)]])


WAYS = "spans must be 'sentences' or a number of tokens"


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ("words", ValueError, rf"{WAYS} \(.* a function, or pairs per document\), got 'words'"),
        (0, ValueError, "spans must be at least 1 token, got 0"),
        (True, TypeError, f"{WAYS} .*, got True"),
        (2.5, TypeError, rf"{WAYS} .*, got 2\.5"),
        ([[(0, 1)]], ValueError, "spans must be of all 2 documents, got those of 1"),
        ([(0, 1), (1, 2)], TypeError, "must be pairs .* of integers, got 0 of document 'a'"),
        ([1, 2], TypeError, "spans must be pairs for each document, got a int of document 'a'"),
        ([[(0, 1)], []], ValueError, "spans must be at least one, got none of document 'b'"),
        ([[(0, 1)], [(0, 1.0)]], TypeError, r"of integers, got \(0, 1\.0\) of document 'b'"),
        ([[(0, 1)], [(0, 1, 2)]], TypeError, r"pairs \(begin, end\) .*, got \(0, 1, 2\) of"),
        ([[(0, 9)], [(0, 4)]], ValueError, r"spans must have 0 <= begin < end <= 8, the char"),
        ([[(0, 1)], [(0, 4)]], ValueError, r"<= 3, the .* read, got \(0, 4\) of document 'b'"),
        ([[(0, 1)], [(2, 2)]], ValueError, r"begin < end <= 3, .*, got \(2, 2\) of document 'b'"),
        ([[(0, 1)], [(-1, 2)]], ValueError, r"got \(-1, 2\) of document 'b'"),
        (lambda text: [], ValueError, "spans must be at least one, got none of document 'a'"),
        (lambda text: None, TypeError, "spans must be pairs .*, got a NoneType of document 'a'"),
        (lambda text: ["sentence"], TypeError, "of integers, got 'sentence' of document 'a'"),
        (lambda text: [(0, 5)], ValueError, r"<= 3, .*, got \(0, 5\) of document 'b'"),
        ([[(4, 5)], [(0, 3)]], ValueError, r"spans must hold a token, got \(4, 5\) of doc.* 'a'"),
        (lambda text: [(4, 5)], ValueError, r"spans must hold a token, got \(4, 5\) of doc.* 'a'"),
    ],
)  # fmt: skip
def test_refused_spans(
    words_encoder: Path, tmp_path: Path, spans: Any, error: type[Exception], message: str
) -> None:
    documents = [Document("a", "far.   a"), Document("b", "far")]
    if "'b'" in message and callable(spans):
        documents = [Document("a", "far. far"), Document("b", "far")]
    with pytest.raises(error, match=f"^embed: .*{message}"):
        embed(words_encoder, documents, tmp_path / "v.npy", spans=spans)
    assert not list(tmp_path.glob("v*"))


def test_spans_need_the_mean_and_a_fast_tokenizer(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="embed: pooling must be 'mean' with spans, got 'cls'"):
        embed(encoder, TEXTS, spans=3, pooling="cls")
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match="folder must hold a fast tokenizer with spans, got "):
        embed(encoder, TEXTS, spans=3)
