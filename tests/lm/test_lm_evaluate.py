"""Evaluation against a loop that asks for one token at a time, written from the definition."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from linbias.lm.evaluation import Evaluation, evaluate, windows
from linbias.models.limits import default_length
from linbias.models.loading import load

VOCAB = 37
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}  # the defaults lie beyond the vocabulary


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **TOKENS, **sizes)).double().eval()


def llama(**changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, **TOKENS, num_hidden_layers=1, **sizes, **changes)
    return LlamaForCausalLM(config)


def text(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(num_tokens).integers(0, VOCAB, num_tokens)


def context_start(prediction: int, num_predictions: int, length: int, stride: int | None) -> int:
    """The first token that a prediction may see, from the definition: no windows are walked."""
    if stride is None:
        return prediction - prediction % length
    moves = max(0, math.ceil((prediction + 1 - length) / stride))
    return max(0, min(length + moves * stride, num_predictions) - length)


@torch.inference_mode()
def one_token_at_a_time(model, ids, length, stride):
    losses = defaultdict(list)
    num_predictions = len(ids) - 1
    for i in range(num_predictions):
        start = context_start(i, num_predictions, length, stride)
        logits = model(input_ids=torch.tensor(ids[start : i + 1])[None]).logits[0, -1]
        losses[i + 1 - start].append(-logits.log_softmax(-1)[ids[i + 1]].item())
    return losses


LENGTHS_STRIDES_TOKENS = [
    (8, None, 33),  # whole segments
    (8, None, 30),  # a shorter last segment
    (7, None, 2),  # one prediction
    (7, 1, 31),
    (1, 1, 5),
    (7, 3, 31),  # the last window moves by 3
    (7, 3, 33),  # the last window moves by less
    (7, 5, 8),  # exactly one window
    (7, 7, 25),
    (11, 4, 6),  # a text shorter than one window
    (11, None, 6),
]


@pytest.mark.parametrize(("length", "stride", "num_tokens"), LENGTHS_STRIDES_TOKENS)
@pytest.mark.parametrize("batch_tokens", [1, 24, 16384])
def test_equals_one_token_at_a_time(gpt2, length, stride, num_tokens, batch_tokens):
    ids = text(num_tokens)
    expected = one_token_at_a_time(gpt2, ids, length, stride)
    result = evaluate(gpt2, ids, length=length, stride=stride, batch_tokens=batch_tokens)
    # float32 losses of float64 logits: rounding only
    assert result.nll == pytest.approx(np.mean([*chain(*expected.values())]), rel=1e-6)
    assert result.num_tokens == num_tokens - 1
    for position in range(1, length + 1):
        losses = expected.get(position, [])
        assert result.count_by_position[position - 1] == len(losses)
        mean = result.loss_by_position[position - 1]
        assert mean == (pytest.approx(np.mean(losses), rel=1e-6) if losses else None)


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 7, 8])
@pytest.mark.parametrize("num_predictions", [1, 7, 8, 9, 15, 16, 17, 40])
def test_every_prediction_is_scored_exactly_once(num_predictions, stride):
    scored = []
    for start, stop, keep in windows(num_predictions, 8, stride):
        assert 0 <= start < stop <= num_predictions
        assert stop - start <= 8
        scored += range(stop - keep, stop)
    assert scored == list(range(num_predictions))


def test_limit_scores_the_first_predictions_only(gpt2):
    ids = text(31)
    limited = evaluate(gpt2, ids, length=8, limit_tokens=12, num_bytes=62)
    assert limited.nll == evaluate(gpt2, ids[:13], length=8).nll
    assert (limited.num_tokens, limited.num_bytes) == (12, 24)  # two bytes a token
    assert evaluate(gpt2, ids, length=8, limit_tokens=99).num_tokens == 30


def test_bits_per_byte_of_bytes_is_nll_in_bits(gpt2):
    result = evaluate(gpt2, text(31), length=8, num_bytes=31)
    assert result.num_bytes == 30
    assert result.bits_per_byte == pytest.approx(result.nll / math.log(2))
    assert result.perplexity == pytest.approx(math.exp(result.nll))
    assert replace(result, nll=1000.0).perplexity == math.inf
    assert evaluate(gpt2, text(31), length=8).bits_per_byte is None


def test_logits_that_are_more_than_the_head_are_taken_whole():
    model = llama().double().eval()
    plain = evaluate(model, text(40), length=8, stride=3)
    forward = model.forward

    def scaled(*args, **kwargs):  # as Cohere's logit_scale, Gemma's soft cap
        output = forward(*args, **kwargs)
        output.logits = output.logits * 8
        return output

    model.forward = scaled
    expected = one_token_at_a_time(model, text(40), 8, 3)
    result = evaluate(model, text(40), length=8, stride=3)
    assert result.nll != pytest.approx(plain.nll, rel=1e-3)
    assert result.nll == pytest.approx(np.mean([*chain(*expected.values())]), rel=1e-6)


def test_an_mpt_model_reads_beyond_the_length_that_it_was_made_for():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": VOCAB}
    short = MptForCausalLM(MptConfig(max_seq_len=8, **sizes)).eval()
    long = MptForCausalLM(MptConfig(max_seq_len=32, **sizes)).eval()
    long.load_state_dict(short.state_dict())
    assert default_length(short) == 8
    results = [evaluate(model, text(40), length=24) for model in (short, long)]
    assert results[0].loss_by_position == results[1].loss_by_position
    assert short.config.max_seq_len == 8


def test_a_model_that_fails_beyond_its_length_is_one_clear_error():
    model = llama(max_position_embeddings=8)
    forward = model.model.forward

    def short_sighted(input_ids, **options):  # as a model with a table of distances
        torch.zeros(8)[input_ids.shape[1] - 1]
        return forward(input_ids=input_ids, **options)

    model.model.forward = short_sighted
    evaluate(model, text(40), length=8)
    with pytest.raises(
        ValueError, match=r"^evaluate: length must be one .* got 24; .* says 8, .*fails"
    ):
        evaluate(model, text(40), length=24)
    with pytest.raises(IndexError):
        model.model.forward(torch.zeros(1, 9, dtype=torch.int64))
    full = torch.OutOfMemoryError("CUDA out of memory")  # which is said as it is
    model.model.forward = Mock(side_effect=full)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, text(40), length=24)


def test_reports_speed_memory_progress_and_leaves_the_mode_alone(gpt2):
    gpt2.train()
    seen = []
    result = evaluate(
        gpt2,
        text(31),
        length=8,
        batch_tokens=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert gpt2.training
    gpt2.eval()
    evaluate(gpt2, text(9), length=8)
    assert not gpt2.training
    assert seen == [(8, 30), (16, 30), (24, 30), (30, 30)]
    assert result.tokens_per_second > 0
    assert result.peak_memory_bytes > 10e6
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert record["perplexity"] == result.perplexity
    assert record["count_by_position"] == [4, 4, 4, 4, 4, 4, 3, 3]
    assert Evaluation.from_dict(record) == result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "evaluate: length must be at least 1, got 0"),
        ({"length": 4, "stride": 5}, r"evaluate: stride must lie in \[1, length = 4\], got 5"),
        ({"length": 4, "stride": 0}, r"evaluate: stride must lie in \[1, length = 4\], got 0"),
        ({"length": 4, "batch_tokens": 0}, "evaluate: batch_tokens must be at least 1, got 0"),
        ({"length": 4, "limit_tokens": 0}, "evaluate: limit_tokens must be at least 1, got 0"),
        ({"length": 33}, "evaluate: length must be at most 32, the rows of the model's table"),
        ({"length": 4, "ids": np.array([1])}, r"at least 2 integers, got int64 \[1\]"),
        ({"length": 4, "ids": np.array([1.0, 2.0])}, "at least 2 integers, got float64"),
        ({"length": 4, "ids": np.array([0, VOCAB])}, r"must lie in \[0, 37\).* got 0 to 37"),
    ],
)
def test_bad_arguments_are_named(gpt2, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate(gpt2, **{"ids": text(10), **arguments})


def test_a_folder_that_holds_no_whole_model_is_named(gpt2, tmp_path):
    gpt2.save_pretrained(tmp_path / "lost")
    (tmp_path / "lost" / "model.safetensors").unlink()
    for path, rule in (
        ("lost", "cannot read|must"),
        ("", "folder with a config"),
        ("absent", "folder with a config"),
    ):
        with pytest.raises(ValueError, match=rf"^load: .*{rule}") as raised:
            load(tmp_path / path)
        assert "\n" not in str(raised.value)
