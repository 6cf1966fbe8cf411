"""`linbias.jax` with keys at given positions: the definition, near to far, float32, traced."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import linbias
from cases import PLACED_CASES
from contract import check_case, rows
from jax_subject import JaxSubject, assert_close, random
from linbias import near_to_far
from linbias.jax import attention, attention_weights
from linbias.jax.call import prepare
from linbias.jax.impl import blocked
from linbias.jax.impl.certificate import log_sums
from linbias.jax.standing import in_parts, stand_near
from positions import PLACED, Placed, backward, patterns

BY_NAME = {call.name: call for call in PLACED}
ALL = ("dense", "blocked", "cpu")
PLACES = ("positions", "query_positions")


def arguments(call: Placed, dtype=np.float64):
    """JAX's arguments for a call: q, k, v and slopes, and options."""
    q, k, v, slopes = call.arrays
    arrays = [jnp.asarray(x.swapaxes(1, 2), dtype) for x in (q, k, v)]
    return [*arrays, jnp.asarray(slopes, np.float64 if dtype == np.float64 else np.float32)]


QUICK = """range-per-head-dense queries-between-dense
gates-cpu equal-stamps-hidden-cpu left-padding-cpu range-per-head-cpu asymmetric-cpu
queries-between-cpu no-keys-cpu
gates-blocked"""


@pytest.mark.parametrize(
    ("call", "implementation"), rows(QUICK, *((call, name) for call in PLACED for name in ALL))
)
def test_equals_the_definition_with_every_gradient(call, implementation):
    with jax.enable_x64(True):
        given = dict(zip(("q", "k", "v", "slopes"), arguments(call), strict=True))
        given |= {name: jnp.asarray(x) for name, x in call.given.items() if name != "causal"}
        leaves = {n: x for n, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        options = {n: x for n, x in given.items() if n not in leaves}
        options |= {"causal": call.given.get("causal", True), "return_lse": True}

        def run(leaves):
            return attention(**leaves, **options, implementation=implementation)

        (out, lse), pull = jax.vjp(run, leaves)
        rng = np.random.default_rng(0)
        dout, dlse = rng.normal(size=out.shape), rng.normal(size=lse.shape) * np.isfinite(lse)
        found = pull((jnp.asarray(dout), jnp.asarray(dlse)))[0]
    expected_out, expected_lse = linbias.attention(*call.arrays, **call.given, return_lse=True)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected_out, atol=1e-12)
    np.testing.assert_allclose(lse.swapaxes(1, 2), expected_lse, atol=1e-12)
    gradients = backward(call, dout.swapaxes(1, 2), dlse.swapaxes(1, 2))
    expected = {n: getattr(gradients, f"d{n}") for n in leaves}
    if not options["causal"] and "right_slopes" not in leaves:
        expected["slopes"] = expected["slopes"] + gradients.dright_slopes
    for name, gradient in found.items():
        gradient = gradient.swapaxes(1, 2) if name in ("q", "k", "v") else gradient
        np.testing.assert_allclose(gradient, expected[name], atol=1e-11, rtol=1e-11, err_msg=name)


LARGE = ("unix-times", "two-ages", "gate-that-forgets-all", "left-padding")
HARD = [call for call in PLACED if "far" in call.name or call.name in LARGE]


@pytest.mark.parametrize(
    ("call", "implementation"),
    rows(
        "unix-times-cpu two-ages-dense queries-far-beyond-padding-cpu queries-far-before-dense",
        *product(HARD, ALL),
    ),
)
def test_large_positions_of_numpy_cost_no_digits_in_narrow_types(call, implementation):
    """Nor does what all keys of a row lose alike; outside of jit and, as constants, inside."""
    expected = linbias.attention(*call.arrays, **call.given).swapaxes(1, 2)
    for dtype, allowed in ((jnp.float32, 5e-6), (jnp.bfloat16, 0.04)):
        arrays = arguments(call, dtype)

        def run(*arrays):
            return attention(*arrays, **call.given, implementation=implementation)

        for out in (run(*arrays), jax.jit(run)(*arrays)):
            assert out.dtype == dtype
            np.testing.assert_allclose(out.astype(float), expected, atol=allowed)
    q, k, _, slopes = arguments(call, np.float32)
    weights = attention_weights(q, k, slopes, **call.given)
    expected = linbias.attention_weights(*call.arrays[:2], call.arrays[3], **call.given)
    np.testing.assert_allclose(weights, expected, atol=5e-6)


