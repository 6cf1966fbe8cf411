"""`embed`: a vector for each document, however long, and for its passages, which have seen it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from linbias.data.tokenizers import byte_tokenizer
from linbias.models import LinbiasBertConfig, LinbiasBertModel, embed, install, load

pytestmark = pytest.mark.usefixtures("same_start")

TEXTS = ["So near. So far away! Z\u00fcrich?", "one", "The end is far. " * 20 + "Near it."]
PAIRS = [[(0, 8), (9, 21), (22, 29), (3, 12)], [(0, 3)], [(300, 328), (0, 15)]]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "so", "far", "a", "##way", "near", ".", "z\u00fcrich"]


def write_encoder(folder: Path, **changes: Any) -> Path:
    install()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    settings = {"vocab_size": 256, "num_hidden_layers": 2, "initializer_range": 0.2, **sizes}
    LinbiasBertModel(LinbiasBertConfig(**settings | changes)).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture
def encoder(tmp_path):
    return write_encoder(tmp_path / "encoder")


@pytest.fixture
def words_encoder(tmp_path):
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


@torch.no_grad()
def alone(encoder: Path, text: str) -> torch.Tensor:
    """The hidden states [T, hidden_size] of one document in float64, byte by byte."""
    model = load(encoder, dtype=torch.float64)
    return model(torch.tensor([list(text.encode())])).last_hidden_state[0]


def assert_close(ours: Any, expected: torch.Tensor) -> None:
    assert np.abs(ours - expected.numpy()).max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_means_over_the_whole_document_and_over_its_spans(encoder, normalize):
    def expected(hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.mean(0)
        return mean / mean.norm() if normalize else mean

    made = embed(encoder, TEXTS, spans=PAIRS, normalize=normalize, batch_size=2)
    for text, pairs, one in zip(TEXTS, PAIRS, made, strict=True):
        hidden = alone(encoder, text)
        assert_close(one.vector, expected(hidden))
        assert one.vector.dtype == np.float32 and one.spans == tuple(pairs)
        assert one.num_tokens == len(text.encode()) and one.span_vectors.shape == (len(pairs), 32)
        for vector, (begin, end) in zip(one.span_vectors, pairs, strict=True):
            first = len(text[:begin].encode())
            last = first + len(text[begin:end].encode())
            assert_close(vector, expected(hidden[first:last]))
    for plain, one in zip(embed(encoder, TEXTS, normalize=normalize), made, strict=True):
        assert plain.spans == () and plain.span_vectors is None
        np.testing.assert_allclose(plain.vector, one.vector, atol=1e-6)


def test_forty_passages_of_20_000_tokens_come_from_one_pass(tmp_path, monkeypatch):
    encoder = write_encoder(tmp_path / "encoder", train_length=512, num_hidden_layers=1)
    text = "to be or not to be, " * 1000
    hidden = alone(encoder, text)
    lengths: list[int] = []
    own = LinbiasBertModel.forward

    def count(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        lengths.append(input_ids.shape[1])
        return own(self, input_ids, **inputs)

    model = SentenceTransformer(str(encoder), device="cpu")
    model.max_seq_length = 512  # which is no limit here
    monkeypatch.setattr(LinbiasBertModel, "forward", count)
    (result,) = embed(model, [text], spans=500)
    assert lengths == [20_000] and len(result.spans) == 40
    assert_close(result.span_vectors, hidden.unflatten(0, (40, 500)).mean(1))
    assert_close(result.vector, hidden.mean(0))


def test_a_span_holds_each_token_of_which_it_has_a_character(words_encoder):
    #        0123456789012345678
    text = "  So far away. Near"
    tokens = [2, 4, 5, 6, 7, 9, 8, 3]
    holds = {(2, 4): (1, 2), (0, 6): (1, 3), (9, 13): (3, 5), (10, 11): (4, 5), (0, 19): (1, 7)}
    hidden = load(words_encoder, dtype=torch.float64)(torch.tensor([tokens])).last_hidden_state[0]
    (_, result) = embed(words_encoder, ["far " * 9, text], spans=[[(0, 3)], list(holds)])
    assert result.num_tokens == 8
    expected = [hidden[first:end].mean(0) for first, end in holds.values()]
    assert_close(result.span_vectors, torch.stack(expected).detach())


def test_tokens_are_counted_without_cutting_a_character(encoder):
    one, two = embed(encoder, ["ab\u00fccd e", "\u00fc\u20ac"], spans=3)
    assert one.spans == ((0, 2), (2, 5), (5, 7))  # the third token is half of a character
    assert two.spans == ((0, 1), (1, 2))


def test_the_spans_that_were_found_give_the_same_vectors_when_given(encoder):
    found = embed(encoder, TEXTS, spans=7)
    # Anything that iterates over pairs of integers will do.
    for given in ([one.spans for one in found], [np.array(one.spans) for one in found]):
        for again, one in zip(embed(encoder, TEXTS, spans=given), found, strict=True):
            assert again.spans == one.spans != ()
            assert np.array_equal(again.span_vectors, one.span_vectors)


def test_spans_lie_within_what_is_read(words_encoder):
    text = "  So   far away. Near"
    (result,) = embed(words_encoder, [text], spans=1, max_length=5)  # [CLS] So far a [SEP]
    assert result.spans == ((2, 7), (7, 11), (11, 12)) and result.num_tokens == 5
    with pytest.raises(ValueError, match=r"spans must have 2 <= begin < end <= 12, the .*17\)"):
        embed(words_encoder, [text], spans=[[(2, 17)]], max_length=5)


WAYS = "spans must be a number of tokens"


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ("words", TypeError, rf"{WAYS}, .* pairs for each document, got 'words'"),
        (0, ValueError, "spans must be at least 1 token, got 0"),
        (True, TypeError, f"{WAYS}, .*, got True"),
        (2.5, TypeError, rf"{WAYS}, .*, got 2\.5"),
        ([[(0, 1)]], ValueError, "spans must be of all 2 documents, got those of 1"),
        ([(0, 1), (1, 2)], TypeError, "must be pairs .* of integers, got 0 of document 0"),
        ([1, 2], TypeError, "spans must be pairs for each document, got a int of document 0"),
        ([[(0, 1)], []], ValueError, "spans must be at least one, got none of document 1"),
        ([[(0, 1)], [(0, 1.0)]], TypeError, r"of integers, got \(0, 1\.0\) of document 1"),
        ([[(0, 9)], [(0, 4)]], ValueError, r"spans must have 0 <= begin < end <= 8, the char"),
        ([[(0, 1)], [(2, 2)]], ValueError, r"begin < end <= 3, .*, got \(2, 2\) of document 1"),
        (str.split, TypeError, f"{WAYS}, or pairs for each document, got <method"),
        ([[(4, 5)], [(0, 3)]], ValueError, r"spans must hold a token, got \(4, 5\) of doc.* 0"),
    ],
)
def test_refused_spans(words_encoder, spans, error, message):
    with pytest.raises(error, match=f"^embed: .*{message}"):
        embed(words_encoder, ["far.   a", "far"], spans=spans)


@pytest.mark.parametrize(
    ("documents", "options", "error", "message"),
    [
        ("near", {}, TypeError, "documents must be a sequence of texts"),
        (
            ["near"],
            {"device": ["cpu"]},
            TypeError,
            "device must be one device or None",
        ),
        ([("a", "near")], {}, TypeError, "documents must be a sequence of texts"),
        (["near"], {"max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
        (["near"], {"max_length": 2}, ValueError, "above the 2 special tokens, got 2"),
        (["near"], {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        (["near", " "], {}, ValueError, "must have tokens, got none in document 1"),
    ],
)
def test_refused_arguments(words_encoder, documents, options, error, message):
    with pytest.raises(error, match=f"embed: .*{message}"):
        embed(words_encoder, documents, **options)


def test_refused_models(encoder, monkeypatch):
    model = SentenceTransformer(str(encoder), device="cpu")
    with torch.no_grad():
        model[0].auto_model.embeddings.words.weight[ord("Z")] = 3e38  # its sum is not finite
    with pytest.raises(ValueError, match="vectors must be finite, got another of document 1"):
        embed(model, ["near", "Z"])
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match="model must have a fast tokenizer, got a "):
        embed(model, ["near"])
    monkeypatch.setattr("linbias.models.passages.LinbiasBertModel", torch.nn.Linear)
    with pytest.raises(ValueError, match="must be an encoder of linbias, got a LinbiasBert"):
        embed(model, ["near"])
