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
def calls(draw, longest: int = 400):
    """q, k, v in float64 and the slopes of both sides."""
    H, G = draw(HEADS)
    B, D, E = draw(st.tuples(*[st.integers(1, n) for n in (2, 9, 5)]))
    T, S = draw(st.tuples(st.integers(1, longest), st.integers(1, longest)))
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
    sides = {name: x if name == "causal" else np.asarray(x) for name, x in sides.items()}
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(call=calls(longest=60))
def test_decoding_step_by_step_equals_the_full_forward(implementation, call):
    q, k, v, left, _ = call
    length = min(q.shape[2], k.shape[2])
    q, k, v = q[:, :, :length], k[:, :, :length], v[:, :, :length]
    full = linbias.torch.attention(q, k, v, left, implementation=implementation)
    steps = [
        linbias.torch.attention(
            q[:, :, t : t + 1],
            k[:, :, : t + 1],
            v[:, :, : t + 1],
            left,
            implementation=implementation,
        )
        for t in range(length)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=2), full)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(call=calls(), seed=st.integers(0, 100))
def test_permuting_batch_and_heads_permutes_the_output(implementation, call, seed):
    q, k, v, left, right = call
    H, G = q.shape[1], k.shape[1]
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randperm(G, generator=generator)
    heads = (groups[:, None] * (H // G) + torch.arange(H // G)).flatten()
    rows = torch.randperm(q.shape[0], generator=generator)
    run = linbias.torch.attention
    options = {"causal": False, "implementation": implementation}
    out = run(q, k, v, left, right_slopes=right, **options)
    q, k, v = (x[rows][:, order] for x, order in ((q, heads), (k, groups), (v, groups)))
    permuted = run(q, k, v, left[heads], right_slopes=right[heads], **options)
    torch.testing.assert_close(permuted, out[rows][:, heads])


@given(call=calls())
def test_outputs_lie_between_the_smallest_and_largest_value(call):
    q, k, v, left, right = call
    out, lse = linbias.torch.attention(
        q, k, v, left, causal=False, right_slopes=right, return_lse=True
    )
    seen = torch.isfinite(lse)
    low, high = (x.repeat_interleave(q.shape[1] // v.shape[1], 1) for x in (v.amin(2), v.amax(2)))
    assert (out >= low[:, :, None] - 1e-12)[seen].all()
    assert (out <= high[:, :, None] + 1e-12)[seen].all()


@given(H=st.integers(1, 6), T=st.integers(1, 50), S=st.integers(1, 50), more=st.integers(1, 50))
def test_shifting_all_positions_changes_nothing(H, T, S, more):
    """Keys hidden in front move every position; nothing depends on where counting begins."""
    q, k, v = (torch.randn(1, H, n, 3, dtype=torch.float64) for n in (T, S, S))
    out = linbias.torch.attention(q, k, v, causal=False)
    pad = torch.randn(1, H, more, 3, dtype=torch.float64)
    shifted = linbias.torch.attention(
        q,
        torch.cat([pad, k], 2),
        torch.cat([pad, v], 2),
        causal=False,
        key_range=torch.tensor([[more, more + S]]),
    )
    torch.testing.assert_close(shifted, out)


@given(steeper=st.floats(1.0, 100.0), T=st.integers(2, 60))
def test_a_steeper_slope_never_moves_weight_farther_when_scores_are_equal(steeper, T):
    zeros = np.zeros((1, T, 2))
    flat, steep = (
        linbias.explain(zeros, zeros, zeros, [0.01 * s]).weights[0, -1] for s in (1, steeper)
    )
    assert (np.cumsum(steep[::-1]) >= np.cumsum(flat[::-1]) - 1e-12).all()
