"""The language model: position methods, cached decoding, padding, training, saving, bad input.

Models run in float64, so that two ways to the same number agree to 1e-12 and a real mistake stands
out.
"""

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.models.t5.modeling_t5 import T5Attention

import linbias
import linbias.lm
from linbias.models import LinbiasConfig, LinbiasForCausalLM, LinbiasModel
from linbias.models.config import BLOCKS, POSITIONS
from linbias.models.positions import METHODS, T5, Alibi, Rotary, Sinusoidal
from linbias.transformers.cache import use_growing_layers as make_roomy

VOCAB = 61
every_position = pytest.mark.parametrize("position", POSITIONS)
every_block = pytest.mark.parametrize("block", BLOCKS)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def settings(**changes: Any) -> LinbiasConfig:
    # Large weights: with the usual 0.02 all predictions are alike and mistakes hardly show.
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LinbiasConfig(**{**small, "train_length": 48, "initializer_range": 0.3, **changes})


def build(**changes: Any) -> LinbiasForCausalLM:
    return LinbiasForCausalLM(settings(**changes)).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-12, atol=1e-12 * float(expected.detach().abs().max())
    )


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids and mask; padding holds a token that would be noticed if it were read."""
    length = max(len(row) for row in rows)
    ids, mask = torch.full((2, len(rows), length), VOCAB - 1).unbind()
    for line, row in enumerate(rows):
        ids[line, length - len(row) :] = row
        mask[line] = (torch.arange(length) >= length - len(row)).long()
    return ids, mask


def decode(
    model: LinbiasForCausalLM, ids: Tensor, mask: Tensor | None, chunks: list[int]
) -> Tensor:
    """Return the logits of all tokens, fed to a cache in chunks."""
    cache, logits, done = None, [], 0
    for chunk in chunks:
        seen = None if mask is None else mask[:, : done + chunk]
        out = model(ids[:, done : done + chunk], seen, cache, use_cache=True)
        cache, done = out.past_key_values, done + chunk
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


# --- Every method, both blocks ---


def test_every_position_name_has_a_method() -> None:
    assert tuple(METHODS) == POSITIONS


@every_block
@every_position
def test_fresh_model_predicts_uniformly_and_learns(position: str, block: str) -> None:
    model = LinbiasForCausalLM(settings(position=position, block=block, initializer_range=0.02))
    ids = tokens(3, 17)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        out = model(ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    assert out.logits.shape == (3, 17, VOCAB) and out.logits.dtype == torch.float32
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert losses[-1] < losses[0] - 0.5
    assert all(
        weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters()
    )


@every_block
@every_position
@torch.no_grad()
def test_future_tokens_do_not_change_past_logits(position: str, block: str) -> None:
    model = build(position=position, block=block)
    ids = tokens(2, 23)
    changed = torch.cat([ids[:, :11], tokens(2, 12)], dim=1)
    before, after = model(ids).logits, model(changed).logits
    assert_same(after[:, :11], before[:, :11])
    assert not torch.equal(after[:, 11:], before[:, 11:])


@every_position
@torch.no_grad()
def test_order_of_earlier_tokens_matters_only_where_positions_are_known(position: str) -> None:
    model = build(position=position, num_hidden_layers=1)
    ids = tokens(1, 13)
    swapped = ids[:, [1, 0, *range(2, 13)]]
    difference = (model(ids).logits - model(swapped).logits)[:, -1].abs().max()
    # One layer without positions sees a bag of tokens.
    assert difference < 1e-12 if position == "none" else difference > 1e-6


# --- Decoding with a cache, padding, generation ---


@torch.no_grad()
def test_cache_grows_in_place_and_never_writes_over_what_somebody_may_hold() -> None:
    model = build(num_hidden_layers=1)
    ids = tokens(2, 40)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    layer = cache.layers[0]
    start = layer.keys.data_ptr()
    model(ids[:, 9:12], past_key_values=cache)
    assert layer.keys.data_ptr() == start
    held = layer.keys
    before = held.clone()
    cache.crop(-5)
    model(ids[:, 20:25], past_key_values=cache)
    assert torch.equal(held, before) and torch.equal(layer.keys[:, :, :7], before[:, :, :7])
    cache.reorder_cache(torch.tensor([1, 1]))
    after = model(ids[:, 25:26], past_key_values=cache).logits
    rows = torch.cat([ids[:, :7], ids[:, 20:25]], dim=1)[[1, 1]]
    assert_same(after[:, -1], model(torch.cat([rows, ids[:, 25:26]], dim=1)).logits[:, -1])
    for _ in range(3):  # beyond the room of the first buffers
        model(tokens(2, 60), past_key_values=cache)
    assert layer.keys.shape[2] == layer.get_seq_length() == 13 + 180


def test_a_cache_that_moves_its_layers_off_the_device_keeps_its_own_layers() -> None:
    cache = DynamicCache()
    cache.offloading = True
    make_roomy(cache)
    assert cache.layer_class_to_replicate is DynamicLayer


def test_cache_goes_from_inference_to_training() -> None:
    model = build()
    ids = tokens(2, 11)
    with torch.inference_mode():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    with torch.no_grad():
        model(ids[:, 4:6], past_key_values=cache)
    model(ids[:, 6:], labels=ids[:, 6:], past_key_values=cache).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@torch.no_grad()
def test_cache_bounds_its_keys_whatever_happened_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding leaves far keys unread by this bound: one that is too small would change results."""
    model = build(num_hidden_layers=1, num_key_value_heads=2)
    slack = []

    def attention(q: Tensor, k: Tensor, *rest: Any, key_bound: Tensor, **options: Any) -> Tensor:
        slack.append(key_bound - k.norm(dim=-1).amax(-1))
        return linbias.torch.attention(q, k, *rest, key_bound=key_bound, **options)

    monkeypatch.setattr("linbias.models.positions.attention", attention)
    ids = tokens(3, 30)
    cache = model(ids[:, :7], use_cache=True).past_key_values
    layer = cache.layers[0]
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


