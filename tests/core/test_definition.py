"""The NumPy definition: hand-worked numbers, the seed documents' printed tables, gradients."""

import json

import numpy as np
import pytest

import linbias
import linbias.cpu
import linbias.near_to_far
from cases import CASES, PLACED_CASES, RANGED_CASES, make_inputs, short
from chapter import HEADS, OUTPUT, chapters_table
from linbias.example import TOKENS, K, Q, V
from truth import true_attention

INF = np.inf


def heads(rows) -> np.ndarray:
    return np.array(rows, dtype=float).reshape(len(rows), 2, 2).transpose(1, 0, 2)


def chapter(slopes=(0.5, 0.25), **options) -> linbias.Explanation:
    return linbias.explain(heads(Q), heads(K), heads(V), slopes, **{"causal": False} | options)


def test_the_chapters_own_layout_is_split_into_heads():
    found = linbias.attention(Q, K, V, [0.5, 0.25], causal=False, num_heads=2)
    np.testing.assert_array_equal(found, chapter().output.transpose(1, 0, 2).reshape(5, 4))
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 5, 24)), rng.normal(size=(3, 7, 12)), rng.normal(size=(3, 7, 10))
    out, lse = linbias.attention(q, k, v, num_heads=4, return_lse=True)  # two heads of k and v
    apart = [
        x.reshape(3, -1, n, x.shape[-1] // n).swapaxes(1, 2) for x, n in ((q, 4), (k, 2), (v, 2))
    ]
    expected, expected_lse = linbias.attention(*apart, return_lse=True)
    np.testing.assert_array_equal(out, expected.swapaxes(1, 2).reshape(3, 5, 20))
    np.testing.assert_array_equal(lse, expected_lse)


def test_the_chapters_weights_and_outputs_to_the_digit():
    trace = chapter()
    output = linbias.attention(Q, K, V, [0.5, 0.25], causal=False, num_heads=2)
    matrices = *trace.weights, trace.weights.mean(0), output
    for matrix, table in zip(matrices, (*HEADS.split("\n\n"), OUTPUT), strict=True):
        printed = [[f"{x:.4f}" for x in row] for row in matrix]
        assert printed == [cells for _, *cells in chapters_table(table)]


def test_chapter_steps():
    trace = chapter()
    direct = linbias.attention(heads(Q), heads(K), heads(V), [0.5, 0.25], causal=False)
    np.testing.assert_array_equal(direct, trace.output)
    raw = [[0, 1, 1, 0, 1], [2, 0, 2, 0, 0], [1, 1, 2, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]]
    scores = [
        [0.000, 0.207, -0.293, -1.500, -1.293],
        [0.914, 0.000, 0.914, -1.000, -1.500],
        [-0.293, 0.207, 1.414, -0.500, -0.293],
        [-1.500, -1.000, -0.500, 0.000, -0.500],
        [-2.000, -0.793, -0.293, -0.500, 0.707],
    ]
    np.testing.assert_array_equal(trace.raw[0], raw)
    np.testing.assert_allclose(trace.scaled[0], np.divide(raw, np.sqrt(2)))
    np.testing.assert_allclose(trace.scores[0], scores, atol=5.01e-4)
    np.testing.assert_allclose(trace.scaled[1, 0], [0, 0.707, 0, 0.707, 0.354], atol=5.01e-4)
    np.testing.assert_array_equal(trace.bias[1, 0], [0, -0.25, -0.5, -0.75, -1.0])
    np.testing.assert_allclose(trace.scores[1, 0], [0, 0.457, -0.5, -0.043, -0.646], atol=5.01e-4)


@pytest.mark.parametrize(
    ("slopes", "T", "S", "right", "expected"),
    [
        (0.25, 3, 3, None, [[0, -0.25, -0.5], [-0.25, 0, -0.25], [-0.5, -0.25, 0]]),
        (1.0, 2, 4, INF, [[-2, -1, 0, -INF], [-3, -2, -1, 0]]),  # aligned at the lower right
        (1.0, 4, 2, INF, [[-INF, -INF], [-INF, -INF], [0, -INF], [-1, 0]]),
        (INF, 2, 3, 0.5, [[-INF, 0, -0.5], [-INF, -INF, 0]]),
    ],
)
def test_biases_by_hand(slopes, T, S, right, expected):
    bias = linbias.bias([slopes], T, S, None if right is None else [right])
    np.testing.assert_array_equal(bias, [expected])


def test_repository_faq_mask_gives_the_same_softmax():
    """The authors' code adds slope * key index: the rows differ by a constant."""
    m = 0.00390625  # the FAQ prints 0.0039, 0.0078, 0.0117
    faq = np.where(np.tri(4) > 0, m * np.arange(4), -INF)
    np.testing.assert_allclose(faq[3], [0, 0.0039, 0.0078, 0.0117], atol=5e-5)
    ours = linbias.bias([m], 4, 4, right_slopes=[INF])[0]
    for t in range(4):
        np.testing.assert_allclose(faq[t, : t + 1] - ours[t, : t + 1], m * t)
    np.testing.assert_array_equal(np.isinf(faq), np.isinf(ours))


PLACES = ("positions", "query_positions")
WRITTEN_TWICE = [case for case in short(CASES + PLACED_CASES + RANGED_CASES) if not case.dropout]


@pytest.mark.parametrize("case", WRITTEN_TWICE, ids=str)
def test_two_writings_of_the_definition_agree(case):
    """`linbias.attention` and tests/support/truth.py were written apart."""
    inputs = make_inputs(case)
    truth, gradients = true_attention(inputs, case, np.longdouble)
    options = {"causal": case.causal, "right_slopes": inputs.right, "scale": case.scale}
    options |= case.placement
    if case.places:
        options |= {name: getattr(inputs, name) for name in PLACES}
    arrays = (inputs.q, inputs.k, inputs.v, inputs.left)
    out, lse = linbias.attention(*arrays, **options, return_lse=True)
    seen = np.isfinite(truth["lse"])
    dlse = np.where(seen, inputs.dlse, 0.0)
    actual = linbias.attention_backward(inputs.dout, *arrays, **options, dlse=dlse)
    dleft = actual.dslopes
    if not case.causal and inputs.right is None:
        dleft = dleft + actual.dright_slopes
    pairs = [(out, truth["out"]), (lse[seen], truth["lse"][seen]), (dleft, gradients["left"])]
    pairs += [(getattr(actual, f"d{n}"), gradients[n]) for n in "qkv"]
    if inputs.right is not None:
        pairs.append((actual.dright_slopes, gradients["right"]))
    pairs += [(getattr(actual, f"d{n}"), gradients[n]) for n in PLACES if case.places]
    assert np.isneginf(lse[~seen]).all()
    for mine, theirs in pairs:
        size = np.abs(theirs).max(initial=1.0) * max(1.0, case.logits)
        np.testing.assert_allclose(mine, theirs.astype(float), rtol=0, atol=1e-12 * size)


def test_gradients_equal_finite_differences():
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(2, n, s, d)) for n, s, d in ((4, 3, 5), (2, 6, 5), (2, 6, 2))]
    arrays += [rng.uniform(0.1, 1, 4), rng.uniform(0.1, 1, (2, 4))]
    dout, dlse = rng.normal(size=(2, 4, 3, 2)), rng.normal(size=(2, 4, 3))

    def loss() -> float:
        q, k, v, left, right = arrays
        out, lse = linbias.attention(
            q, k, v, left, causal=False, right_slopes=right, return_lse=True
        )
        return float((out * dout).sum() + (lse * dlse).sum())

    gradients = linbias.attention_backward(
        dout, *arrays[:4], causal=False, right_slopes=arrays[4], dlse=dlse
    )
    expected = [*gradients[:3], gradients.dslopes, gradients.dright_slopes]
    assert [g.shape for g in expected] == [x.shape for x in arrays]
    for array, gradient in zip(arrays, expected, strict=True):
        for _ in range(10):
            index = tuple(rng.integers(n) for n in array.shape)
            before = array[index]
            array[index] = before + 1e-5
            above = loss()
            array[index] = before - 1e-5
            below = loss()
            array[index] = before
            assert (above - below) / 2e-5 == pytest.approx(gradient[index], abs=1e-8)


