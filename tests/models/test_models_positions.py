"""The position methods by themselves: each against its definition."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

import linbias
from linbias.models import LinbiasConfig, LinbiasForCausalLM
from linbias.models.decoder.config import POSITIONS
from linbias.models.decoder.positions import (
    T5,
    Alibi,
    AttendOptions,
    Biased,
    Rotary,
    Sinusoidal,
    make_position,
)
from small_models import VOCAB, assert_same, build, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")
LEARNED = {"forget", "cable"}  # whose steps the layers learn: tests/models/test_models_steps.py


def attend(config: LinbiasConfig, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return Alibi(config).attend(q, k, v, AttendOptions(**options))


def by_hand(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0) -> Tensor:
    """ALiBi as the paper writes it, for 4 heads with slopes 1/4, 1/16, 1/64, 1/256."""
    T, S = q.shape[2], k.shape[2]
    slopes = factor * torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).double()
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    score = q @ k.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * distance
    return score.masked_fill(distance < 0, -math.inf).softmax(-1) @ v


def heads(length: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 4, length, 8, dtype=torch.float64)


@pytest.mark.parametrize("implementation", ["auto", "dense", "blocked"])
@pytest.mark.parametrize("queries", [1, 5, 37])
def test_alibi_is_applied_once(implementation: str, queries: int) -> None:
    """Regression: Transformers' eager Falcon adds the bias twice."""
    q, k, v = heads(queries), heads(37), heads(37)
    config = settings(attention_implementation=implementation)
    assert_same(attend(config, q, k, v), by_hand(q, k, v))


def test_interpolation_counts_the_real_keys_of_each_row() -> None:
    scaled = settings(train_length=16, slope_scale="interpolate")
    q, k, v = heads(2, batch=2), heads(40, batch=2), heads(40, batch=2)
    out = attend(scaled, q, k, v, key_range=torch.tensor([[0, 40], [20, 40]]))
    assert_same(out[:1], by_hand(q[:1], k[:1], v[:1], factor=16 / 40))
    assert_same(out[1:], by_hand(q[1:], k[1:, :, 20:], v[1:, :, 20:], factor=16 / 20))


@pytest.mark.parametrize(
    ("scale", "queries", "keys", "factor"),
    [
        ("interpolate", 5, 5, 1.0),
        ("interpolate", 16, 16, 1.0),
        ("interpolate", 3, 40, 16 / 40),
        (0.3, 9, 9, 0.3),
    ],
)
def test_slopes_are_scaled_as_asked(scale: Any, queries: int, keys: int, factor: float) -> None:
    q, k, v = heads(queries), heads(keys), heads(keys)
    out = attend(settings(train_length=16, slope_scale=scale), q, k, v)
    assert_same(out, by_hand(q, k, v, factor=factor))


def test_sixteen_bit_models_keep_exact_slopes() -> None:
    config = settings(hidden_size=24, num_attention_heads=3)
    model = LinbiasForCausalLM(config).bfloat16().eval()
    q = torch.zeros(1, 3, 1, 8, dtype=torch.bfloat16)
    left = model.model.position.slopes.left(q, num_keys=5)
    assert torch.equal(left, torch.tensor(linbias.slopes(3), dtype=torch.float32))
    assert model(tokens(1, 9)).logits.dtype == torch.float32


def test_t5_buckets_are_those_of_t5() -> None:
    config = settings(position="t5")
    distances = torch.arange(300)
    expected = T5Attention._relative_position_bucket(-distances, bidirectional=False)
    assert torch.equal(T5(config).bucket(distances), expected)


@pytest.mark.parametrize("queries", [1, 4, 9])
@torch.no_grad()
def test_t5_bias_is_the_embedding_of_each_distance(queries: int) -> None:
    method = T5(settings(position="t5")).double()
    q, k, v = heads(queries), heads(9), heads(9)
    score = q @ k.mT / 8**0.5
    for t in range(queries):
        for s in range(9):
            distance = torch.tensor(t + 9 - queries - s)
            if distance < 0:
                score[..., t, s] = -math.inf
            else:
                score[..., t, s] += method.bias.weight[method.bucket(distance)]
    assert_same(method.attend(q, k, v, AttendOptions()), score.softmax(-1) @ v)


