"""`MultiheadAttention`: variants, shapes, padding, learned slopes, state dict, messages."""

import numpy as np
import pytest
import torch

import linbias
import linbias.torch
from linbias.torch import MultiheadAttention

INF = float("inf")
VARIANTS = {
    "causal": (linbias.slopes(4), None),
    "symmetric": (linbias.slopes(4), linbias.slopes(4)),
    "directional": ([2**-4, 2**-8, INF, INF], [INF, INF, 2**-4, 2**-8]),
    "asymmetric": (linbias.slopes(4), linbias.slopes(4)),
    "none": (np.zeros(4), np.zeros(4)),
    "none_causal": (np.zeros(4), None),
}


def layer(*args, **options):
    torch.manual_seed(0)
    return MultiheadAttention(*args, **{"batch_first": True} | options)


def test_grouped_heads_and_free_head_size():
    module = layer(12, 6, num_kv_heads=2, head_dim=5, bias=False)
    assert {n: tuple(p.shape) for n, p in module.state_dict().items()} == {
        "q_proj.weight": (30, 12),
        "k_proj.weight": (10, 12),
        "v_proj.weight": (10, 12),
        "out_proj.weight": (12, 30),
    }
    assert module(torch.randn(2, 5, 12))[0].shape == (2, 5, 12)


@pytest.mark.parametrize(("variant", "sides"), VARIANTS.items())
def test_each_variant_has_the_slopes_of_its_row_of_the_table(variant, sides):
    """What a layer computes with them: test_torch_drop_in.py."""
    module = layer(12, 4, variant=variant)
    found = module.slopes, module.right_slopes
    for mine, wanted in zip(found, sides, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            np.testing.assert_allclose(mine.detach(), wanted, rtol=1e-6)


@pytest.mark.parametrize("variant", ("causal", "symmetric", "directional", "asymmetric"))
def test_learned_slopes_get_gradients_and_stay_positive(variant):
    module = layer(12, 4, variant=variant, learned=True)
    names = [n for n, _ in module.named_parameters() if n.startswith("log_")]
    assert names == (["log_left"] if variant == "causal" else ["log_left", "log_right"])
    optimizer = torch.optim.SGD(module.parameters(), lr=100.0)
    before = module.slopes.detach().clone()
    module(torch.randn(2, 9, 12))[0].square().sum().backward()
    assert torch.isfinite(module.log_left.grad).all()
    optimizer.step()
    assert (module.slopes >= 0).all() and not torch.equal(module.slopes, before)
    hidden = torch.isinf(before)
    assert torch.isinf(module.slopes[hidden]).all()
    copy = layer(12, 4, variant=variant, learned=True)
    copy.load_state_dict(module.state_dict())
    assert torch.equal(copy.slopes, module.slopes)


def test_slopes_learned_as_sigmoids_start_at_the_schedule_and_stay_below_1():
    module = layer(12, 4, variant="directional", learned="sigmoid")
    names = [n for n, _ in module.named_parameters() if n.startswith("log")]
    assert names == ["logit_left", "logit_right"]
    fixed = layer(12, 4, variant="directional")
    torch.testing.assert_close(module.slopes, fixed.slopes.float())
    torch.testing.assert_close(module.right_slopes, fixed.right_slopes.float())
    x = torch.randn(2, 9, 12)
    module(x)[0].square().sum().backward()
    logit = module.logit_left.detach()
    expected = torch.where(torch.isinf(logit), torch.inf, 1 / (1 + torch.exp(-logit)))
    torch.testing.assert_close(module.slopes.detach(), expected)
    assert module.logit_left.grad[:2].abs().min() > 0 and module.logit_left.grad[2:].eq(0).all()
    with torch.no_grad():
        module.logit_left.add_(50)
    assert (module.slopes[:2] <= 1).all() and torch.isinf(module.slopes[2:]).all()


def test_fixed_slopes_are_not_in_the_state_dict_but_move_with_the_module():
    module = layer(12, 4)
    assert not [n for n in module.state_dict() if "log" in n]
    assert module.to("meta").slopes.device.type == "meta"
    assert layer(12, 4, learned=False, variant="asymmetric").right_slopes.requires_grad is False


def test_sixteen_bit_modules_keep_their_slopes_exact():
    module = layer(12, 12).bfloat16()
    np.testing.assert_array_equal(module.slopes, linbias.slopes(12))


def test_learned_slopes_are_as_precise_as_the_module_and_at_least_float32():
    wide = layer(12, 12, learned=True, dtype=torch.float64)
    assert wide.log_left.dtype == torch.float64
    np.testing.assert_allclose(wide.slopes.detach(), linbias.slopes(12), rtol=1e-15)
    assert layer(12, 12, learned=True).log_left.dtype == torch.float32
    narrow = layer(12, 12, learned=True, dtype=torch.bfloat16)
    np.testing.assert_allclose(narrow.slopes.detach(), linbias.slopes(12), rtol=1e-6)
    rounded = narrow.bfloat16()
    np.testing.assert_allclose(
        rounded.slopes.detach(), rounded.log_left.double().exp().detach(), rtol=1e-6
    )


def test_dropout_acts_in_training_only():
    module, x = layer(12, 4, 0.5), torch.randn(2, 9, 12)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


MESSAGES = [
    (dict(embed_dim=10), "embed_dim 10 is no multiple of num_heads 4; give head_dim"),
    (dict(embed_dim=8, num_heads=128), r".*; embed_dim comes first: MultiheadAttention\(128, 8\)"),
    (dict(learned="tanh"), "learned must be False, True or 'sigmoid', got 'tanh'"),
    (dict(num_heads=0), "num_heads must be at least 1, got 0"),
    (dict(num_kv_heads=3), "num_heads 4 is no multiple of num_kv_heads 3"),
    (dict(variant="both"), "variant must be one of .*, got 'both'"),
    (
        dict(variant="directional", num_heads=3),
        "variant 'directional' needs an even num_.*, got 3",
    ),
    (dict(variant="none", learned=True), "variant 'none' has no slopes to learn"),
    (dict(variant="none_causal", learned=True), "variant 'none_causal' has no slopes to learn"),
    (dict(dropout=1.0), r"dropout must be in \[0, 1 - 2\^-32\], got 1.0"),
]


@pytest.mark.parametrize(("arguments", "words"), MESSAGES)
def test_settings_say_what_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=f"MultiheadAttention: {words}"):
        MultiheadAttention(**{"embed_dim": 12, "num_heads": 4} | arguments)


