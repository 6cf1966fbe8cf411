"""Reach from weights: in no family does a text have a key that leads by more than they say."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
from linbias.models.fused import fuse
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from linbias.models.window_cache.questions import Questions
from linbias.models.window_cache.reach import Reach, reach_of_weights
from linbias.near_to_far import reach
from linbias.streams import largest_lead
from small_models import build, build_paper
from test_transformers_fused import bloom, falcon, mpt


def mpt_with_norms(**options: Any) -> LinbiasMptForCausalLM:
    sizes = {"d_model": 48, "n_heads": 6, "n_layers": 2, "attn_config": {"alibi": True, **options}}
    return LinbiasMptForCausalLM(LinbiasMptConfig.from_dict({**VAST, **sizes}))


VAST = {"vocab_size": 97, "initializer_range": 0.3}
SMALL = {**VAST, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
MODELS = {
    "linbias": build,
    "linbias, keys shared": lambda: build(num_key_value_heads=2),
    "linbias, RMS norms": lambda: build(block="parallel_fused"),
    "paper": lambda: build_paper(position="alibi"),
    "baichuan": lambda: BaichuanForCausalLM(BaichuanConfig(**SMALL, intermediate_size=64)),
    "bloom": lambda: fuse(bloom()),
    "falcon": lambda: fuse(falcon(new_decoder_architecture=True, num_kv_heads=2)),
    "mpt": lambda: fuse(mpt()),
    "mpt, norms of queries and keys": lambda: mpt_with_norms(qk_ln=True),
    "mpt, norms of each head": lambda: mpt_with_norms(qk_gn=True),
}


def made(name: str) -> Any:
    """With norms and biases that do something, in float64."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    return model


def leads_of(model: Any, given: Reach, **inputs: torch.Tensor) -> np.ndarray:
    """[layers, H]: the most by which a key led the query's own: w = exp(lead - m d) w_own."""
    attentions = model(**inputs, output_attentions=True).attentions
    found = []
    for weights, slopes in zip(attentions, given.slopes, strict=True):
        w = weights[0].double().log()  # [H, T, T]
        places = torch.arange(w.shape[-1])
        distance = (places[:, None] - places).clamp(min=0)
        lead = w - w.diagonal(dim1=1, dim2=2)[..., None]
        lead = lead + torch.tensor(slopes)[:, None, None] * distance
        found.append(lead.tril().amax((1, 2)).numpy())
    return np.array(found)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_no_text_leads_by_more(name):
    model = made(name)
    given = reach_of_weights(model)
    assert np.isfinite(given.lead).all() and not given.why_not
    ids = torch.randint(model.config.vocab_size, (1, 700))
    reached = leads_of(model, given, input_ids=ids)
    assert (reached <= given.lead).all()
    assert (reached[0] > 0.8 * given.lead[0]).all()  # most pairs of tokens occur
    if name != "paper":  # whose embeddings are made inside
        width = model.config.hidden_size
        wild = torch.randn(1, 60, width) * 10.0 ** torch.randint(-3, 4, (1, 60, 1))
        reached = leads_of(model, given, inputs_embeds=wild.double())
        assert (reached[1:] <= given.lead[1:]).all()


def climbed(model: Any, steps: int = 200, starts: int = 16) -> np.ndarray:
    """[H]: the most by which a key of the second layer leads the query's own, by gradients."""
    with torch.no_grad():
        asked = Questions(model)
    module, args, kwargs = asked.calls[1]
    norm, linear = asked.paths[1]
    width = args[0].shape[-1] if linear is None else linear.in_features
    heads = len(reach_of_weights(model).lead[1])
    pairs = torch.randn(heads * starts, 2, width, dtype=torch.float64, requires_grad=True)
    climber = torch.optim.Adam([pairs], lr=0.1)
    for _ in range(steps):
        hidden = norm(pairs.reshape(1, -1, width))
        hidden = hidden if linear is None else linear(hidden)
        answer = asked.ask(1, module, args, kwargs, hidden)
        q, k = (x[0].unflatten(1, (-1, 2)) for x in (answer.q, answer.k))  # [heads, pairs, 2, D]
        k = k.repeat_interleave(len(q) // len(k), 0)
        lead = answer.scale * (q[:, :, 0] * (k[:, :, 1] - k[:, :, 0])).sum(-1)
        own = lead.unflatten(1, (heads, starts)).diagonal()  # [starts, H]
        climber.zero_grad()
        own.sum().neg().backward()
        climber.step()
    return own.detach().amax(0).numpy()


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_no_hidden_state_leads_by_more_and_one_leads_by_as_much(name):
    model = made(name)
    own_norms = name.startswith("mpt, norms")
    if own_norms:  # the worst own key lies opposite to the query
        block = model.transformer.blocks[1]
        with torch.no_grad():
            q, k, _ = block.attn.Wqkv.weight.chunk(3)
            k.copy_(-q)
            block.norm_1.bias.zero_()
            block.attn.Wqkv.bias.zero_()
            block.attn.k_ln.weight.copy_(block.attn.q_ln.weight)
    lead = reach_of_weights(model).lead[1]
    reached = climbed(model)
    assert (reached <= lead * (1 + 1e-9)).all()
    # The bound for norms behind the projections does not use that what they make sums to 0.
    assert (reached > (0.85 if own_norms else 0.99) * lead).all()


def test_a_layer_says_why_its_weights_do_not_say():
    model = fuse(mpt(clip_qkv=0.01)).eval()
    given = reach_of_weights(model)
    assert given.why_not == {1: "its projections are not linear"}
    assert np.isfinite(given.lead[0]).all()  # tokens can be tried
    assert np.isinf(given.lead[1]).all() and np.isinf(given.of_heads()[1]).all()
    model = made("linbias")
    model.model.layers[1].norm = nn.Sequential(model.model.layers[1].norm, nn.Identity())
    model.model.layers[1].norm.append(nn.ReLU())
    assert reach_of_weights(model).why_not == {
        1: "its attention reads something else than a norm's output"
    }


def test_a_large_vocabulary_is_left_to_the_weights(monkeypatch):
    model = made("linbias")
    tried = reach_of_weights(model)
    monkeypatch.setattr("linbias.models.window_cache.reach._MOST_TOKENS", 60)
    bounded = reach_of_weights(model)
    assert (tried.lead[0] < bounded.lead[0]).all()
    np.testing.assert_array_equal(tried.lead[1], bounded.lead[1])


def test_the_model_is_as_before():
    model = made("linbias").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reach_of_weights(model)
    assert model.training
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "rotary"}, "linear biases"),
        ({"position": "none"}, "linear biases"),
        ({"slope_scale": "interpolate"}, "slope_scale"),
    ],
)
def test_models_that_have_no_reach_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reach_of_weights(build(**changes))