@pytest.mark.parametrize(
    ("implementation", "case"),
    rows("blocked-gaps-range-per-head", *product(("blocked", "cpu"), PLACED_CASES)),
)
def test_positions_keep_the_contract(implementation, case):
    check_case(JaxSubject(implementation), case, "float64")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ("int32", "uint32", "int16", "int64", "uint64", "float32"))
def test_integers_are_exact_also_where_they_are_traced(dtype):
    """Up to 2^31, where float32 counts in steps of 128; 64 bits only as arrays of NumPy."""
    rng, large = np.random.default_rng(0), 2**31 - 100 if dtype[-2:] in ("32", "64") else 0
    x = (large + np.sort(rng.integers(0, 90, (1, 12)), -1)).astype(dtype)
    if dtype == "float32":
        x = x - x[:, :1]
    q, k, v = random(1, 12, 2, 4)
    heads_second = [x.swapaxes(1, 2).astype(float) for x in (q, k, v)]
    expected = linbias.attention(*heads_second, positions=x).swapaxes(1, 2)
    for implementation in ALL:

        def run(x, implementation=implementation):
            return attention(q, k, v, positions=x, implementation=implementation)

        np.testing.assert_allclose(run(x), expected, atol=1e-6)
        if "64" not in dtype:
            np.testing.assert_allclose(jax.jit(run)(x), expected, atol=1e-6)


def test_a_place_of_numpy_goes_with_one_of_jax():
    q, k, v = random(1, 6, 2, 4)
    x = np.cumsum(np.random.default_rng(0).random((1, 6)), -1).astype(np.float32)
    expected = attention(q, k, v, positions=x)
    for places in ((x, jnp.asarray(x)), (jnp.asarray(x), x), (jnp.asarray(x), jnp.asarray(x))):
        given = dict(zip(PLACES, places, strict=True))
        np.testing.assert_allclose(attention(q, k, v, **given), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("lead", "implementation"), rows("(1,)-cpu", *product(((), (1,), (1, 2)), ALL))
)
def test_positions_of_one_row_serve_all_with_their_gradients(lead, implementation):
    q, k, v = random(3, 6, 2, 4)
    x = np.cumsum(np.random.default_rng(0).random((*lead, 6)), -1).astype(np.float32)
    xq = x + np.float32(1e-3)

    def run(x, xq):
        out = attention(q, k, v, positions=x, query_positions=xq, implementation=implementation)
        return jnp.sin(3 * out).sum()

    loss, gradients = jax.value_and_grad(run, (0, 1))(jnp.asarray(x), jnp.asarray(xq))
    heads = (3, 2, 6) if lead == (1, 2) else (3, 6)
    of_rows = [jnp.broadcast_to(y, heads) for y in (x, xq)]
    expected, of_each = jax.value_and_grad(run, (0, 1))(*of_rows)
    assert loss == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs, y in zip(gradients, of_each, (x, xq), strict=True):
        np.testing.assert_allclose(ours, theirs.sum(0).reshape(y.shape), atol=1e-5)


def test_stamps_that_float32_made_alike_are_warned_of():
    q, k, v = random(1, 3, 2, 4)
    x = 1.7e9 + np.arange(3.0)[None]
    with pytest.warns(UserWarning, match="attention: positions are float32") as found:
        attention(q, k, v, positions=jnp.asarray(x, jnp.float32))
    assert [warning.filename for warning in found] == [__file__]
    attention(q, k, v, positions=x)
    jax.jit(lambda x: attention(q, k, v, positions=x))(jnp.asarray(x, jnp.float32))


@pytest.mark.thorough
def test_gradients_of_dense_by_positions_are_right_to_second_order():
    call = BY_NAME["queries-between"]
    options = {name: x for name, x in call.given.items() if name not in PLACES}
    with jax.enable_x64(True):
        arrays = arguments(call)

        def run(x, xq):
            return attention(
                *arrays, positions=x, query_positions=xq, **options, implementation="dense"
            )

        places = tuple(jnp.asarray(call.given[name]) for name in PLACES)
        check_grads(run, places, order=2, modes=("rev", "fwd"), eps=1e-6, atol=1e-6, rtol=1e-6)


