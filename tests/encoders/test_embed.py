"""`linbias embed`: a vector for each document, however long."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from typer.testing import CliRunner, Result

from linbias import cli
from linbias.data.tokenizers import byte_tokenizer
from linbias.models import (
    Document,
    LinbiasBertConfig,
    LinbiasBertModel,
    embed,
    load,
    read_documents,
)
from linbias.models.embedding.embed import plan_batches

pytestmark = pytest.mark.usefixtures("same_start")

TEXTS = ["near", "far, far away", "n", "0123456789" * 30, "Z\u00fcrich"]
DOCUMENTS = [Document(f"d{number}", text) for number, text in enumerate(TEXTS)]


def run(*words: object, input: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, ["embed", *map(str, words), "-q"], input=input)


def write_encoder(folder: Path, **changes: Any) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    settings = {"vocab_size": 256, "num_hidden_layers": 2, "initializer_range": 0.2, **sizes}
    LinbiasBertModel(LinbiasBertConfig(**settings | changes)).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "encoder")


@torch.no_grad()
def alone(encoder: Path, text: str) -> torch.Tensor:
    """The hidden states [T, hidden_size] of one document in float64, byte by byte."""
    model = load(encoder, dtype=torch.float64)
    return model(torch.tensor([list(text.encode())])).last_hidden_state[0]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_each_vector_is_that_of_its_document_alone(
    encoder: Path, pooling: Any, normalize: bool
) -> None:
    result = embed(encoder, DOCUMENTS, pooling=pooling, normalize=normalize, batch_tokens=32)
    assert result.ids == ("d0", "d1", "d2", "d3", "d4")
    assert result.num_tokens == (4, 13, 1, 300, 7)
    for text, ours in zip(TEXTS, result.vectors, strict=True):
        hidden = alone(encoder, text)
        expected = hidden.mean(0) if pooling == "mean" else hidden[0]
        if normalize:
            expected = expected / expected.norm()
        assert np.abs(ours - expected.numpy()).max() < 1e-5 * expected.abs().max()


def test_a_document_of_more_than_8192_tokens_is_read_whole(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder", train_length=512, num_hidden_layers=1)
    text = "to be or not to be " * 450
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("to be")
    words = [encoder, tmp_path / "long.txt", tmp_path / "short.txt", "-o", tmp_path / "v.npy"]
    assert "the longest 8,550" in run(*words).stdout
    ours = np.load(tmp_path / "v.npy")
    expected = alone(encoder, text).mean(0).numpy()
    assert np.abs(ours[0] - expected).max() < 1e-5 * np.abs(expected).max()
    scaled = embed(encoder, [Document("a", text)], slope_scale="interpolate").vectors
    assert np.abs(ours[0] - scaled[0]).max() > 1e-3 * np.abs(expected).max()


def test_all_formats_hold_the_same(encoder: Path, tmp_path: Path) -> None:
    lines = (
        {"text": "far", "id": 7, "more": [1]},
        {"id": "x", "text": "near, near"},
        {"text": "n"},
    )
    written = "\n\n".join(map(json.dumps, lines))
    (tmp_path / "in.jsonl").write_text(written)
    for ending in ("npy", "jsonl", "parquet"):
        result = run(encoder, tmp_path / "in.jsonl", "-o", tmp_path / f"v.{ending}", "--json")
        assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_tokens"] == 14
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.dtype == np.float32 and vectors.shape == (3, 32)
    named = json.loads((tmp_path / "v.ids.json").read_text())
    names = [7, "x", f"{tmp_path / 'in.jsonl'}:5"]
    assert named["ids"] == names and named["num_tokens"] == [3, 10, 1]
    assert named["settings"]["pooling"] == "mean"
    records = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == names
    assert np.array_equal(np.array([r["vector"] for r in records], np.float32), vectors)
    table = parquet.read_table(tmp_path / "v.parquet").to_pydict()
    assert table["id"] == list(map(str, names)) and table["num_tokens"] == [3, 10, 1]
    assert np.array_equal(np.array(table["vector"], np.float32), vectors)
    piped = run(encoder, "-", "-o", tmp_path / "piped.jsonl", input=written)
    assert piped.exit_code == 0, piped.output
    (first, *_, last) = (tmp_path / "piped.jsonl").read_text().splitlines()
    assert json.loads(first) == records[0] and json.loads(last)["id"] == "-:5"
    assert sorted(x.name for x in tmp_path.glob("*.partial")) == []


def test_max_length_and_precision(encoder: Path) -> None:
    short = embed(encoder, [Document("a", "far")])
    cut = embed(encoder, [Document("a", "far away"), Document("b", "n")], max_length=3)
    assert cut.num_tokens == (3, 1) and cut.num_shortened == 1
    # Batches of one text and of two are added up in another order.
    assert np.abs(cut.vectors[0] - short.vectors[0]).max() < 1e-5
    narrow = embed(encoder, [Document("a", "far")], precision="bf16")
    gap = np.abs(narrow.vectors - short.vectors).max()
    assert 1e-4 < gap < 0.05 and narrow.vectors.dtype == np.float32


def test_its_model_is_prepacked(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("linbias.models.embedding.embed.prepack", seen.append)
    embed(encoder, [Document("a", "near")], device="cpu")
    assert [type(model) for model in seen] == [LinbiasBertModel]


def test_batches_are_under_their_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 200).tolist()
    batches = plan_batches([*lengths, 1000], 256)
    assert batches[0] == [200]
    assert sorted(i for batch in batches for i in batch) == list(range(201))
    for batch in batches[1:]:
        assert len(batch) * max(lengths[i] for i in batch) <= 256
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches[1:])
    assert padded < 1.05 * sum(lengths)


def test_what_a_killed_run_left_is_continued_by_the_same_run_only(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "v.npy"

    def stop(done: int, _: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(encoder, DOCUMENTS, output, batch_tokens=32, progress=stop)
    assert not output.exists() and (tmp_path / "v.npy.partial" / "log.jsonl").exists()
    same = {"folder": encoder, "documents": DOCUMENTS, "output": output, "batch_tokens": 32}
    for changes, message in (
        ({"pooling": "cls"}, r"another run's, .*\(pooling is 'mean' there and 'cls' here\)"),
        ({"documents": DOCUMENTS[:-1]}, r"another run's, .*documents is '.* there and"),
        ({"documents": [Document("d0", "neat"), *DOCUMENTS[1:]]}, r"\(documents is '.* there and"),
        ({"folder": write_encoder(tmp_path / "other")}, r"\(model is '.* there and"),
    ):
        with pytest.raises(ValueError, match=message):
            embed(**same | changes)
    computed: list[int] = []
    own = LinbiasBertModel.forward

    def count(self: Any, ids: torch.Tensor, **inputs: Any) -> Any:
        computed.append(len(ids))
        return own(self, ids, **inputs)

    monkeypatch.setattr(LinbiasBertModel, "forward", count)
    resumed = embed(**same)
    assert computed == [2]  # of the batches [300], [13, 7], [4, 1]
    whole = embed(encoder, DOCUMENTS, batch_tokens=32)
    assert np.array_equal(resumed.vectors, whole.vectors)
    assert np.array_equal(np.load(output), whole.vectors)
    with pytest.raises(ValueError, match=r"must not be another run's, got .*v\.npy \(batch"):
        embed(encoder, DOCUMENTS, output)


@pytest.mark.parametrize("ending", ["npy", "jsonl", "parquet"])
def test_a_finished_run_is_returned_as_it_is(
    ending: str, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "far", "id": 7}\n{"text": "near, near", "id": 8}')
    output = tmp_path / f"v.{ending}"
    words = [encoder, tmp_path / "in.jsonl", "--max-length", 5, "-o", output]
    first = run(*words)
    assert first.exit_code == 0 and "finished before" not in first.stdout
    made = embed(encoder, read_documents([tmp_path / "in.jsonl"]), max_length=5)
    written = {path: path.read_bytes() for path in tmp_path.glob("v.*")}
    monkeypatch.setattr(LinbiasBertModel, "forward", None)
    again = run(*words)
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith(first.stdout.partition("vectors in")[0])
    assert "finished before: vectors in" in again.stdout
    found = embed(encoder, read_documents([tmp_path / "in.jsonl"]), output, max_length=5)
    assert np.array_equal(found.vectors, made.vectors) and found.ids == made.ids == (7, 8)
    assert found.num_tokens == made.num_tokens == (3, 5) and found.num_shortened == 1
    other = run(*words, "--pooling", "cls")
    assert other.exit_code == 2
    assert "(pooling is 'mean' there and 'cls' here)" in other.stderr
    assert {path: path.read_bytes() for path in tmp_path.glob("v.*")} == written
    output.write_bytes(b"something else")
    assert "--output: must not exist, got" in run(*words).stderr


def test_texts_need_no_ids(encoder: Path) -> None:
    found = embed(encoder, ["near", Document("f", "far")])
    named = embed(encoder, [Document(0, "near"), Document("f", "far")])
    assert found.ids == (0, "f") and np.array_equal(found.vectors, named.vectors)
    with pytest.raises(TypeError, match="documents must be texts or Documents, got a str alone"):
        embed(encoder, "near")
    with pytest.raises(TypeError, match=r"documents must be texts or Documents, got a tuple"):
        embed(encoder, [("a", "near")])


def test_a_folder_and_a_glob_are_read_as_corpora_are(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    (docs / "more").mkdir(parents=True)
    (docs / "b.txt").write_text("near")
    (docs / "more" / "a.jsonl").write_text('{"text": "far", "id": 7}')
    (docs / ".hidden").write_text("never")
    monkeypatch.chdir(tmp_path)
    assert [d.id for d in read_documents(["docs"])] == ["docs/b.txt", 7]
    assert [d.id for d in read_documents(["docs/*.txt"])] == ["docs/b.txt"]
    assert [d.id for d in read_documents(["docs/**/*.jsonl", "docs/b.txt"])] == [7, "docs/b.txt"]
    assert run(encoder, "docs", "-o", "v.npy").exit_code == 0
    assert np.load("v.npy").shape == (2, 32)
    (tmp_path / "empty").mkdir()
    refused = run(encoder, "empty", "-o", "w.npy").stderr
    assert "error: FILES: must be text files that are not hidden, got none in empty" in refused


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"  \n", r"text must not be empty, got none in .*a\.txt"),
        ("a.txt", b"a\xff", r"files must be UTF-8 text, got another byte at 1 of .*a\.txt"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ""}', r"got none in line 2 of .*a\.jsonl"),
        ("a.jsonl", b'{"id": 1}', r'line 1 of .*a\.jsonl must be an object with "text"'),
        ("a.jsonl", b'"text"', r'line 1 of .*a\.jsonl must be an object with "text"'),
        ("a.jsonl", b'\n{"text": "a}', r"line 2 of .*a\.jsonl must be JSON \("),
        ("a.jsonl", b'{"text": "a", "id": 1}\n{"text": "b", "id": "1"}', r"got '1' in line 1 .*2"),
        ("a.jsonl", b'{"text": "a", "id": true}', r'must be a string or an integer, got True'),
        ("a.jsonl", b'{"text": "\\ud800"}', r"got half of a surrogate pair"),
        ("a.jsonl", b"", r"files must hold a document, got"),
        ("b.txt", b"a", r"files must exist and be readable, got .*a\.txt \(No such file"),
    ],
)  # fmt: skip
def test_refused_documents(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"read_documents: .*{message}"):
        read_documents([tmp_path / name.replace("b.txt", "a.txt")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, r"pooling must be one of \('mean', 'cls'\), got 'max'"),
        ({"max_length": 0}, r"max_length must be at least 1, got 0"),
        ({"batch_tokens": 0}, r"batch_tokens must be at least 1, got 0"),
        ({"precision": "fp8"}, r"precision must be one of \('fp32', 'bf16', 'fp16'\), got 'fp8'"),
        ({"precision": "fp16", "device": "cpu"}, r"precision 'fp16' must have a GPU"),
        ({"output": "v.csv"}, r"must end in one of \.npy, \.jsonl, \.parquet, got 'v\.csv'"),
        ({"slope_scale": -1.0}, r"slope_scale must be None, 'interpolate' or a positive number"),
        ({"documents": []}, r"documents must be at least one, got none"),
        ({"documents": [DOCUMENTS[0]] * 2}, r"documents must have ids that differ"),
    ],
)  # fmt: skip
def test_refused_options(encoder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed(encoder, **{"documents": DOCUMENTS} | options)


def test_refused_models(tmp_path: Path) -> None:
    small = write_encoder(tmp_path / "small", vocab_size=114)
    with pytest.raises(ValueError, match=r"must be below vocab_size = 114, got 114 in 'd0'"):
        embed(small, DOCUMENTS)
    (small / "tokenizer.json").unlink()
    settings = small / "tokenizer_config.json"
    settings.unlink()
    with pytest.raises(ValueError, match=r"folder must hold a tokenizer, got .*small' \("):
        embed(small, DOCUMENTS)
    # Transformers makes up a tokenizer that knows no words.
    settings.write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(ValueError, match=r"tokenizer, and .*small' has no vocabulary file"):
        embed(small, DOCUMENTS)


def test_a_vector_that_is_not_finite_names_its_document(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(encoder)
    with torch.no_grad():
        model.embeddings.words.weight[ord("Z")] = 3e38  # finite; its sum over a token is not
    model.save_pretrained(encoder)
    with pytest.raises(ValueError, match=r"vectors must be finite, got another of document 'd4'"):
        embed(encoder, DOCUMENTS)


def test_parquet_without_pyarrow_says_what_to_install(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linbias.models.embedding import vectors

    monkeypatch.setattr(vectors, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pyarrow, .*: pip install pyarrow"):
        embed(encoder, DOCUMENTS, tmp_path / "v.parquet")
    (tmp_path / "a.txt").write_text("far")
    failed = run(encoder, tmp_path / "a.txt", "-o", tmp_path / "v.parquet")
    assert failed.exit_code == 2 and "pip install pyarrow" in failed.stderr
