"""What must hold for every input: hypothesis draws the sizes, slopes and contents."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import linbias
import linbias.torch

IMPLEMENTATIONS = ("dense", "blocked", "cpu")
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 1), (8, 4), (6, 2)])
SLOPE = st.one_of(st.just(0.0), st.floats(1e-8, 1e3), st.just(float("inf")))


@st.composite
def calls(draw):
    """q, k, v in float64 and the slopes of both sides."""
    H, G = draw(HEADS)
    B, D, E = draw(st.tuples(*[st.integers(1, n) for n in (2, 9, 5)]))
    T, S = draw(st.tuples(st.integers(1, 400), st.integers(1, 400)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([0.0, 1.0, 30.0]))
    q, k, v = (
        torch.from_numpy(rng.normal(size=shape) * factor)
        for shape, factor in (((B, H, T, D), size), ((B, G, S, D), 1.0), ((B, G, S, E), 1.0))
    )
    left, right = (draw(st.lists(SLOPE, min_size=H, max_size=H)) for _ in range(2))
    return q, k, v, torch.tensor(left).double(), torch.tensor(right).double()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(call=calls(), causal=st.booleans())
def test_equals_the_reference(implementation, call, causal):
    q, k, v, left, right = call
    sides = {"causal": True} if causal else {"causal": False, "right_slopes": right}
    out, lse = linbias.torch.attention(
        q, k, v, left, **sides, implementation=implementation, return_lse=True
    )
    expected, expected_lse = linbias.attention(q, k, v, left, **sides, return_lse=True)
    np.testing.assert_allclose(out, expected, atol=1e-11)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-11, rtol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(call=calls(), cut=st.floats(0, 1))
def test_future_keys_do_not_change_past_rows(implementation, call, cut):
    q, k, v, left, _ = call
    S, T = k.shape[2], q.shape[2]
    first = int(cut * S)
    run = lambda: linbias.torch.attention(q, k, v, left, implementation=implementation)  # noqa: E731
    before = run()
    k[:, :, first:] = 7.0
    v[:, :, first:] = -7.0
    rows = max(0, first - (S - T))
    if implementation == "dense":
        torch.testing.assert_close(run()[:, :, :rows], before[:, :, :rows])
    else:
        # The certificate knows the keys to the left of a tile only, so not a bit may change.
        whole_tiles = rows // 256 * 256
        assert torch.equal(run()[:, :, :whole_tiles], before[:, :, :whole_tiles])
        torch.testing.assert_close(run()[:, :, :rows], before[:, :, :rows])
