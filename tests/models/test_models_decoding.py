"""Decoding with a cache, padding and generation, for both families."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import linbias.torch
from linbias.data.tokenizers import byte_tokenizer, train_bpe
from linbias.models import load_tokenizer
from linbias.models.decoder.cache import GrowingLayer
from linbias.torch import decoding
from small_models import (
    GREEDY,
    assert_same,
    both_families,
    build,
    build_paper,
    decode,
    every_block,
    every_position,
    left_padded,
    tokens,
)

pytestmark = pytest.mark.usefixtures("same_start")


@pytest.mark.parametrize(
    "model",
    [
        lambda: build(num_hidden_layers=1, num_key_value_heads=2),
        lambda: build_paper(num_hidden_layers=1),
    ],
    ids=["linbias", "paper"],
)
@torch.no_grad()
def test_attention_is_given_a_bound_of_its_keys_whatever_happened_to_the_cache(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding leaves far keys unread by this bound: a smaller one would change results."""
    model = model()
    slack = []

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, *rest: Any) -> Tensor | None:
        _, num_cached, key_bound, *_ = rest
        out = decoding.decode(q, k, v, keys, *rest)
        if out is not None:  # else `attention` follows
            held = keys[:, :, : num_cached + k.shape[2]]
            slack.append(key_bound - held.norm(dim=-1).amax(-1))
        return out

    def attention(q: Tensor, k: Tensor, *rest: Any, key_bound: Tensor, **options: Any) -> Tensor:
        slack.append(key_bound - k.norm(dim=-1).amax(-1))
        return linbias.torch.attention(q, k, *rest, key_bound=key_bound, **options)

    monkeypatch.setattr("linbias.models.decoder.positions.attention", attention)
    monkeypatch.setattr("linbias.models.decoder.cache.decoding", SimpleNamespace(decode=step))
    ids = tokens(3, 30)
    cache = model(ids[:, :7], use_cache=True).past_key_values
    layer = cache.layers[0]
    assert type(layer) is GrowingLayer
    model(ids[:, 7:8], past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    model(ids[:, 8:10], past_key_values=cache)
    cache.crop(-4)
    model(ids[:, 10:12], past_key_values=cache)
    cache.update(100 * layer.keys[:, :, :2], layer.values[:, :, :2], 0)  # behind the model's back
    model(ids[:, 12:13], past_key_values=cache)
    cache.reset()
    model(ids[:, :5], past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1, 2]))
    model(ids[1:, 5:6], past_key_values=cache)
    slack = torch.stack([least.min() for least in slack])
    assert len(slack) == 7 and (slack >= 0).all() and slack.median() < 0.01


def test_cache_goes_from_inference_to_training() -> None:
    model = build()
    ids = tokens(2, 11)
    with torch.inference_mode():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    with torch.no_grad():
        model(ids[:, 4:6], past_key_values=cache)
    model(ids[:, 6:], labels=ids[:, 6:], past_key_values=cache).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@every_block
@every_position
@pytest.mark.parametrize("chunks", [[1] * 19, [7, 1, 11]], ids=["single", "chunks"])
@torch.no_grad()
def test_cached_decoding_equals_full_forward(position: str, block: str, chunks: list[int]) -> None:
    model = build(position=position, block=block)
    ids = tokens(2, 19)
    assert_same(decode(model, ids, None, chunks), model(ids, use_cache=False).logits)


@both_families
@torch.no_grad()
def test_chunks_and_padded_rows_equal_the_same_rows_alone(
    make: Any, position: str, draw: Any
) -> None:
    model = make(position=position, **({"num_key_value_heads": 2} if make is build else {}))
    rows = [draw(8), draw(19), draw(1)]
    ids, mask = left_padded(rows)
    for chunks in ([1] * 19, [7, 1, 11], [19]):
        logits = decode(model, ids, mask, chunks)
        assert logits.isfinite().all()
        for line, row in enumerate(rows):
            assert_same(logits[line, -len(row) :], model(row[None]).logits[0])


@every_position
def test_padding_alone_gives_finite_gradients(position: str) -> None:
    model = build(position=position).train()
    ids, mask = tokens(2, 9), torch.ones(2, 9)
    mask[0] = 0
    model(ids, mask, labels=ids).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@both_families
@torch.no_grad()
def test_generation_takes_the_tokens_that_full_forwards_would(
    make: Any, position: str, draw: Any
) -> None:
    """Regression: keras-hub decoded with bias 0; x-transformers' gates saw the new token only."""
    model = make(position=position)
    prompt = ids = draw(1, 9)
    for _ in range(10):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(made, ids)


@pytest.mark.parametrize("beams", [1, 3])
@every_position
def test_generating_a_padded_batch_equals_generating_row_by_row(position: str, beams: int) -> None:
    model = build(position=position)
    rows = [tokens(4), tokens(11), tokens(7)]
    ids, mask = left_padded(rows)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    together = model.generate(ids, attention_mask=mask, **options)
    for line, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones(1, len(row)), **options)
        assert torch.equal(together[line, 11:], alone[0, len(row) :])


def test_beam_search_finds_what_exhaustive_search_finds() -> None:
    model = build(vocab_size=5)
    prompt = torch.tensor([[1, 3, 0]])
    found = model.generate(prompt, max_new_tokens=2, do_sample=False, num_beams=5)
    with torch.no_grad():
        first = model(prompt).logits[0, -1].log_softmax(-1)
        extended = torch.cat([prompt.expand(5, -1), torch.arange(5)[:, None]], dim=1)
        both = first[:, None] + model(extended).logits[:, -1].log_softmax(-1)
    assert found[0, 3:].tolist() == [int(both.argmax()) // 5, int(both.argmax()) % 5]


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe(b"a cat, a mat, " * 9, 270)])
def test_generating_ends_with_a_stop_string(make: Any, tmp_path: Path) -> None:
    tokenizer = make()
    model, ids = build(vocab_size=tokenizer.vocab_size), torch.tensor([[97, 98]])
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    words = load_tokenizer(tmp_path)
    how = GREEDY | {"suppress_tokens": list(range(128, 256))}  # no halves of characters
    whole = model.generate(ids, **how)[0]
    stop = next(text for text in map(words.decode, whole[3:, None]) if "\ufffd" not in text)
    ended = model.generate(ids, **how, stop_strings=[stop], tokenizer=words)[0]
    assert torch.equal(ended, whole[: len(ended)]) and len(ended) < len(whole)
    assert stop in words.decode(ended[2:]) and stop not in words.decode(ended[2:-1])
