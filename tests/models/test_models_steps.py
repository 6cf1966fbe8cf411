"""Position methods whose layers learn the steps between tokens: forget gates, and CABLE."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from linbias.models import LinbiasConfig, LinbiasForCausalLM, LinbiasForConditionalGeneration
from linbias.models.decoder.cache import keep_beside
from linbias.models.decoder.config import LinbiasSeq2SeqConfig
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.positions import Stepped
from small_models import VOCAB, assert_same, build, decode, every_block, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")
every_method = pytest.mark.parametrize("position", ["forget", "cable"])
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