def test_batch_axes_and_dtypes():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 4, 7, 5)).astype(np.float32)
    out, lse = linbias.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 3, 4, 7, 5) and out.dtype == np.float32
    assert lse.shape == (2, 3, 4, 7) and lse.dtype == np.float64
    alone = linbias.attention(q[1, 2], k[1, 2], v[1, 2])
    np.testing.assert_array_equal(out[1, 2], alone)
    assert linbias.attention([[[1]]], [[[1]]], [[[3]]]).dtype == np.float64


def test_explanation_reads_as_a_table_and_as_json():
    trace = chapter()
    table = trace.table(query=0, tokens=TOKENS)
    assert "head 0, slope 1/2, query The" in table
    assert "mat   1.0000   0.7071  -2.0000  -1.2929   0.0790" in table
    assert "output [0.3274 0.3936]" in table
    assert trace.table(query=0, head=1).count("head") == 1
    assert json.loads(json.dumps(trace.to_dict()))["weights"][0][0][0] == pytest.approx(
        0.2879, abs=1e-4
    )
    with pytest.raises(ValueError, match="tokens must name the 5 keys, got 2"):
        trace.table(tokens=["a", "b"])
    with pytest.raises(ValueError, match=r"query must be in \[-5, 5\), got 5"):
        trace.table(query=5)
    with pytest.raises(ValueError, match="without a batch axis"):
        linbias.explain(*np.ones((3, 1, 2, 3, 4))).table()


