"""The project's own language model: what it learns from, computes and refuses.

Models run in float64, so that two ways to the same number agree to 1e-12 and a real mistake stands
out.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import nll_loss
from transformers import StaticCache

import linbias
from linbias.models import LinbiasForCausalLM
from linbias.models.decoder.config import BLOCKS, POSITIONS
from small_models import (
    VOCAB,
    assert_same,
    both_families,
    build,
    build_paper,
    every_block,
    every_position,
    settings,
    start_checkpointing,
    tokens,
)

pytestmark = pytest.mark.usefixtures("same_start")


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
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


@both_families
@torch.no_grad()
def test_order_of_earlier_tokens_matters_only_where_positions_are_known(
    make: Any, position: str, draw: Any
) -> None:
    model, ids = make(position=position, num_hidden_layers=1), draw(1, 13)
    swapped = ids[:, [1, 0, *range(2, 13)]]
    difference = (model(ids).logits - model(swapped).logits)[:, -1].abs().max()
    # One layer without positions sees a bag of tokens.
    assert difference < 1e-12 if position == "none" else difference > 1e-6


def restated(config, weights, ids):
    """The parallel block of the discussions in the paper's repository, in plain steps."""
    heads, size, inner = config.num_attention_heads, config.head_size, config.intermediate_size
    T = ids.shape[1]
    bias = torch.from_numpy(linbias.slopes(heads))[:, None, None] * torch.arange(T)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)

    def normed(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    x = weights["embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        own = f"layers.{layer}"
        product = normed(x, f"{own}.norm.weight") @ weights[f"{own}.fused.weight"].T
        q, k, v, ff = product.split((heads * size, size, size, 2 * inner), dim=-1)
        q = q.unflatten(-1, (heads, size)) * size**-0.5
        sim = torch.einsum("bihd,bjd->bhij", q, k).masked_fill(later, -math.inf) + bias
        out = torch.einsum("bhij,bjd->bihd", sim.softmax(-1), v).flatten(2)
        wide, gate = ff.chunk(2, dim=-1)
        swiglu = wide * gate * gate.sigmoid()
        x = x + out @ weights[f"{own}.attention.out.weight"].T
        x = x + swiglu @ weights[f"{own}.narrow.weight"].T
    return normed(x, "norm.weight") @ weights["embed_tokens.weight"].T


@torch.no_grad()
def test_the_fused_block_is_that_of_the_discussion() -> None:
    model = build(block="parallel_fused", head_size=5, intermediate_size=40)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.3)
    assert model.config.num_key_value_heads == 1
    a_block = 32 + 32 * (4 * 5 + 5 + 5 + 2 * 40) + 4 * 5 * 32 + 40 * 32
    assert model.num_parameters() == VOCAB * 32 + 2 * a_block + 32
    ids = tokens(2, 9)
    logits = model(ids).logits
    assert_same(logits, restated(model.config, model.model.state_dict(), ids))


@every_block
@every_position
@torch.no_grad()
def test_the_last_logits_alone_are_those_of_all(position: str, block: str) -> None:
    model, ids = build(position=position, block=block, num_key_value_heads=2), tokens(2, 9)
    whole = model(ids).logits
    for keep in (1, 4, 9, 20):
        out = model(ids, logits_to_keep=keep)
        assert_same(out.logits, whole[:, -keep:])
        assert out.past_key_values.get_seq_length() == 9
        states = model(ids, logits_to_keep=keep, output_hidden_states=True)
        assert_same(states.logits, whole[:, -keep:])
        assert all(state.shape[1] == 9 for state in states.hidden_states)


@torch.no_grad()
def test_cache_and_hidden_states_come_when_asked_for() -> None:
    model, ids = build(), tokens(2, 7)
    assert model(ids).past_key_values.get_seq_length() == 7
    assert model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None
    out = model.eval().model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3 and out.hidden_states[-1] is out.last_hidden_state
    assert isinstance(model(ids, return_dict=False), tuple)


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "learned"])
@torch.no_grad()
def test_model_runs_far_beyond_its_training_length(position: str) -> None:
    """Regression: MPT cannot run beyond max_seq_len."""
    model = build(position=position, train_length=8)
    ids = tokens(1, 64)
    assert model(ids).logits.isfinite().all()
    assert model.generate(ids, max_new_tokens=2).shape == (1, 66)


@every_position
@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_grouped_heads_equal_full_heads_with_repeated_weights(position: str, groups: int) -> None:
    grouped = build(position=position, num_key_value_heads=groups)
    full = build(position=position)
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        q, k, v = state[name].split([32, 8 * groups, 8 * groups])
        each = (part.view(groups, 8, 32) for part in (k, v))
        k, v = (part.repeat_interleave(4 // groups, 0).flatten(0, 1) for part in each)
        state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    ids = tokens(2, 9)
    assert_same(grouped(ids).logits, full(ids).logits)
    assert grouped(ids).past_key_values.layers[0].keys.shape == (2, groups, 9, 8)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(build, position=name, hidden_dropout=0.1) for name in POSITIONS),
        *(partial(build, block=block, hidden_dropout=0.1) for block in BLOCKS),
        partial(build_paper, dropout=0.1, activation_dropout=0.1),
    ],
    ids=[*POSITIONS, *BLOCKS, "paper"],
)
def test_gradient_checkpointing_leaves_gradients_equal(make: Any) -> None:
    model, ids, gradients = make(attention_dropout=0.1).train(), tokens(2, 13), []
    for _ in range(2):
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        model.zero_grad()
        start_checkpointing(model)
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
    targets = labels[:, 1:].flatten()
    # Transformers' loss function works in float32.
    expected = nll_loss(logp[:, :-1].flatten(0, 1), targets)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "position",
    ["alibi", *(pytest.param(p, marks=pytest.mark.thorough) for p in POSITIONS if p != "alibi")],
)
def test_compiled_model_equals_eager(position: str) -> None:
    torch._dynamo.reset()
    model, ids = build(position=position), tokens(2, 16)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(compiled(ids, labels=ids, use_cache=False).logits, model(ids).logits)


@every_position
def test_autocast_runs_forward_and_backward(position: str) -> None:
    model = LinbiasForCausalLM(settings(position=position))
    ids = tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite() and loss.dtype == torch.float32


def test_bad_calls_are_explained() -> None:
    model, ids = build(), tokens(2, 5)
    static = StaticCache(config=model.config, max_cache_len=4)
    for call, message in (
        (
            {"attention_mask": torch.ones(2, 4)},
            r"attention_mask must have .* \[2, 5\], got \[2, 4\]",
        ),
        ({"position_ids": ids, "use_cache": True}, "must count on .* is a cache, got several"),
    ):
        with pytest.raises(ValueError, match="LinbiasModel: .*" + message):
            model(ids, **call)
    twice = {"cache": static, "past_key_values": static}
    with pytest.raises(ValueError, match="LinbiasModel: give either cache or past_key"):
        model(ids, **twice)


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