N = 1500
PATTERNS = {
    name: patterns(N)[name]
    for name in ("even", "bursts", "plateaus", "one-place", "unix-times", "gates")
}


@jax.jit
def forward(inputs):
    out, lse, results = blocked._forward(stand_near(inputs)[0])
    return out, lse, results.num_steps


@pytest.mark.thorough
def test_steep_heads_leave_what_is_far_and_others_do_not():
    """Of eight bands: the distance counts, not how many keys lie between."""
    q, k, v = random(1, 2048, 2, 16)
    x = np.arange(2048.0) * np.ones((1, 2, 1))

    def steps(slopes, x, **options):
        given = prepare("test", q, k, v, np.array(slopes), positions=x, **options)[0]
        return forward(given)[2].tolist()

    assert steps([0.5, 0.0], x) == [[2, 0], [8, 0]]
    assert steps([0.5, 0.0], x, tolerance=0.0) == [[8, 0], [8, 0]]
    assert steps([1e-3, 0.5], x * [[[1000], [1e-3]]]) == [[2, 0], [8, 0]]
    # What lies before a jump is hidden from all rows after it; those before it still look back.
    jump = np.where(x >= 2048 - 300, x * 1e-3 + 200.0, x * 1e-3)
    assert steps([0.5, 0.0], jump) == [[7, 0], [8, 0]]
    hidden = {"causal": False, "right_slopes": np.array([np.inf, 0.5])}
    assert steps([0.5, np.inf], x, **hidden) == [[2, 0], [1, 1]]


@pytest.mark.parametrize(("pattern", "sides"), rows("unix-times-1", *product(PATTERNS, (1, 2))))
def test_what_is_left_out_holds_no_more_than_the_tolerance_where_the_bound_is_attained(
    pattern, sides
):
    """All keys alike and along the queries, of one tile: the bound says what is left out."""
    rows, n = 8, len(PATTERNS[pattern])
    q, k = np.full((1, rows, 1, 4), 2.0, np.float32), np.full((1, n, 1, 4), 0.5, np.float32)
    start = n - rows if sides == 1 else n // 2
    options = {"query_start": np.array([start]), "causal": sides == 1, "scale": 1.0}
    options["positions"] = PATTERNS[pattern][None]
    shares = []
    for slope in np.geomspace(1e-3, 1.0, 12):
        for tolerance in (0.3, 0.01):
            inputs, _ = prepare("test", q, k, k, np.array([slope]), tolerance=tolerance, **options)
            wide = (a.swapaxes(1, 2).astype(float) for a in (q, k, k))
            exact = linbias.attention(*wide, [slope], **options, return_lse=True)[1]
            lost = -np.expm1(np.asarray(forward(inputs)[1])[0, :, 0] - exact[0, 0])
            shares.append((lost.max() - 2e-6) / tolerance)
    assert max(shares) <= 1, "more was left out than the tolerance"
    if pattern != "one-place":  # where all keys count alike, a block is too much, or nothing
        assert max(shares) > 0.02, "nothing was left out"


def test_the_scan_bounds_the_sums_of_the_definition_closely():
    inside, run = (np.arange(N) >= 100) & (np.arange(N) < 1300), jax.jit(log_sums)
    for pattern, x in PATTERNS.items():
        parts = np.asarray(in_parts(x[None], None)[0])[:, 0]
        for slope in (0.0, 1e-3, 0.3, 30.0):
            exact = near_to_far.log_sums(parts.astype(float).sum(-1)[0, 100:1300], slope)
            found = run(parts, inside[None], np.full((1, 1), slope, np.float32))[0]
            above = np.asarray(found, float)[100:1300] - exact
            assert 0 <= above.min() and above.max() < 5e-4, (pattern, slope)
            assert (np.asarray(found)[:100] == -np.inf).all()