@pytest.mark.parametrize("placed", ["range", "start", "both"])
@pytest.mark.parametrize("num_queries", [1, 4, 9])
@pytest.mark.parametrize("name", POSITIONS)
@torch.no_grad()
def test_queries_stand_where_they_are_put_and_see_the_range(
    name: str, num_queries: int, placed: str
) -> None:
    """Rows without a key stand for padding: linear biases give zeros, others read all keys."""
    method = make_position(
        name, settings(position=name, attention_implementation="dense")
    ).double()
    q, k, v = heads(num_queries, 3), heads(9, 3)[:, :2], heads(9, 3)[:, :2]
    key_range = torch.tensor([[2, 9], [0, 5], [3, 4]])
    query_start = torch.tensor([0, 4, -2])
    if name in LEARNED:  # queries stand at keys
        if placed == "range" and num_queries == 9:
            pytest.skip("the first query would stand before the first key")
        query_start = query_start.clamp(0, 9 - num_queries)
    given = {"range": {"key_range": key_range}, "start": {"query_start": query_start}}
    given["both"] = given["range"] | given["start"]
    places = torch.rand(3, 4, 9, dtype=torch.float64).cumsum(-1) if name in LEARNED else None
    out = method.attend(q, k, v, AttendOptions(**given[placed], positions=places))

    starts = key_range[:, 1] - num_queries if placed == "range" else query_start
    first, end = (0, 9) if placed == "start" else key_range[..., None, None].unbind(1)
    keys = torch.arange(9)
    distance = (starts[:, None] + torch.arange(num_queries))[..., None] - keys
    visible = (distance >= 0) & (keys >= first) & (keys < end)
    has_key = visible.any(-1, keepdim=True)
    if not isinstance(method, Biased):
        visible = visible | ~has_key
    score = q @ k.repeat_interleave(2, dim=1).mT / 8**0.5
    if name == "alibi":
        score -= torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * distance[:, None]
    if places is not None:
        own = (starts[:, None] + torch.arange(num_queries)).clamp(0, 8)
        own = places.gather(-1, own[:, None].expand(-1, 4, -1))
        score -= own[..., None] - places[:, :, None]
    if name == "t5":
        score += method.bias(method.bucket(distance.clamp(min=0))).permute(0, 3, 1, 2)
    score = score.masked_fill(~visible[:, None], -math.inf)
    expected = score.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, dim=1)
    assert has_key.any()
    assert_same(out, expected)


def test_rotary_scores_depend_on_distance_alone() -> None:
    method = Rotary(settings(position="rotary"))
    q, k = heads(6), heads(6)
    scores = []
    for shift in (0, 11):
        turned_q, turned_k = method.rotate(q, k, torch.arange(6)[None] + shift)
        scores.append(turned_q @ turned_k.mT)
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)  # Angles are float32.
    assert not torch.allclose(scores[0], q @ k.mT)


def test_sinusoids_have_the_published_wavelengths() -> None:
    table = Sinusoidal(settings()).embed(torch.zeros(1, 3, 4), torch.arange(3)[None])[0]
    expected = [
        [f(t * rate) for f in (math.sin, math.cos) for rate in (1, 0.01)] for t in range(3)
    ]
    torch.testing.assert_close(table, torch.tensor(expected))


def test_learned_table_says_how_far_it_reaches() -> None:
    model = build(position="learned", train_length=12)
    assert model(tokens(1, 12)).logits.shape == (1, 12, VOCAB)
    message = r"table of train_length = 12 positions, too few for a sequence of 13 tokens"
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 13))
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, 10), max_new_tokens=4)
