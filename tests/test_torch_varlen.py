"""`attention_varlen`: packed sequences, each as if it were alone."""

import numpy as np
import pytest
import torch

import linbias.torch


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_equal_each_alone(causal):
    # The last two run together, with as many queries and padding behind the keys of one.
    lengths_q, lengths_k = (3, 0, 5, 2, 90, 70, 66, 1, 7, 7), (3, 4, 7, 0, 90, 101, 40, 1, 70, 80)
    q, k, v = (
        torch.randn(sum(lengths), heads, 8, dtype=torch.float64, requires_grad=True)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    offsets = [torch.tensor([0, *np.cumsum(lengths)]) for lengths in (lengths_q, lengths_k)]
    left = torch.rand(10, 4)
    options = {"causal": causal, "return_lse": True}
    out, lse = linbias.torch.attention_varlen(q, k, v, *offsets, left, **options)
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), weights)
    for b in range(10):
        mine, keys = (slice(o[b], o[b + 1]) for o in offsets)
        alone, alone_lse = linbias.torch.attention(
            *(x.transpose(0, 1)[None] for x in (q[mine], k[keys], v[keys])), left[b], **options
        )
        one = alone[0].transpose(0, 1)
        torch.testing.assert_close(out[mine], one, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse[mine], alone_lse[0].T, rtol=1e-13, atol=1e-13)
        for g, x in zip(
            gradients, torch.autograd.grad(one, (q, k, v), weights[mine]), strict=True
        ):
            own = mine if g is gradients[0] else keys
            torch.testing.assert_close(g[own], x[own], rtol=1e-12, atol=1e-12)


def test_packed_sequences_do_not_see_a_neighbours_nan():
    q, k, v = torch.randn(3, 30, 2, 8)
    q[:10], k[:10], v[:10] = torch.nan, torch.inf, torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    offsets = torch.tensor([0, 10, 13, 30])
    out = linbias.torch.attention_varlen(q, k, v, offsets, offsets)
    assert out[10:].isfinite().all()
    for gradient in torch.autograd.grad(out[10:].sum(), (q, k, v)):
        assert gradient[10:].isfinite().all()


def test_packed_sequences_take_placement_of_their_own():
    lengths_q, lengths_k = (3, 5, 2), (6, 5, 9)
    q, k, v = (
        torch.randn(sum(n), heads, 8, dtype=torch.float64)
        for n, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    offsets = [torch.tensor([0, *np.cumsum(n)]) for n in (lengths_q, lengths_k)]
    ranges = torch.tensor([[[1, 5], [0, 2]], [[0, 5], [5, 5]], [[3, 9], [0, 9]]])
    starts = torch.tensor([-1, 0, 12])
    for placement in (
        {"key_range": ranges},
        {"query_start": starts},
        {"key_range": ranges[:, 0], "query_start": starts},
    ):
        out = linbias.torch.attention_varlen(q, k, v, *offsets, causal=False, **placement)
        for b in range(3):
            mine, keys = (slice(o[b], o[b + 1]) for o in offsets)
            alone = linbias.torch.attention(
                *(x.transpose(0, 1)[None] for x in (q[mine], k[keys], v[keys])),
                causal=False,
                **{name: x[b : b + 1] for name, x in placement.items()},
            )
            torch.testing.assert_close(out[mine], alone[0].transpose(0, 1))