X = torch.zeros(2, 5, 12)
LAST = torch.tensor([[False] * 4 + [True]])
FEWER = r"as many queries as keys \(T = 3, S = 5\)"
CALLS = [
    (dict(query=X[:, 0, 0]), "query, key and value must all have 3 axes"),
    (dict(query=X[..., :7]), "the last axis of query must be embed_dim = 12, got 7"),
    (dict(query=X[0], key=X[0, :, :6]), "the last axis of key must be kdim = 12, got 6"),
    (dict(query=X, key=X, value=X[..., :8]), "the last axis of value must be vdim = 12, got 8"),
    (dict(query=X, key_padding_mask=X[:, :4, 0]), r"key_padding_mask must be \[B, S\] = \[2, 5\]"),
    (dict(query=X[:, :3], key=X, key_padding_mask=LAST.expand(2, 5)), FEWER),
    (dict(query=X[:, :3], key=X, key_padding_mask=torch.cat([~LAST & False, LAST])), FEWER),
]


@pytest.mark.parametrize(("arguments", "words"), CALLS)
def test_calls_say_what_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=f"MultiheadAttention: .*{words}"):
        layer(12, 4)(**arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("learned", (False, True))
def test_dynamic_quantisation_keeps_slopes_and_computes_near(learned):
    """Its linear layers have a method in the place of a weight."""
    module, x = layer(16, 4, variant="symmetric", learned=learned).eval(), torch.randn(2, 9, 16)
    holder = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(module), {torch.nn.Linear})
    small = holder[0]
    assert type(small.q_proj) is not torch.nn.Linear
    assert torch.equal(small.slopes, module.slopes)
    for found, wanted in zip(
        small(x, need_weights=True), module(x, need_weights=True), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)
