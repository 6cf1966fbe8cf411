"""`linbias.jax.attention`: the contract, and what it does not say."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linbias
from cases import CASES, VANISHING, by_name, far_block, short
from contract import (
    check_case,
    check_certificate_holds,
    check_hidden_keys_may_hold_anything,
    check_results,
    expected,
    rows,
)
from jax_subject import (
    IMPLEMENTATIONS,
    SIZES,
    JaxSubject,
    assert_close,
    needs_core,
    numpy_attention,
    random,
    steps,
    to_jax,
    to_numpy,
)
from linbias import _dispatch
from linbias.jax import attention, merge
from linbias.jax import bias as jax_bias
from linbias.jax.impl import cpu
from linbias.jax.impl.tiles import LEFT, RIGHT, Tiles

# Of long sequences `cpu` (the core, which the tests of `linbias.torch` ask too) and `dense` know
# nothing that their other tests do not ask.
CONTRACT = [
    *(("blocked", case) for case in CASES),
    *((implementation, case) for implementation in ("cpu", "dense") for case in short()),
    *(("cpu", by_name(name)) for name in ("long", "long-range-per-head")),
]
QUICK = """blocked-no-queries blocked-slopes-mixed blocked-range-per-head-dropout
cpu-T-below-S cpu-slopes-mixed cpu-asymmetric-per-batch cpu-filled-cache
cpu-range-per-head-dropout dense-T-above-S dense-slopes-per-batch dense-directional
dense-range-per-head-dropout"""
QUICK_NARROW = """dense-symmetric-bfloat16 blocked-gaps-asymmetric-bfloat16
cpu-symmetric-float64 cpu-dropout-float16 cpu-filled-cache-bfloat16"""
RANGED_NARROW = ("window-per-batch", "long-chunks")
NARROW = [
    ("dense", "symmetric", "bfloat16"),
    ("blocked", "range-per-head-symmetric", "float64"),
    *(("blocked", name, "bfloat16") for name in ("gaps-asymmetric", *RANGED_NARROW)),
    *(
        ("cpu", name, dtype)
        for name in ("symmetric", "dropout", "filled-cache")
        for dtype in ("float64", "bfloat16", "float16")
    ),
]


@pytest.mark.parametrize(("implementation", "case"), rows(QUICK, *CONTRACT))
def test_contract_in_float32(implementation, case):
    check_case(JaxSubject(implementation), case, "float32")


@pytest.mark.parametrize(("implementation", "name", "dtype"), rows(QUICK_NARROW, *NARROW))
def test_contract_in_other_dtypes(implementation, name, dtype):
    check_case(JaxSubject(implementation), by_name(name), dtype)


@pytest.mark.parametrize(
    "name",
    rows(
        "far-key-aligned-symmetric long-window-both-sides",
        ("far-key-aligned-symmetric",),
        ("long-window-both-sides",),
        ("long-scattered",),
    ),
)
def test_dropped_mass_is_at_most_the_tolerance(name):
    check_certificate_holds(JaxSubject("blocked"), by_name(name), 1e-2)


@pytest.mark.parametrize(("q_size", "k_size"), rows("1e-22-1000.0", *VANISHING))
def test_keys_count_although_squares_of_entries_vanish(q_size, k_size):
    arrays, slope, scale = far_block(q_size, k_size)
    heads_second = [x.astype(np.float32)[:, :, None] for x in arrays]
    out = attention(*heads_second, [slope], scale=scale, implementation="blocked")
    expected_out = linbias.attention(*arrays, [slope], scale=scale)
    np.testing.assert_allclose(out[0, :, 0], expected_out[0], atol=1e-5)
    # The bound is a number, not NaN: far keys of a steep head are left out all the same.
    assert steps(*heads_second, [1.0], scale=scale)[0][0] < 5


def test_the_certificate_leaves_most_of_a_long_sequence():
    """A steep head visits few bands, a flat one all, and tolerance 0 leaves nothing out."""
    q, k, v = random(1, 2048, 2, 16)
    assert steps(q, k, v, [0.5, 0.0]) == [[2, 0], [8, 0]]
    assert steps(q, k, v, [0.5, 0.0], tolerance=0.0) == [[8, 0], [8, 0]]


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("start", (-(2**30), -3000, 3000, 2**30))
def test_however_far_the_queries_stand_only_bands_with_keys_are_visited(start, causal):
    """Three tiles meet four blocks of keys in at most seven bands, near ones first."""
    (q, *_), (_, k, v) = random(2, 600, 2, 8), random(2, 1000, 2, 8)
    options = {"query_start": np.array([start, 300]), "causal": causal}
    found = steps(q, k, v, [0.5, 0.0], **options)
    assert max(map(max, found)) <= 7
    # The batch row that stands among the keys needs the bands of the left side, and all rows stop
    # together.
    assert found[1][0] >= 4


def test_a_range_without_keys_has_no_bands():
    tiles, none = Tiles.cut(600, 1000, jnp.array([0, 300]), True), jnp.zeros(2, int)
    assert [int(tiles.side(way, none, none).num_steps) for way in (LEFT, RIGHT)] == [0, 0]


def test_a_batch_row_that_has_met_all_its_keys_waits_for_the_others():
    """Its further bands lie before the keys, by more than the padding; none may wrap around."""
    (q, *_), (_, k, v) = random(2, 10, 1, 4), random(2, 2000, 1, 4)
    run = functools.partial(attention, q, k, v, [0.0], query_start=np.array([10, 1990]))
    np.testing.assert_allclose(
        run(implementation="blocked"), run(implementation="dense"), atol=1e-5
    )


@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_from_a_long_cache(implementation, bounded):
    case = by_name("long-cache", T=1, key_range=((0, 1500), (700, 2053)))
    inputs = expected(case, "float32")[0]
    arrays = {n: to_jax(n, getattr(inputs, n), "float32") for n in "qkv"}
    bound = jnp.linalg.norm(arrays["k"], axis=-1).max(1) * 1.001 if bounded else None
    options = {"slopes": inputs.left, "key_bound": bound, **case.placement}
    out, lse = attention(**arrays, **options, return_lse=True, implementation=implementation)
    check_results(to_numpy({"out": out, "lse": lse}), case, "float32")


@pytest.mark.parametrize("where", ("q", "k", "v"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_that_are_not_finite_show_in_every_row_that_sees_them(implementation, where):
    arrays = dict(zip("qkv", random(1, 600, 2, 8), strict=True))
    arrays[where][0, 3, 1, 2] = np.nan
    out = np.asarray(attention(**arrays, slopes=[0.5, 0.5], implementation=implementation))
    assert np.isfinite(out[:, :, 0]).all()
    bad = ~np.isfinite(out[0, :, 1]).all(-1)
    if where == "q":
        assert np.flatnonzero(bad).tolist() == [3]
    else:
        assert bad[3:].all()
    if where == "k":
        assert not bad[:3].any()


@pytest.mark.parametrize(
    ("implementation", "query_start"),
    rows(
        lambda implementation, query_start: (implementation == "dense") == (query_start is None),
        *product(IMPLEMENTATIONS, (None, (40, -20))),
    ),
)
def test_keys_outside_the_key_range_may_hold_anything(implementation, query_start):
    case = by_name("range-symmetric", query_start=query_start)
    check_hidden_keys_may_hold_anything(JaxSubject(implementation), case)


@pytest.mark.parametrize(
    ("implementation", "shape"),
    rows(
        lambda implementation, shape: implementation == "dense" and len(shape) in (1, 4),
        *product(("dense", "blocked"), ((13,), (9, 13), (4, 1, 1), (2, 4, 9, 13))),
    ),
)
def test_a_mask_hides_what_it_hides_in_the_definition(implementation, shape):
    """Also all keys of a query, which then gives zeros, and with gradients."""
    rng = np.random.default_rng(1)
    mask = rng.random(shape) < 0.6
    q, dout, (k, v) = random(2, 9, 4, 8)[0], random(2, 9, 4, 8)[1], random(2, 13, 2, 8)[:2]
    options = {"causal": False, "mask": mask}

    def run(q, k, v):
        return attention(q, k, v, **options, implementation=implementation, return_lse=True)

    (out, lse), pull = jax.vjp(run, q, k, v)
    heads_second = [x.astype(float).swapaxes(1, 2) for x in (q, k, v)]
    expected_out, expected_lse = linbias.attention(*heads_second, **options, return_lse=True)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected_out, atol=1e-5)
    np.testing.assert_allclose(lse.swapaxes(1, 2), expected_lse, rtol=1e-5, atol=1e-5)
    gradients = linbias.attention_backward(
        dout.astype(float).swapaxes(1, 2), *heads_second, **options
    )
    for found, truth in zip(pull((dout, jnp.zeros_like(lse))), gradients, strict=False):
        np.testing.assert_allclose(found.swapaxes(1, 2), truth, atol=1e-5)


@pytest.mark.thorough
def test_a_mask_of_numbers_is_added_to_the_scores_and_learns():
    """As the bias of `jax.nn.dot_product_attention` is, with -inf for what it hides."""
    q, k, v = random(2, 9, 4, 8)
    numbers = np.random.default_rng(1).normal(size=(4, 9, 9)).astype(np.float32)
    numbers[:, :, 2] = -np.inf
    linear = linbias.bias(linbias.slopes(4), 9, 9).astype(np.float32)

    def ours(numbers, **options):
        return (attention(q, k, v, causal=False, mask=numbers, **options) ** 2).sum()

    def theirs(numbers):
        return (jax.nn.dot_product_attention(q, k, v, bias=(numbers + linear)[None]) ** 2).sum()

    assert_close(*(jax.value_and_grad(f)(numbers) for f in (ours, theirs)))
    for name, words in (("blocked", "none of numbers"), ("cpu", "a key_range but no mask")):
        with pytest.raises(
            NotImplementedError, match=f"{name} cannot run this call: it .*{words}"
        ):
            ours(numbers, implementation=name)


def test_dropout_obeys_its_key_and_keeps_the_mean():
    q = k = jnp.zeros((1, 64, 1, 4))
    run = functools.partial(
        attention, q, k, jnp.ones((1, 64, 1, 1)), [0.0], dropout=0.25, causal=False
    )
    first, again, other = (run(dropout_key=jax.random.key(n)) for n in (5, 5, 6))
    assert (first == again).all() and not (first == other).all()
    # 4,096 weights: the mean of kept / (1 - p) has a standard deviation of 0.009.
    assert abs(first.mean() - 1) < 0.05


def test_auto_takes_the_core_on_a_cpu_and_passes_it_over_where_it_cannot():
    q = random(1, 3, 1, 257)[0]
    with pytest.raises(
        NotImplementedError, match="cpu cannot run this call: head sizes go up to 256, got 257"
    ):
        attention(q, q, q, implementation="cpu")
    np.testing.assert_allclose(attention(q, q, q), numpy_attention(q, q, q), atol=1e-5)


def test_without_the_binding_of_the_core_the_reason_is_stated(monkeypatch):
    monkeypatch.setattr(cpu, "WHY_MISSING", "the binding cannot be imported")
    monkeypatch.setattr(_dispatch, "_warned", [])
    q = random(*SIZES)[0]
    with pytest.raises(
        NotImplementedError, match="cpu cannot run this call: the binding cannot be imported"
    ):
        attention(q, q, q, implementation="cpu")
    with pytest.warns(UserWarning, match="blocked runs in place of cpu"):
        assert attention(q, q, q).shape == q.shape


@needs_core
def test_too_large_a_call_is_an_error_and_no_crash(monkeypatch):
    """The core has to make room for 2^44 keys before it reads any."""
    q = jax.ShapeDtypeStruct((1, 8, 1, 4), np.float32)
    k = jax.ShapeDtypeStruct((1, 2**44, 1, 4), np.float32)
    program = jax.jit(functools.partial(attention, implementation="cpu"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        program.lower(q, k, k).compile()(*(jnp.zeros(x.shape) for x in (q, k, k)))


def call(q=(2, 5, 4, 8), k=(2, 7, 2, 8), v=(2, 7, 2, 3), slopes=None, **options):
    """Call with arrays of these shapes, or with what stands in a shape's place."""
    q, k, v = (np.ones(x, np.float32) if isinstance(x, tuple) else x for x in (q, k, v))
    return attention(q, k, v, slopes, **options)