@every_block
@every_position
@pytest.mark.parametrize("chunks", [[1] * 19, [7, 1, 11]], ids=["single", "chunks"])
@torch.no_grad()
def test_cached_decoding_equals_full_forward(position: str, block: str, chunks: list[int]) -> None:
    model = build(position=position, block=block)
    ids = tokens(2, 19)
    assert_same(decode(model, ids, None, chunks), model(ids, use_cache=False).logits)


@every_position
@pytest.mark.parametrize("chunks", [[1] * 19, [7, 1, 11], [19]], ids=["single", "chunks", "whole"])
@torch.no_grad()
def test_padded_rows_equal_the_same_rows_alone(position: str, chunks: list[int]) -> None:
    model = build(position=position, num_key_value_heads=2)
    rows = [tokens(8), tokens(19), tokens(1)]
    ids, mask = left_padded(rows)
    logits = decode(model, ids, mask, chunks)
    assert logits.isfinite().all()
    for line, row in enumerate(rows):
        assert_same(logits[line, -len(row) :], model(row[None]).logits[0])


@every_position
@torch.no_grad()
def test_padding_on_the_right_leaves_real_tokens_alone(position: str) -> None:
    model = build(position=position)
    ids = tokens(2, 15)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    assert_same(model(ids, mask).logits[1, :9], model(ids[1:, :9]).logits[0])


@every_position
def test_padding_alone_gives_finite_gradients(position: str) -> None:
    model = build(position=position).train()
    ids, mask = tokens(2, 9), torch.ones(2, 9)
    mask[0] = 0
    model(ids, mask, labels=ids).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@every_position
def test_generation_takes_the_tokens_that_full_forwards_would(position: str) -> None:
    """Regression: keras-hub decoded with bias 0; x-transformers' gates saw the new token only."""
    model = build(position=position)
    prompt = ids = tokens(1, 9)
    for _ in range(10):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(prompt, max_new_tokens=10, do_sample=False), ids)


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


def test_sampled_generation_repeats_with_the_seed() -> None:
    model, texts = build(), []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append(model.generate(tokens(1, 5), max_new_tokens=8, do_sample=True))
    assert torch.equal(*texts)


