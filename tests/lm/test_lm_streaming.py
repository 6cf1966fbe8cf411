"""Texts without an end: scored as if they were one segment, written as `generate` writes them."""

import io
from itertools import islice

import numpy as np
import pytest
import torch

from linbias.data.tokenizers import byte_tokenizer
from linbias.lm import StreamScorer, evaluate, stream
from linbias.lm.text import stream_text
from linbias.models import WindowCache
from small_models import VOCAB, build

TOLERANCE = 2.0**-24


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build(initializer_range=0.1)
    model.generation_config.eos_token_id = None
    return model


def text(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(VOCAB - 1, size=count)


@pytest.mark.parametrize("parts", [[2000], [1, 1, 700, 3, 0, 1295]])
def test_one_pass_is_one_segment(model, parts):
    ids = text(2000)
    cache = WindowCache.for_model(model, TOLERANCE)
    scorer = StreamScorer(model, chunk=300, cache=cache)
    for part in np.split(ids, np.cumsum(parts)[:-1]):
        scorer.read(part)
    found, expected = scorer.result(), evaluate(model, ids, length=1999, num_bytes=5000)
    assert found.num_tokens == 1999
    assert found.nll == pytest.approx(expected.nll, rel=1e-7)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-6)
    assert found.bits_per_byte(5000) == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert found.uncertified == 0 and 0 < found.largest_dropped <= TOLERANCE
    assert found.reach == cache.windows and found.cache_bytes == cache.num_bytes
    assert found.to_dict()["reach"] == cache.windows


def test_a_scorer_says_what_it_cannot_read(model):
    scorer = StreamScorer(model)
    with pytest.raises(ValueError, match="two tokens or more, got 0"):
        scorer.result()
    with pytest.raises(ValueError, match=rf"ids must lie in \[0, {VOCAB}\), got {VOCAB}"):
        scorer.read(np.array([3, VOCAB]))
    with pytest.raises(ValueError, match=r"ids must be integers \[n\], got float64 \[1\]"):
        scorer.read(np.array([1.0]))
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        StreamScorer(model, chunk=0)
    scorer.read(np.array([1, 2]))
    with pytest.raises(ValueError, match="cache must be fresh, got one of 2 tokens"):
        StreamScorer(model, cache=scorer.cache)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}])
def test_it_writes_what_generate_writes(model, options):
    ids = text(1500)
    torch.manual_seed(3)
    sampled = {"do_sample": bool(options), "top_k": 0, **options}
    expected = model.generate(torch.from_numpy(ids)[None], max_new_tokens=40, **sampled)[0, 1500:]
    torch.manual_seed(3)
    cache = WindowCache.for_model(model, TOLERANCE)
    prompt = (int(token) for token in ids)  # read once
    found = list(islice(stream(model, prompt, chunk=400, cache=cache, **options), 40))
    assert found == expected.tolist()
    assert cache.get_seq_length() == 1500 + 39 and cache.uncertified == 0


def test_it_ends_where_the_model_ends_a_text(model):
    first = next(stream(model, [1, 2, 3]))
    model.generation_config.eos_token_id = [first]
    try:
        assert list(stream(model, [1, 2, 3])) == [first]
    finally:
        model.generation_config.eos_token_id = None


def test_bad_streams_are_refused_before_they_start(model):
    for options in ({"temperature": -1.0}, {"top_k": -1}):
        with pytest.raises(ValueError, match="temperature and top_k must be at least 0, got"):
            stream(model, [1], **options)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        stream(model, [1], chunk=0)
    with pytest.raises(ValueError, match="prompt must hold a token or more, got none"):
        next(stream(model, []))
    with pytest.raises(ValueError, match="linear biases"):
        stream(build(position="rotary"), [1])


def test_generate_goes_on_from_a_cache_without_the_ids_before_it(model):
    """And nothing grows from step to step but the new ids: neither position numbers nor a mask."""
    ids = torch.from_numpy(text(1200))[None]
    cache = WindowCache.for_model(model, TOLERANCE)
    with torch.no_grad():
        model(ids[:, :1150], past_key_values=cache)
    seen = []

    def look(*call):
        seen.append(call[2])

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    mask = torch.ones_like(ids)
    found = model.generate(
        ids[:, 1150:],
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=9,
        do_sample=False,
    )
    hook.remove()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(found[:, 50:], expected[:, 1200:])
    assert len(seen) == 9
    for given in seen:
        assert given.get("position_ids") is None and given.get("attention_mask") is None
    assert [given["input_ids"].shape[1] for given in seen] == [50, *[1] * 8]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build(vocab_size=256).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


class Slow(io.BytesIO):
    """A pipe that gives a few bytes at a time."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(5)


@pytest.mark.parametrize("content", ["", "a", "no line end", "Grüße\n\n  日本\r\nlast", "é" * 999])
def test_a_text_is_read_piece_by_piece(folder, content, monkeypatch):
    monkeypatch.setattr("linbias.lm.text._LONG_LINE", 300)
    pieces = list(stream_text(folder, Slow(content.encode()), "name"))
    read = b"".join(ids.astype(np.uint8).tobytes() for ids, _ in pieces)
    assert read == content.encode()
    assert [len(ids) for ids, _ in pieces] == [count for _, count in pieces]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ab\xc3", "got a byte that is not UTF-8 at byte 2 of it"),
        ("abcdéf日".encode()[:-1], "got a byte that is not UTF-8 at byte 7 of it"),
        (b"abc\ndefg\xff12345678", "got a byte that is not UTF-8 at byte 8 of it"),
        (b"1234\xc3(567", "got a byte that is not UTF-8 at byte 4 of it"),
        (b"abc\ndefg\0 12345678", "got a NUL at byte 8 of it"),
    ],
)
def test_a_text_that_is_no_utf8_is_refused_at_its_place(folder, content, message):
    pieces = stream_text(folder, Slow(content), "it")
    with pytest.raises(ValueError, match=message):
        list(pieces)


def test_a_line_that_never_ends_is_refused_where_it_is_no_utf8(folder, monkeypatch):
    class Endless:
        asked = 0

        def read(self, count):
            self.asked += 1
            assert self.asked < 5, "still reading"
            return b"\x80" * 8

    monkeypatch.setattr("linbias.lm.text._LONG_LINE", 8)
    with pytest.raises(ValueError, match="got a byte that is not UTF-8 at byte 0 of it"):
        next(stream_text(folder, Endless(), "it"))