# ---- the lead of one head


def projections(kind, D=8, n=24, seed=0):
    rng = np.random.default_rng(seed)
    F, G = rng.normal(size=(2, D, n)) / math.sqrt(n)
    f = rng.normal(size=D)
    return {
        "random": (F, G, 0 * f),
        "biased": (F, G, 3 * f),
        "bias alone": (0 * F, G, f),
        "alike": (2 * F, F, 0 * f),
        "opposed": (F, -2 * F, f),
        "one direction": (np.outer(f, F[0]), np.outer(f[::-1], F[1]), f),
    }[kind]


KINDS = ("random", "biased", "bias alone", "alike", "opposed", "one direction")


def worst_input(F, G, f, radius, scale, seed=0):
    """By gradient steps: the lead that was reached, and the two normed inputs that reach it."""
    rng = np.random.default_rng(seed)
    C, b = scale * F.T @ G, scale * G.T @ f

    def best_key(y):
        v = C.T @ y + b
        return v * radius / max(np.linalg.norm(v), 1e-300)

    def lead(y):
        return (y @ C + b) @ (best_key(y) - y)

    found = (-math.inf, None, None)
    for _ in range(12):
        y = rng.normal(size=F.shape[1])
        y *= radius / np.linalg.norm(y)
        step = 0.1 * radius
        for _ in range(300):
            slope = C @ best_key(y) - (C + C.T) @ y - b
            while step > 1e-9 * radius:
                other = y + step * slope / max(np.linalg.norm(slope), 1e-300)
                other *= radius / max(np.linalg.norm(other), radius)
                if lead(other) > lead(y):
                    y, step = other, 1.5 * step
                    break
                step /= 2
        found = max(found, (lead(y), y, best_key(y)), key=lambda item: item[0])
    return found


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_leads_by_more_and_one_leads_by_as_much(kind, centred):
    F, G, f = projections(kind)
    radius, scale = math.sqrt(F.shape[1]), 0.3
    bound = largest_lead(F, G, f, radius=radius, scale=scale, centred=centred)
    if centred:  # normed inputs that sum to 0 do not see the means of the rows
        F, G = F - F.mean(1, keepdims=True), G - G.mean(1, keepdims=True)
    reached, _, _ = worst_input(F, G, f, radius, scale)
    assert reached <= bound <= 1.01 * reached + 1e-9


def test_the_lead_holds_for_what_a_layer_norm_makes():
    rng = np.random.default_rng(1)
    F, G, f = projections("biased", seed=3)
    norm = torch.nn.LayerNorm(24).double()
    hidden = torch.from_numpy(rng.normal(size=(400, 24)) * rng.choice([0.01, 1, 100], (400, 1)))
    y = norm(hidden).detach().numpy()
    q, k = y @ F.T + f, y @ G.T + rng.normal(size=8)
    lead = (0.5 * (q @ k.T - (q * k).sum(-1, keepdims=True))).max()
    bound = largest_lead(F, G, f, radius=math.sqrt(24), scale=0.5, centred=True)
    assert 0 < lead <= bound


def lead_of(G, radius=1.0):
    F = np.full((2, 3), math.nan)
    return largest_lead(F, G, radius=radius, scale=1.0, centred=False)


def test_what_is_not_finite_has_no_reach():
    assert reach(0.5, lead_of(np.full((2, 3), math.nan)), tolerance=0.1) == math.inf


@pytest.mark.parametrize(
    ("shape", "radius", "message"),
    [
        ((2, 4), 1, r"one shape \[D, n\].* \(2, 3\), \(2, 4\)"),
        ((2, 3), -1, "radius must be at least 0, got -1"),
    ],
)
def test_bad_projections_are_refused(shape, radius, message):
    with pytest.raises(ValueError, match=message):
        lead_of(np.ones(shape), radius=radius)