@torch.no_grad()
def test_embeddings_in_place_of_ids_give_the_same_logits() -> None:
    model, ids = build(), tokens(2, 7)
    assert torch.equal(
        model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits
    )


@torch.no_grad()
def test_cache_and_hidden_states_come_when_asked_for() -> None:
    model, ids = build(), tokens(2, 7)
    assert model(ids).past_key_values.get_seq_length() == 7
    assert model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None
    out = model.eval().model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and out.hidden_states[-1] is out.last_hidden_state
    assert isinstance(model(ids, return_dict=False), tuple)


# --- ALiBi: applied once, at every length, scaled where asked ---


def attend(config: LinbiasConfig, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return Alibi(config).attend(q, k, v, **{"key_range": None, "dropout": 0.0, **options})


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


@torch.no_grad()
def test_implementations_give_the_same_logits() -> None:
    models = [build(attention_implementation=name) for name in ("dense", "blocked")]
    models[1].load_state_dict(models[0].state_dict())
    ids = tokens(2, 70)
    assert_same(models[1](ids).logits, models[0](ids).logits)


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "learned"])
@torch.no_grad()
def test_model_runs_far_beyond_its_training_length(position: str) -> None:
    """Regression: MPT cannot run beyond max_seq_len."""
    model = build(position=position, train_length=8)
    ids = tokens(1, 64)
    assert model(ids).logits.isfinite().all()
    assert model.generate(ids, max_new_tokens=2).shape == (1, 66)


def test_interpolated_slopes_change_only_beyond_the_training_length() -> None:
    plain, scaled = (settings(train_length=16, slope_scale=s) for s in (None, "interpolate"))
    for length in (5, 16):
        q, k, v = (heads(length) for _ in "qkv")
        assert torch.equal(attend(scaled, q, k, v), attend(plain, q, k, v))
    q, k, v = heads(3), heads(40), heads(40)
    assert_same(attend(scaled, q, k, v), by_hand(q, k, v, factor=16 / 40))


def test_interpolation_counts_the_real_keys_of_each_row() -> None:
    scaled = settings(train_length=16, slope_scale="interpolate")
    q, k, v = heads(2, batch=2), heads(40, batch=2), heads(40, batch=2)
    out = attend(scaled, q, k, v, key_range=torch.tensor([[0, 40], [20, 40]]))
    assert_same(out[:1], by_hand(q[:1], k[:1], v[:1], factor=16 / 40))
    assert_same(out[1:], by_hand(q[1:], k[1:, :, 20:], v[1:, :, 20:], factor=16 / 20))


def test_a_number_scales_the_slopes_at_every_length() -> None:
    q, k, v = (heads(9) for _ in "qkv")
    assert_same(attend(settings(slope_scale=0.3), q, k, v), by_hand(q, k, v, factor=0.3))


@torch.no_grad()
def test_slope_scale_can_be_chosen_when_loading(tmp_path: Path) -> None:
    model = build(train_length=8)
    model.save_pretrained(tmp_path)
    ids = tokens(1, 32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, slope_scale="interpolate")
    assert_same(other(ids[:, :8]).logits, model(ids[:, :8]).logits)
    assert not torch.allclose(other(ids).logits, model(ids).logits)


def test_sixteen_bit_models_keep_exact_slopes() -> None:
    config = settings(hidden_size=24, num_attention_heads=3)
    model = LinbiasForCausalLM(config).bfloat16().eval()
    left = model.model.position._left(torch.zeros(1, 3, 1, 8, dtype=torch.bfloat16), 5, None)
    assert torch.equal(left, torch.tensor(linbias.slopes(3), dtype=torch.float32))
    assert model(tokens(1, 9)).logits.dtype == torch.float32


@every_position
def test_autocast_runs_forward_and_backward(position: str) -> None:
    model = LinbiasForCausalLM(settings(position=position))
    ids = tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite() and loss.dtype == torch.float32


# --- The other methods against what they claim ---


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
    assert_same(method.attend(q, k, v, None, 0.0), score.softmax(-1) @ v)


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


@torch.no_grad()
def test_padding_takes_no_place_in_the_learned_table() -> None:
    model = build(position="learned", train_length=12)
    ids, mask = tokens(1, 15), torch.ones(1, 15)
    mask[:, :3] = 0
    assert_same(model(ids, mask).logits[:, 3:], model(ids[:, 3:]).logits)