@pytest.mark.parametrize("implementation", rows("cpu", *((n,) for n in ALL)))
def test_traced_positions_give_what_known_ones_give(implementation):
    """Under jit, vmap and checkpoint, with gradients."""
    call = BY_NAME["queries-between"]
    options = {name: x for name, x in call.given.items() if name not in PLACES}
    options["right_slopes"] = np.asarray(options["right_slopes"], np.float32)
    arrays = arguments(call, np.float32)
    places = [jnp.asarray(call.given[name], jnp.float32) for name in PLACES]

    def loss(x, xq):
        given = dict(zip(PLACES, (x, xq), strict=True))
        return (attention(*arrays, **given, **options, implementation=implementation) ** 2).sum()

    run = jax.value_and_grad(loss, argnums=(0, 1))
    doubled = [2 * x for x in places]
    expected = [run(*places), run(*doubled)]
    pairs = (jnp.stack(pair) for pair in zip(places, doubled, strict=True))
    together = jax.jit(jax.vmap(run))(*pairs)
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1)))(*places)
    assert_close(again, expected[0])
    for i, wanted in enumerate(expected):
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), wanted)


@pytest.mark.parametrize("implementation", rows("dense cpu", *((n,) for n in ALL)))
def test_traced_positions_that_break_the_rule_end_all_the_same(implementation):
    q, k, v = random(1, 700, 1, 4)
    falling = np.random.default_rng(0).normal(size=(1, 700)).astype(np.float32)
    options = {"causal": False, "implementation": implementation}
    run = jax.jit(lambda x, s: attention(q, k, v, positions=x, query_start=s, **options))
    for start in (-1000, 0, 1000):
        assert np.isfinite(run(falling, np.array([start]))).all()


@pytest.mark.thorough
def test_queries_at_places_among_no_keys_have_gradients_of_zero():
    q, k, v = np.ones((1, 3, 2, 4), np.float32), *np.zeros((2, 1, 0, 2, 4), np.float32)
    for name in ALL:
        options = {"positions": np.zeros((1, 0)), "implementation": name}

        def total(xq, options=options):
            return attention(q, k, v, query_positions=xq, **options).sum()

        assert not jax.grad(total)(jnp.ones((1, 3))).any()


def test_with_symbols_for_lengths_dense_runs_and_blocked_says_why_not():
    def run(q, k, x, implementation):
        return attention(q, k, k, positions=x, implementation=implementation)

    T, S = jax.export.symbolic_shape("T, S")
    shapes = (1, T, 2, 4), (1, S, 2, 4), (1, S)
    described = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with pytest.raises(
        NotImplementedError, match=r"blocked cannot run .*, not symbols of jax.export"
    ):
        jax.export.export(jax.jit(run, static_argnums=3))(*described, "blocked")
    exported = jax.export.export(jax.jit(run, static_argnums=3))(*described, "dense")
    q, k, _ = random(1, 9, 2, 4)
    x = np.cumsum(np.random.default_rng(0).random((1, 9)), 1).astype(np.float32)
    found = exported.call(q[:, 4:], k, x)
    np.testing.assert_allclose(found, run(q[:, 4:], k, x, "dense"), atol=1e-6)


@pytest.mark.parametrize("x64", (False, True))
def test_time_stamps_of_numpy_lose_nothing(x64):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 11, 4, 5)).astype(np.float32)
    times = 1_700_000_000_000_000_000 + np.cumsum(rng.integers(1, 5 * 10**9, (2, 11)), 1)
    slopes = np.array([0.5, 0.1, 2.0, 0.0])
    seconds = (times - times[:, :1]) / 1e9
    exact = linbias.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), slopes, positions=seconds)
    with jax.enable_x64(x64):
        for x, unit in ((times, 1e-9), (times.astype("datetime64[ns]"), 1e-9)):
            for options in ({"positions": x}, {"positions": x, "query_positions": x}):
                out = linbias.jax.attention(q, k, v, slopes * unit, **options)
                np.testing.assert_allclose(out.swapaxes(1, 2), exact, atol=1e-6)


@pytest.mark.parametrize("x64", (False, True))
@pytest.mark.parametrize("padding", (2**62, 0, -(2**61)))
def test_positions_of_padding_are_not_counted_from(x64, padding):
    q = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype(np.float32)
    stamps = 17 * 10**17 + np.array([0, 1, 2])
    options = {"key_range": np.array([[1, 3]]), "slopes": np.ones(2, np.float32)}
    with jax.enable_x64(x64):
        want = linbias.jax.attention(q, q, q, positions=np.arange(3.0), **options)
        for given, hidden in ((stamps.copy(), padding), (np.arange(3) + 0.25, 1e15)):
            given[0] = hidden
            out = linbias.jax.attention(q, q, q, positions=given, **options)
            np.testing.assert_allclose(out, want, atol=1e-6)
