"""Public implementations agree with ours, and what they get wrong does not happen here."""

import math

import numpy as np
import pytest
import torch

import linbias
import linbias.torch


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
