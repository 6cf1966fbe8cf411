"""Keys at given positions: the definition against loops over pairs, near to far, PyTorch, and what is refused."""

import numpy as np
import pytest

import linbias
from positions import PLACED, B, D, E, G, H, Placed, backward, truth

BY_NAME = {call.name: call for call in PLACED}


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_the_definition_equals_loops_over_pairs(call: Placed):
    out, lse = linbias.attention(*call.arrays, **call.given, return_lse=True)
    expected, expected_lse = truth(call)
    np.testing.assert_allclose(out, expected.astype(float), atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse.astype(float), atol=1e-12, rtol=1e-12)
    weights = linbias.attention_weights(*call.arrays[:2], call.arrays[3], **call.given)
    np.testing.assert_allclose(weights.sum(-1), np.isfinite(lse), atol=1e-12)


@pytest.mark.parametrize(
    "sides", ({}, {"causal": False}, {"causal": False, "right_slopes": [np.inf, 0.5, 0.0, 2.0]})
)
@pytest.mark.parametrize(("T", "start"), ((9, None), (4, None), (3, [2, 5])))
def test_counted_positions_are_the_default(sides, T, start):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, m, D)) for n, m in ((H, T), (G, 9), (G, 9)))
    dout = rng.normal(size=q.shape)
    options = {"query_start": start, **sides}
    counted = {"positions": np.tile(np.arange(9), (B, 1)), **options}
    out, found = linbias.attention(q, k, v, **options), linbias.attention(q, k, v, **counted)
    np.testing.assert_allclose(found, out, rtol=1e-13)
    expected = linbias.attention_backward(dout, q, k, v, **options)
    gradients = linbias.attention_backward(dout, q, k, v, **counted)
    for ours, theirs in zip(gradients[:5], expected[:5], strict=True):
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-13)
    assert gradients.dpositions.shape == (B, 9) and expected.dpositions is None


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_gradients_by_positions_equal_central_differences(call: Placed):
    rng = np.random.default_rng(7)
    dout, dlse = rng.normal(size=(B, H, call.T, E)), rng.normal(size=(B, H, call.T))
    gradients = backward(call, dout, dlse)
    x, xq = (
        None if array is None else array.astype(np.longdouble)
        for array in (call.positions, call.options.get("query_positions"))
    )
    assert gradients.dpositions.shape == x.shape
    assert (gradients.dquery_positions is None) == (xq is None)

    def loss() -> float:
        """Of loops over pairs, which take a place beyond a neighbour's for what it is."""
        out, lse = truth(call, x, xq)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0.0) * dlse).sum()

    step = np.longdouble(1e-6)
    for array, gradient in ((x, gradients.dpositions), (xq, gradients.dquery_positions)):
        if array is None:
            continue
        inside = np.argwhere(np.abs(array) < 1e290)
        for index in map(tuple, rng.permutation(inside)[:12]):
            before, losses = array[index], []
            for sign in (1, -1):
                array[index] = before + sign * step
                losses.append(loss())
            array[index] = before
            expected = float((losses[0] - losses[1]) / (2 * step))
            assert gradient[index] == pytest.approx(expected, abs=2e-6, rel=1e-4), index
        unused = ~(np.abs(array) < 1e290)
        assert not gradient[unused].any()