# The rules that all front ends share: test_errors.py.
MESSAGES = [
    (dict(q=(5, 4, 8)), ValueError, r"q must have 4 axes, \[B, T, H, D\]: batch, length, heads,"
     r" size, got \[5, 4, 8\]; q\[None\]"),
    (dict(k=(8, 7, 2, 8)), ValueError, r"k has batch 8 but q has 2 \(k \[8, 7, 2, 8\]"),
    (dict(v=(2, 6, 2, 3)), ValueError, "k has 7 keys but v has 6"),
    (dict(q=[[1.0]]), TypeError, "q must be a jax.Array or numpy.ndarray, got list"),
    (dict(key_range=[[0, 1]]), TypeError, "key_range must be a jax.Array or numpy.ndarray"),
    (dict(query_start=[0, 0]), TypeError, "query_start must be a jax.Array or numpy.ndarray"),
    (dict(query_range=[[0, 1]]), TypeError, "query_range must be a jax.Array or numpy.ndarray"),
    (dict(positions=[0.0] * 7), TypeError, "positions must be a jax.Array or numpy.ndarray"),
    (dict(mask=[[True]]), TypeError, "mask must be a jax.Array or numpy.ndarray, got list"),
    (dict(k=jnp.ones((2, 7, 2, 8), jnp.bfloat16)), TypeError, "k is bfloat16 but q is float32"),
    (dict(v=np.ones((2, 7, 2, 3))), TypeError,
     "v must be at most float32 while jax_enable_x64 is off, got float64"),
    (dict(slopes=jnp.ones(4) * 1j), TypeError, "slopes must hold real numbers, got complex"),
    (dict(slopes=[1.0, -0.5, 1, 1]), ValueError, "slopes must be at least 0 .*, got -0.5"),
    (dict(slopes=jnp.array([1.0, 1, 1, jnp.nan])), ValueError, "slopes must be .*, got nan"),
    (dict(key_range=jnp.array([[0, 7], [5, 8]])), ValueError, r"got \[5, 8\] in batch row 1"),
    (dict(query_start=np.array([0, 2**30 + 1])), ValueError, "got 1073741825 in batch row 1"),
    (dict(query_range=jnp.zeros((5, 2), int).at[4].set(np.array([2, 10]))), ValueError,
     r"query_range must be 0 <= first <= end <= S = 7, got \[2, 10\] in query 4"),
    (dict(positions=jnp.array([[0.0, 1, 3, 2, 4, 5, 6]])), ValueError,
     "positions must not fall, got 2.0"),
    (dict(attn_mask=None), TypeError, "there is no argument attn_mask; say mask, or key_range"),
    (dict(dropout=0.5), ValueError, r"dropout needs a dropout_key, got None \(dropout 0.5\)"),
    (dict(implementation="fast"), ValueError,
     "implementation must be one of .'auto', 'cpu', 'blocked', 'dense'., got 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), MESSAGES)
def test_attention_says_what_is_wrong(arguments, kind, words):
    with pytest.raises(kind, match=f"attention: .*{words}"):
        call(**arguments)


def test_parts_of_the_keys_merge_to_the_whole_with_its_gradients():
    """Also where a part, or all of them, have nothing for some rows."""
    q, k, v = random(2, 17, 4, 8)
    cuts, start = ((0, 5), (5, 6), (6, 17)), np.array([-4, 3])

    @jax.jit
    def whole(q, k, v):
        return attention(q, k, v, query_start=start, return_lse=True)

    @jax.jit
    def parts(q, k, v):
        found = [
            attention(q, k[:, a:b], v[:, a:b], query_start=start - a, return_lse=True)
            for a, b in cuts
        ]
        return merge(*zip(*found, strict=True))

    def loss(function):
        def of(*arrays):
            out, lse = function(*arrays)
            return (out**2).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2)))

    expected_out, expected_lse = whole(q, k, v)
    out, lse = parts(q, k, v)
    assert (expected_lse == -jnp.inf).any()
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    assert_close(loss(parts)(q, k, v), loss(whole)(q, k, v))