def test_placement_without_a_batch_axis():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 3))
    options = {"key_range": [[1, 4], [0, 2]], "query_start": -1}
    alone = linbias.attention(q, k, v, **options)
    batched = {name: np.array([value]) for name, value in options.items()}
    np.testing.assert_array_equal(
        alone, linbias.attention(q[None], k[None], v[None], **batched)[0]
    )


NARROW = ("uint8", "int8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("started", (False, True))
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_and_unsigned_integers_place_queries_as_wide_ones_do(dtype, started):
    """More queries than their type counts, and than there are keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, n, 4)) for n in (300, 100, 100))
    given = {"key_range": [[0, 100]], "positions": np.arange(100.0)} | (
        {"query_start": [90], "query_range": [[20, 100]] * 300} if started else {}
    )
    given["query_positions"] = np.arange(300.0) + (90 if started else -200)
    integers = given.keys() & {"key_range", "query_start", "query_range"}
    narrow = given | {name: np.array(given[name], dtype) for name in integers}
    expected = linbias.attention(q, k, v, **given)
    for attend in (
        linbias.attention,
        linbias.cpu.attention,
        lambda *x, **y: linbias.near_to_far.attention(*x, **y, tolerance=0).out,
    ):
        np.testing.assert_allclose(attend(q, k, v, **narrow), expected, atol=1e-14)


def test_integers_that_only_uint64_holds_are_refused():
    q = np.ones((1, 2, 3, 4))
    with pytest.raises(ValueError, match="attention: query_start must be within"):
        linbias.attention(q, q, q, query_start=np.array([2**64 - 1], np.uint64))
    with pytest.raises(ValueError, match="attention: key_range must be 0 <= first"):
        linbias.attention(q, q, q, key_range=np.array([[0, 2**64 - 1]], np.uint64))


def test_distances_count_with_any_integers():
    for integer in (np.uint8, np.uint64):
        found = (
            linbias.distances(integer(5), integer(3), integer(0)),
            linbias.distances(integer(5), 3),
        )
        assert [x.dtype for x in found] == [np.int64] * 2
        assert (found[0][0, 0], found[1][0, 0]) == (0, -2)


def test_keys_outside_the_range_may_hold_anything():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 3))
    clean = linbias.attention(q, k, v, key_range=[2, 5])
    k[:, :2], v[:, 5:] = np.nan, np.inf
    np.testing.assert_array_equal(linbias.attention(q, k, v, key_range=[2, 5]), clean)
    trace = linbias.explain(q, k, v, key_range=[2, 5], query_start=0)
    assert np.isneginf(trace.bias[0, :, :2]).all() and "query 3" in trace.table(query=3)


def test_merged_parts_equal_the_whole():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 4, 9, 3))
    parts = [
        linbias.attention(
            q[..., 2:6, :],
            k[..., a:b, :],
            v[..., a:b, :],
            causal=causal,
            query_start=[2 - a] * 2,
            return_lse=True,
        )
        for causal in (True, False)
        for a, b in ((0, 1), (1, 6), (6, 9))
    ]
    for causal, three in ((True, parts[:3]), (False, parts[3:])):
        whole = linbias.attention(
            q[..., 2:6, :], k, v, causal=causal, query_start=[2] * 2, return_lse=True
        )
        for merged, expected in zip(linbias.merge(*zip(*three, strict=True)), whole, strict=True):
            np.testing.assert_allclose(merged, expected, atol=1e-12)


def test_merging_rows_that_see_nothing():
    out, lse = linbias.merge([np.zeros((2, 3)), np.ones((2, 3))], [[-INF, -INF], [-INF, 0.5]])
    np.testing.assert_array_equal(out, [[0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(lse, [-INF, 0.5])


def test_explain_takes_heads_side_by_side_and_says_where_a_query_is_chosen():
    slopes = linbias.slopes(2, "halving")
    trace = linbias.explain(Q, K, V, slopes, causal=False, num_heads=2)
    apart = linbias.explain(heads(Q), heads(K), heads(V), slopes, causal=False)
    np.testing.assert_array_equal(trace.output, apart.output)
    np.testing.assert_array_equal(trace.q, heads(Q))
    with pytest.raises(ValueError, match="num_heads= splits the last of 2"):
        linbias.explain(Q, K, V)
    with pytest.raises(TypeError, match=r"no argument query_idx; .* table\(query=...\)"):
        linbias.explain(Q, K, V, query_idx=0)
