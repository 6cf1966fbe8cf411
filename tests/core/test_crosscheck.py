"""Public implementations agree with ours, and what they get wrong does not happen here."""

import math

import numpy as np
import pytest
import torch

import linbias
import linbias.torch


def test_labml_alibi_multi_head_attention():
    """The annotated implementation: weights copied, outputs equal."""
    from labml_nn.transformers import alibi

    torch.manual_seed(0)
    theirs = alibi.AlibiMultiHeadAttention(heads=6, d_model=24, dropout_prob=0.0).eval()
    ours = linbias.torch.MultiheadAttention(24, 6).eval()
    with torch.no_grad():
        linear = [part.linear for part in (theirs.query, theirs.key, theirs.value)]
        mine = ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj
        for own, other in zip(mine, (*linear, theirs.output), strict=True):
            own.load_state_dict(other.state_dict())
    x = torch.randn(11, 2, 24)
    mask = torch.tril(torch.ones(11, 11, dtype=torch.bool))[:, :, None]
    torch.testing.assert_close(ours(x)[0], theirs(query=x, key=x, value=x, mask=mask))
    np.testing.assert_allclose(linbias.slopes(12), alibi.get_slopes(12), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("heads", (3, 8, 12))
def test_x_transformers_alibi(heads):
    from x_transformers.x_transformers import AlibiPositionalBias

    theirs = AlibiPositionalBias(heads=heads, total_heads=heads)
    bias = theirs(7, 11)
    np.testing.assert_allclose(bias, linbias.bias(linbias.slopes(heads), 7, 11), rtol=1e-6)
    q, k, v = torch.randn(3, 1, heads, 11, 8)
    expected = torch.softmax(q @ k.mT / math.sqrt(8) + theirs(11, 11), -1) @ v
    torch.testing.assert_close(linbias.torch.attention(q, k, v, causal=False), expected)


@pytest.mark.parametrize("heads", (1, 5, 8, 12, 16, 71))
def test_transformers_bloom_slopes(heads):
    """BLOOM adds slope * key index: the same softmax, so compare the steps between neighbours."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32).view(heads, 5)
    np.testing.assert_allclose(alibi.diff(dim=1)[:, 0], linbias.slopes(heads), rtol=1e-5)


def test_the_bias_is_exact_far_out_in_sixteen_bits():
    """bfloat16 slope * key_index, as BLOOM adds it, is off by nats at 2k tokens."""
    S, m = 2048, 0.5
    exact = m * np.arange(S - 1, S - 65, -1.0)
    absolute = (torch.tensor(m).bfloat16() * torch.arange(S).bfloat16())[-64:].double().flip(0)
    assert np.abs(absolute.numpy() - exact).max() > 1
    q, k = (torch.zeros(1, 1, n, 8, dtype=torch.bfloat16) for n in (1, S))
    v = torch.eye(S, dtype=torch.bfloat16)[None, None]
    weight = linbias.torch.attention(q, k, v, [m], scale=1.0)[0, 0].double()
    expected = linbias.attention_weights(*(x[0].float().numpy() for x in (q, k)), [m])[0]
    assert np.abs(weight.numpy() - expected).sum() / 2 < 0.003


def test_distances_beyond_sixteen_bits_are_exact():
    """llama.cpp's float16 mask rounds beyond 2,048 and hides keys from 65,520 on."""
    S, far = 70_000, 100
    q, k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, S, 2), torch.zeros(1, 1, S, 1)
    k[0, 0, far, 0] = 1.0
    q[0, 0, 0, 0] = 1.0
    v[0, 0, far] = 1.0
    slope = 1e-4
    lse = linbias.torch.attention(q, k, v, [slope], scale=20.0, return_lse=True)
    expected = math.exp(20.0 - slope * (S - 1 - far)) / (
        math.exp(20.0 - slope * (S - 1 - far))
        + (1 - math.exp(-slope * S)) / (1 - math.exp(-slope))
    )
    assert lse[0].item() == pytest.approx(expected, rel=1e-4)