@pytest.mark.thorough
def test_merge_does_not_read_what_an_empty_part_holds():
    outs = jnp.array([[jnp.nan], [2.0]]).reshape(2, 1, 1, 1, 1)
    out, lse = merge(outs, jnp.array([-jnp.inf, 0.5]).reshape(2, 1, 1, 1))
    assert (out.item(), lse.item()) == (2.0, 0.5)
    with pytest.raises(ValueError, match="merge: outs and lses must be as many, at least 1"):
        merge(np.ones((2, 1, 3, 4, 5)), np.ones((1, 1, 3, 4)))


@pytest.mark.thorough
def test_bias_is_that_of_the_definition_and_differentiable():
    slopes = linbias.slopes(6)
    for T, S, right, start in ((5, 5, None, None), (3, 7, np.inf, None), (4, 6, 0.25, 1)):
        made = jax_bias(slopes, T, S, right, start)
        expected = linbias.bias(slopes, T, S, None if right is None else np.full(6, right), start)
        assert made.dtype == jnp.float32
        np.testing.assert_allclose(made, expected, rtol=1e-6)
    batch = jnp.array([[0.5, jnp.inf], [0.25, 0.0]])
    assert jax_bias(batch, 2, 3).shape == (2, 2, 2, 3)
    gradient = jax.jit(jax.grad(lambda m: jnp.exp(jax_bias(m, 2, 3, jnp.inf)).sum()))
    # Distances 1, and 2 and 1: those at 0 and the hidden side have none.
    expected = -np.exp(-0.5) - 2 * np.exp(-1.0) - np.exp(-0.5)
    np.testing.assert_allclose(gradient(jnp.array([0.5, jnp.inf])), [expected, 0.0], rtol=1e-6)
    for words, *arguments in (
        (r"slopes must have shape \[H\] or \[B, H\], got \[\]", 0.5, 2, 2),
        ("T must be at least 0, got -1", slopes, -1, 2),
        (r"right_slopes must be at least 0 \(or inf\), got -1", slopes, 2, 2, -1.0),
        (r"right_slopes must .* the shape of slopes, \[6\], got \[2\]", slopes, 2, 2, [0.5, 0.5]),
    ):
        with pytest.raises(ValueError, match=words):
            jax_bias(*arguments)