# --- Grouped heads ---


@every_position
@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_grouped_heads_equal_full_heads_with_repeated_weights(position: str, groups: int) -> None:
    grouped = build(position=position, num_key_value_heads=groups)
    full = build(position=position)
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        q, k, v = state[name].split([32, 8 * groups, 8 * groups])
        k, v = (
            part.view(groups, 8, 32).repeat_interleave(4 // groups, 0).flatten(0, 1)
            for part in (k, v)
        )
        state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    ids = tokens(2, 9)
    assert_same(grouped(ids).logits, full(ids).logits)
    assert grouped(ids).past_key_values.layers[0].keys.shape == (2, groups, 9, 8)


# --- Training ---


@every_block
@every_position
def test_gradient_checkpointing_leaves_gradients_equal(position: str, block: str) -> None:
    model = build(
        position=position, block=block, hidden_dropout=0.1, attention_dropout=0.1
    ).train()
    ids, gradients = tokens(2, 13), []
    for _ in range(2):
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        model.zero_grad()
        # Newer versions of Transformers have another name for the same switch.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_dropout_acts_only_while_training() -> None:
    for dropout in ({"hidden_dropout": 0.5}, {"attention_dropout": 0.5}):
        model, ids = build(**dropout), tokens(1, 11)
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_loss_scores_each_next_token_and_skips_minus_100() -> None:
    model, ids = build(), tokens(2, 7)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    logp = out.logits.log_softmax(-1)
    scored = [
        -logp[b, t, ids[b, t + 1]] for b in range(2) for t in range(6) if labels[b, t + 1] >= 0
    ]
    # Transformers' loss function works in float32.
    assert out.loss.item() == pytest.approx(sum(scored).item() / 9, rel=1e-6)


def test_parts_of_a_batch_add_up_to_its_loss() -> None:
    """What gradient accumulation needs: unequal parts, divided by the count of the whole."""
    model, ids = build(), tokens(3, 9)
    labels = ids.clone()
    labels[1:, :6] = -100
    whole = model(ids, labels=labels).loss
    count = int((labels[:, 1:] != -100).sum())
    parts = [
        model(ids[rows], labels=labels[rows], num_items_in_batch=count).loss
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    assert LinbiasForCausalLM.accepts_loss_kwargs


@every_position
def test_compiled_model_equals_eager(position: str) -> None:
    torch._dynamo.reset()
    model, ids = build(position=position), tokens(2, 16)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(compiled(ids, labels=ids, use_cache=False).logits, model(ids).logits)


# --- Saving and loading ---


@every_block
@every_position
@torch.no_grad()
def test_model_survives_saving_and_loading(position: str, block: str, tmp_path: Path) -> None:
    model = build(position=position, block=block)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LinbiasForCausalLM and loaded.dtype == torch.float64
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    ids = tokens(2, 9)
    assert_same(loaded(ids).logits, model(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is LinbiasModel
    assert type(AutoConfig.from_pretrained(tmp_path)) is LinbiasConfig


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_tied_as_configured(tied: bool, tmp_path: Path) -> None:
    build(tie_word_embeddings=tied).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weights: weights[: len(weights) // 2],
        lambda weights: b"",
        lambda weights: b"\xff" * 64 + weights[64:],
        lambda weights: pickle.dumps({"lm_head.weight": 1}),
    ],
    ids=["truncated", "empty", "corrupt header", "pickle in disguise"],
)
def test_spoilt_weights_are_refused(spoil: Any, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(spoil(weights.read_bytes()))
    with pytest.raises(SafetensorError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_loading_never_runs_code(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Bomb(tmp_path / "exploded")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_bad_saved_configuration_is_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "position": "absolute"}))
    with pytest.raises(ValueError, match=r"position must be one of .* got 'absolute'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# --- Bad input ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size must be an integer of at least 1, got 0"),
        (
            {"num_hidden_layers": 2.0},
            r"num_hidden_layers must be an integer of at least 1, got 2\.0",
        ),
        ({"num_attention_heads": True}, r"num_attention_heads must be an integer .* got True"),
        ({"train_length": -1}, r"train_length must be an integer of at least 1, got -1"),
        ({"intermediate_size": 0}, r"intermediate_size must be an integer of at least 1, got 0"),
        ({"hidden_size": 30}, r"hidden_size must be a multiple of 4 heads, got 30"),
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads must be a multiple of 3 key/value heads, got 4",
        ),
        (
            {"num_key_value_heads": 0},
            r"num_key_value_heads must be an integer of at least 1, got 0",
        ),
        (
            {"hidden_size": 12, "position": "rotary"},
            r"hidden_size must be even per head .*, got 12",
        ),
        (
            {"hidden_size": 5, "num_attention_heads": 1, "position": "sinusoidal"},
            r"hidden_size must be even for position='sinusoidal', got 5",
        ),
        ({"position": "rope"}, r"position must be one of \('alibi', .* got 'rope'"),
        ({"block": "serial"}, r"block must be one of \('sequential', 'parallel'\), got 'serial'"),
        ({"slope_schedule": "steep"}, r"slope_schedule must be one of \('paper', .* got 'steep'"),
        (
            {"slope_scale": 0.0},
            r"slope_scale must be None, 'interpolate' or a positive number, got 0",
        ),
        ({"slope_scale": "half"}, r"slope_scale must be None, .* got 'half'"),
        ({"slope_scale": math.nan}, r"slope_scale must be None, .* got nan"),
        ({"rotary_base": -1.0}, r"rotary_base must be a positive number, got -1"),
        ({"layer_norm_eps": 0.0}, r"layer_norm_eps must be a positive number, got 0"),
        ({"initializer_range": math.inf}, r"initializer_range must be a positive number, got inf"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout must be a number in \[0, 1\), got 1"),
        ({"attention_dropout": "a"}, r"attention_dropout must be a number in \[0, 1\), got 'a'"),
        ({"t5_num_buckets": 1}, r"t5_num_buckets must be at least 2, got 1"),
        (
            {"t5_max_distance": 16},
            r"t5_max_distance must be above half of t5_num_buckets, 16, got 16",
        ),
        ({"attention_implementation": ""}, r"attention_implementation must be the name .* got ''"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="LinbiasConfig: " + message):
        settings(**changes)


def test_settings_left_open_are_filled_in() -> None:
    assert settings().num_key_value_heads == 4
    assert settings(block="parallel").num_key_value_heads == 1
    assert settings(block="parallel", num_key_value_heads=2).num_key_value_heads == 2
    assert settings().intermediate_size == 128


def test_bad_calls_are_explained() -> None:
    model, ids = build(), tokens(2, 5)
    gap = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]])
    static = StaticCache(config=model.config, max_cache_len=8)
    for call, message in [
        ({}, r"give either input_ids or inputs_embeds"),
        (
            {"attention_mask": gap[:, 1:], "input_ids": ids},
            r"attention_mask must have .* \[2, 5\], got \[2, 4\]",
        ),
        ({"attention_mask": gap, "input_ids": ids}, r"one unbroken run .* got 2 runs in row 1"),
        ({"past_key_values": static, "input_ids": ids}, r"growing cache, got StaticCache"),
    ]:
        with pytest.raises(ValueError, match="LinbiasModel: .*" + message):
            model(**call)
    with pytest.raises(TypeError, match="position_ids"):
        model(ids, position_ids=ids)


@every_position
@pytest.mark.parametrize("cached", [0, 3])
@torch.no_grad()
def test_no_tokens_give_no_logits(position: str, cached: int) -> None:
    model = build(position=position)
    cache = model(tokens(2, cached), use_cache=True).past_key_values
    assert model(tokens(2, 0), past_key_values=cache).logits.shape == (2, 0, VOCAB)


def test_unknown_attention_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'flash'"):
        build(attention_implementation="flash")(tokens(1, 3))


# --- The package ---


def test_importing_the_package_does_not_load_data_sets_or_trainer() -> None:
    code = """
import sys, linbias.lm
heavy = ("datasets", "transformers.trainer", "linbias.lm.train")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = linbias.lm.trian
