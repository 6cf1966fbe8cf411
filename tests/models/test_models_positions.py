"""The position methods by themselves: each against its definition."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.t5.modeling_t5 import T5Attention

import linbias
from linbias.models import LinbiasConfig, LinbiasForCausalLM, LinbiasForConditionalGeneration
from linbias.models.decoder.cache import keep_beside
from linbias.models.decoder.config import POSITIONS, LinbiasSeq2SeqConfig
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.positions import (
    T5,
    Alibi,
    AttendOptions,
    Biased,
    Rotary,
    Sinusoidal,
    Stepped,
    make_position,
)
from small_models import VOCAB, assert_same, build, decode, every_block, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")
LEARNED = ("forget", "cable")  # whose steps the layers learn: below


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


# Steps that layers learn: forget gates, and CABLE.

every_method = pytest.mark.parametrize("position", LEARNED)
H, D = 4, 8


def quiet_norms(model: Any) -> Any:
    """With norms and biases that do something."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model


def restated(position: str, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Any]:
    """One text, as the papers write it: q [T, H, D], k, v [T, G, D], gates [T, H]."""
    T = len(q)
    out, weights = torch.zeros_like(q), torch.zeros(H, T, T, dtype=q.dtype)
    for h in range(H):
        g = h * k.shape[1] // H
        for i in range(T):
            scores = []
            for j in range(i + 1):
                between = gates[j + 1 : i + 1, h]
                if position == "forget":
                    bias = between.sigmoid().prod().log()
                else:
                    bias = -between.clamp(min=0).sum()
                scores.append(q[i, h] @ k[j, g] / math.sqrt(D) + bias)
            weights[h, i, : i + 1] = torch.stack(scores).softmax(0)
            out[i, h] = weights[h, i] @ v[:, g]
    return out.flatten(1), weights


@every_block
@every_method
@torch.no_grad()
def test_a_layer_subtracts_the_steps_that_it_makes_of_what_it_reads(
    position: str, block: str
) -> None:
    model = quiet_norms(build(position=position, block=block))
    layer, weights = model.model.layers[1], model.model.layers[1].state_dict()
    read = torch.randn(1, 7, 32, dtype=torch.float64)
    G = model.config.num_key_value_heads
    bias = weights.get("attention.gate.bias", 0.0)
    if block == "parallel_fused":
        product = read @ weights["fused.weight"].T
        q, k, v, gates, _ = product.split([H * D, G * D, G * D, H, 2 * 128], -1)
        read = product
    else:
        q, k, v = (read @ weights["attention.qkv.weight"].T).split([H * D, G * D, G * D], -1)
        gates = read @ weights["attention.gate.weight"].T
    parts = [x[0].unflatten(-1, (-1, D)) for x in (q, k, v)]
    gathered, shares = restated(position, *parts, (gates + bias)[0])
    layout = TokenLayout(torch.arange(7)[None], need_weights=True)
    out, found = layer.attention(read, model.model.position, layout, 7, None)
    assert_same(out[0], gathered @ weights["attention.out.weight"].T)
    assert_same(found[0], shares)


@every_method
def test_fresh_gates_are_those_of_the_papers(position: str) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
    for block in ("sequential", "parallel_fused"):
        config = LinbiasConfig(**sizes, vocab_size=VOCAB, position=position, block=block)
        weights = LinbiasForCausalLM(config).model.layers[1].state_dict()
        biases = [name for name in weights if name.endswith("bias") and "gate" in name]
        assert biases == (["attention.gate.bias"] if position == "forget" else [])
        assert all((weights[name] == 0).all() for name in biases)
        gate = weights.get("attention.gate.weight")
        if gate is None:  # in the product, behind queries, keys and values
            gate = weights["fused.weight"][512 + 2 * 64 : 512 + 2 * 64 + 8]
        assert gate.shape == (8, 512)
        assert float(gate.std()) == pytest.approx(0.02, rel=0.05)


@every_method
@torch.no_grad()
def test_caches_keep_the_steps_whatever_happens_to_them(position: str) -> None:
    model = build(position=position, num_key_value_heads=2)
    ids, more = tokens(3, 12), tokens(2, 4)
    expected = model(torch.cat([ids[[2, 0], :8], more], dim=1)).logits[:, 8:]
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        model(ids, past_key_values=cache)
        cache.crop(-4)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        cache.batch_select_indices(torch.tensor([1, 2]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert_same(model(more, past_key_values=cache).logits, expected)
        cache.reset()
        assert_same(model(ids, past_key_values=cache).logits, model(ids).logits)
    static = StaticCache(config=model.config, max_cache_len=20)
    parts = [model(part, past_key_values=static).logits for part in ids.split([7, 1, 4], dim=1)]
    assert_same(torch.cat(parts, dim=1), model(ids).logits)


@every_method
def test_gradients_pass_through_the_steps_of_a_cache(position: str) -> None:
    model, ids = build(position=position), tokens(2, 9)
    gradients = []
    for chunks in ([9], [4, 1, 4]):
        model.zero_grad()
        (decode(model, ids, None, chunks) ** 2).sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for whole, cached in zip(*gradients, strict=True):
        torch.testing.assert_close(cached, whole, rtol=1e-9, atol=1e-9 * whole.abs().max().item())


@every_method
@torch.no_grad()
def test_sixteen_bit_models_sum_their_steps_in_float64(
    position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, sums of some hundred steps would not tell neighbours apart."""
    model = build(position=position, num_hidden_layers=1).bfloat16()
    ids, seen = tokens(1, 300), []
    attend = Stepped.attend

    def watched(self: Stepped, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        seen.append(options.positions)
        return attend(self, q, k, v, options)

    monkeypatch.setattr(Stepped, "attend", watched)
    model(ids, use_cache=False)
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    model(ids[:, -1:], past_key_values=cache)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        LinbiasForCausalLM(settings(position=position, num_hidden_layers=1))(ids)
    assert [x.dtype for x in seen] == [torch.float64] * 4
    steps = cache.layers[1].keys
    assert steps.dtype == torch.float32 and steps.shape == (1, 4, 300, 1)
    # Products differ by rounding.
    torch.testing.assert_close(seen[2], seen[0], rtol=0.01, atol=0.0)
    assert torch.equal(seen[2], steps[..., 0].double().cumsum(-1))


def test_only_decoders_have_gates() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "decoder_layers": 2}
    config = LinbiasSeq2SeqConfig(**sizes, position="forget")
    names = LinbiasForConditionalGeneration(config).state_dict()
    gates = [name for name in names if "gate" in name]
    assert gates == [
        f"model.decoder.layers.{layer}.attention.gate.{kind}"
        for layer in range(2)
        for kind in ("weight", "bias")
    ]


def test_a_cache_that_leaves_the_device_is_refused() -> None:
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(ValueError, match=r"past_key_values must stay on the device .* offloading"):
        keep_beside(cache, 2, torch.ones(1, 4, 3, 1))
