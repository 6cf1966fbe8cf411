"""`linbias.jax` under jit, vmap, grad, checkpoint and shard_map, with traced positions."""

import os
import subprocess
import sys
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contract import rows
from jax_subject import IMPLEMENTATIONS, SIZES, assert_close, needs_core, random
from linbias.jax import attention


@pytest.mark.parametrize(
    ("implementation", "seed"), rows("cpu-1", ("blocked", 1), ("cpu", None), ("cpu", 1))
)
def test_vmap_equals_one_call_after_the_other(implementation, seed):
    """Also of gradients, over some arguments only, and with a dropout mask for each call."""
    q, k, v = random(*SIZES)
    qs = np.stack([q, q + 1, q - 1])
    slopes = np.linspace(0.1, 1, 12, dtype=np.float32).reshape(3, 4)
    keys = jax.random.split(jax.random.key(0), 3)

    def loss(q, slope, key):
        options = {} if seed is None else {"dropout": 0.5, "dropout_key": key}
        return (attention(q, k, v, slope, implementation=implementation, **options) ** 2).sum()

    run = jax.value_and_grad(loss, argnums=(0, 1))
    together = jax.jit(jax.vmap(run))(qs, slopes, keys)
    alone = [jax.jit(run)(*x) for x in zip(qs, slopes, keys, strict=True)]
    assert_close(together, jax.tree.map(lambda *x: np.stack(x), *alone), 1e-5)


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
@pytest.mark.parametrize("sizes", ((1, 1, 1, 3), (1, 4, 1, 3)))
def test_jacobians_of_one_of_each_axis_and_of_broadcast_arrays(implementation, sizes):
    q, k, v = random(*sizes)
    k = jnp.broadcast_to(k[:, :, :, :1], k.shape)

    def jacobian(name):
        return jax.jacrev(lambda q: attention(q, k, v, [0.5], implementation=name))(q)

    assert_close(jacobian(implementation), jacobian("dense"), 1e-5)


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
def test_checkpoint_and_an_outer_jit_change_nothing(implementation):
    q, k, v = random(*SIZES)

    def loss(q):
        return (attention(q, k, v, implementation=implementation) ** 2).sum()

    np.testing.assert_allclose(
        jax.jit(jax.grad(jax.checkpoint(loss)))(q), jax.grad(loss)(q), rtol=1e-5, atol=1e-6
    )


def test_second_derivatives_come_from_dense_and_are_refused_elsewhere():
    q, k, v = random(1, 5, 2, 4)

    def slope(q, implementation):
        inner = jax.grad(lambda q: (attention(q, k, v, implementation=implementation) ** 2).sum())
        return (inner(q) ** 2).sum()

    assert np.isfinite(jax.grad(slope)(q, "dense")).all()
    for name in ("blocked", "cpu"):
        with pytest.raises(
            NotImplementedError, match=f"attention: {name} gives first derivatives only"
        ):
            jax.grad(slope)(q, name)


def jvp(f, x):
    return jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


FORWARD_MODES = {
    "jvp": jvp,
    "jacfwd": lambda f, x: jax.jacfwd(f)(x).sum(),
    "jvp of jit": lambda f, x: jvp(jax.jit(f), x),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jvp(f, x))(x),
    "jvp of vmap": lambda f, x: jvp(lambda x: jax.vmap(f)(x[None]).sum(), x),
}


@pytest.mark.parametrize(
    ("how", "argument"),
    rows(  # of q or of slopes
        lambda how, argument: argument == (0 if how in ("jvp", "jacfwd", "jit of jvp") else 3),
        *product(FORWARD_MODES, range(4)),
    ),
)
def test_forward_mode_comes_from_dense_and_is_refused_elsewhere(how, argument):
    given = [*map(jnp.asarray, random(1, 5, 2, 4)), jnp.array([0.5, 0.1])]

    def loss(x, implementation):
        out = attention(
            *given[:argument], x, *given[argument + 1 :], implementation=implementation
        )
        return (out**2).sum()

    def along_ones(implementation):
        return FORWARD_MODES[how](lambda x: loss(x, implementation), given[argument])

    expected = jax.grad(loss)(given[argument], "dense").sum()
    np.testing.assert_allclose(along_ones("dense"), expected, rtol=1e-4, atol=1e-5)
    for name in ("blocked", "cpu"):
        words = f"attention: {name} has no forward-mode derivative; implementation='dense' has it"
        if "jit" in how:  # the compiler finds out, when the call is over
            words = "can't apply forward-mode"
        with pytest.raises((NotImplementedError, TypeError), match=words):
            along_ones(name)


def on_two_devices(code: str) -> str:
    """What a program prints that JAX runs on two CPU devices; a warning is an error."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGINNING + code],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_shard_that_is_the_whole_knows_its_slopes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    run = jax.shard_map(lambda q: attention(q, q, q), mesh=mesh, in_specs=spec, out_specs=spec)
    q = random(*SIZES)[0]
    np.testing.assert_allclose(run(q), attention(q, q, q), atol=1e-5)


def test_a_call_without_heads_is_answered():
    for heads in ((0, 0), (0, 1)):
        q, k = (np.zeros((1, 3, n, 4), np.float32) for n in heads)
        for name in IMPLEMENTATIONS:
            assert attention(q, k, k, implementation=name).shape == (1, 3, 0, 4)


BEGINNING = """
import numpy as np, jax, jax.numpy as jnp, linbias
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from linbias.jax import attention, attention_weights
q, k, v = given = np.random.default_rng(0).normal(size=(3, 2, 300, 4, 8)).astype(np.float32)
def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
"""
SHARDED = """
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
left = jnp.asarray(linbias.slopes(4), jnp.float32)
for name in ("blocked", "cpu"):
    def loss(q, k, v, left):
        out = attention(q, k, v, left, causal=False, implementation=name)
        return (out ** 2).sum((1, 3))
    def total(*arrays):
        return loss(*arrays).sum()
    expected = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(q, k, v, left)
    # over heads, over the batch, and over the heads of q with one k and v for all
    for spec, kv, slope, out, one in (
        (P(None, None, "x"), P(None, None, "x"), P("x"), P(None, "x"), False),
        (P("x"), P("x"), P(), P("x"), False),
        (P(None, None, "x"), P(), P("x"), P(None, "x"), True),
    )[2 if name == "blocked" else 0:]:
        args = (q, k[:, :, :1], v[:, :, :1], left) if one else (q, k, v, left)
        parts = jax.shard_map(loss, mesh=mesh, in_specs=(spec, kv, kv, slope), out_specs=out)
        want = jax.grad(total, argnums=(0, 1, 2, 3))(*args) if one else expected
        close(jax.jit(jax.grad(lambda *a: parts(*a).sum(), argnums=(0, 1, 2, 3)))(*args), want)
# ranges of their own for key/value heads, and starts for batch rows
ranges = [[0, 300], [10, 200], [0, 5], [7, 290]], [[3, 3], [0, 300], [1, 90], [0, 80]]
start = np.array([17, -40])
rows = np.sort(np.random.default_rng(1).integers(0, 301, (2, 300, 2)), -1)
def loss(q, k, v, left, key_range, start, rows):
    placed = {"key_range": key_range, "query_start": start, "query_range": rows}
    placed["window"] = 200, 9
    out = attention(q, k, v, left, causal=False, **placed, implementation="blocked")
    return (out ** 2).sum((1, 3))
args = q, k, v, left, np.array(ranges), start, rows
for spec, slope, start_spec in ((P(None, None, "x"), P("x"), P()), (P("x"), P(), P("x"))):
    ranges = P(*(a for i, a in enumerate((*spec, None, None)[:3]) if i != 1))
    specs = (spec, spec, spec, slope, ranges, start_spec, start_spec)
    parts = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=ranges)
    gradients = (jax.grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2, 3)) for f in (parts, loss))
    close(*(jax.jit(of)(*args) for of in gradients))
split = jax.device_put(q, NamedSharding(mesh, P("x")))
try:
    attention(split, split, split, implementation="cpu")
except NotImplementedError as error:
    print(error)
close(attention(split, split, split), attention(q, q, q))
"""


@pytest.mark.processes
@needs_core
def test_shard_map_over_batch_and_heads_and_a_word_on_sharded_arrays():
    words = "cpu cannot run this call: the arrays lie in parts on 2 cpu devices; call it inside"
    assert words in on_two_devices(SHARDED)


EXPLICIT = """
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
key_range = np.array([[3, 300], [0, 41]])
rows = np.sort(np.random.default_rng(1).integers(0, 301, (2, 300, 2)), -1).astype(np.int32)
for spec in (P("x"), P(None, None, "x"), P(None, "x"), P(None, None, None, "x"), P()):
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in given]
    for name in ("auto", "blocked", "dense"):
        def loss(q, k, v):
            options = {"key_range": key_range, "return_lse": True, "implementation": name}
            out, lse = attention(q, k, v, causal=False, **options)
            return (out**2).sum() + lse.sum(), out
        run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        want = run(*given)
        with jax.set_mesh(mesh):
            both = run(*split), jax.jit(run)(*split)
        for found in both:
            close(found, want)
            assert tuple(found[0][1].sharding.spec)[:3] == (*spec, None, None, None)[:3]
        close(attention(*split, implementation=name), attention(*given))  # outside of the mesh
    close(attention_weights(*split[:2]), attention_weights(*given[:2]))
# a range for each query, split as these are
def loss(rows, q, k, v):
    limits = {"query_range": rows, "window": (200, 9), "key_range": key_range}
    out = attention(q, k, v, causal=False, **limits, implementation="blocked")
    return (out**2).sum(), out
run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True))
want = run(rows, *given)
for spec in (P("x"), P(None, "x")):
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (rows, *given)]
    with jax.set_mesh(mesh):
        found = run(*split)
    close(found, want)
    assert tuple(found[0][1].sharding.spec)[:2] == (*spec, None)[:2]
heads = P(None, None, "x")
run = jax.shard_map(lambda q: attention(q, q, q), mesh=mesh, in_specs=heads, out_specs=heads)
try:
    run(jax.device_put(given[0], NamedSharding(mesh, heads)))
except ValueError as error:
    print(error)
"""


@pytest.mark.processes
@needs_core
def test_explicit_mesh_axes_and_a_shard_that_does_not_know_its_slopes():
    printed = on_two_devices(EXPLICIT)
    assert "attention: slopes must be given inside shard_map, here over 'x'" in printed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("implementation", "limited"),
    [*product(("blocked", "dense"), ("key_range", "query_range"))],
)
def test_lengths_may_be_symbols_in_an_exported_program(implementation, limited):
    options = {"causal": False, "implementation": implementation, "return_lse": True}
    if limited == "query_range":
        options["window"] = 200, 7

    def loss(q, k, v, ranges):
        out, lse = attention(q, k, v, **options, **{limited: ranges})
        return (out**2).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum(), out

    def shapes(B, T, S):
        ranges = (B, 2) if limited == "key_range" else (B, T, 2)
        return (B, T, 2, 8), (B, S, 1, 8), (B, S, 1, 5), ranges

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    symbols = shapes(*jax.export.symbolic_shape("B, T, S"))
    dtypes = (*[jnp.float32] * 3, jnp.int32)
    described = [jax.ShapeDtypeStruct(*both) for both in zip(symbols, dtypes, strict=True)]
    exported = jax.export.export(run)(*described)
    for B, T, S in ((1, 5, 5), (2, 300, 700), (2, 300, 20)):
        rng, (*arrays, ranges) = np.random.default_rng(0), shapes(B, T, S)
        given = [rng.normal(size=shape).astype(np.float32) for shape in arrays]
        ranges = np.sort(rng.integers(0, S + 1, ranges), -1).astype(np.int32)
        assert_close(exported.call(*given, ranges), run(*given, ranges))


def weighed(q, k, v, left, key_range, query_start, implementation, **options):
    """A number that depends on all of out and lse, for gradients."""
    options |= {"key_range": key_range, "query_start": query_start, "causal": False}
    out, lse = attention(q, k, v, left, **options, implementation=implementation, return_lse=True)
    return (out**2).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum()


RANGES = np.array([[[0, 9], [2, 7]], [[4, 4], [0, 3]], [[5, 9], [0, 9]]])
RANGES = np.stack([RANGES, RANGES[:, ::-1], RANGES, RANGES], 2)  # [3, B, G, 2]
STARTS = np.array([[0, -30], [12, 3], [5, 4]])
PLACED_SLOPES = np.array([0.5, 0.1, 0.0, np.inf], np.float32)
run = jax.value_and_grad(weighed, argnums=(0, 1, 2, 3))


@cache
def with_known_positions():
    given = [*random(*SIZES), PLACED_SLOPES]
    return [run(*given, *placed, "dense") for placed in zip(RANGES, STARTS, strict=True)]


@pytest.mark.parametrize("implementation", rows("cpu", *((n,) for n in IMPLEMENTATIONS)))
def test_traced_positions_give_what_known_ones_give(implementation):
    """Under jit, with gradients, and over several ranges and starts by vmap."""
    q, k, v = random(*SIZES)
    left, ranges, starts = PLACED_SLOPES, RANGES, STARTS
    traced = jax.jit(run, static_argnums=6)
    alone = [traced(q, k, v, left, *x, implementation) for x in zip(ranges, starts, strict=True)]
    over = jax.vmap(lambda r, s: run(q, k, v, left, r, s, implementation))
    together = jax.jit(over)(ranges, starts)
    for i, expected in enumerate(with_known_positions()):
        assert_close(alone[i], expected)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_traced_positions_that_nobody_may_ask_for_are_moved_to_the_limits(implementation):
    """They are not checked; the loops must end all the same."""
    q, k, v = random(*SIZES)
    left = jnp.array([0.5, 0.1, 0.0, 2.0])
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    traced = jax.jit(run, static_argnums=6)
    for asked, taken in (
        ((least, most, 0), (0, 9, 0)),
        ((-5, 4, most), (0, 4, 2**30)),
        ((3, 99, least), (3, 9, -(2**30))),
        ((8, 2, 1), (2, 2, 1)),
        ((most, least, least), (0, 0, -(2**30))),
    ):
        found, expected = (
            traced(
                q,
                k,
                v,
                left,
                np.int32([[first, end], [0, 9]]),
                np.int32([start, 0]),
                implementation,
            )
            for first, end, start in (asked, taken)
        )
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert np.isfinite(a).all()


@pytest.mark.parametrize("started", (False, True))
def test_narrow_and_unsigned_integers_place_queries_as_wide_ones_do(started):
    q, k, v = random(1, 300, 1, 4)
    given = {"key_range": [[1, 100]], "query_range": [[0, 90]] * 300}
    given |= {"query_start": [7]} if started else {}
    expected = attention(q, k, v, **{name: np.array(x) for name, x in given.items()})
    for dtype, library in product((np.int8, np.uint8, np.uint32), (np, jnp)):
        options = {name: library.array(x, dtype) for name, x in given.items()}
        np.testing.assert_array_equal(attention(q, k, v, **options), expected)


NOTHING_SEEN = {"key_range": np.array([[4, 4], [0, 9]]), "query_start": np.array([-3, 5])}
ONE_WAY = np.array([np.inf, np.inf, 0.1, 0.0], np.float32), np.array([0.5, np.inf, np.inf, 0.0])
STRICTLY = {
    "rows-without-keys": NOTHING_SEEN,
    "hidden-sides": {"causal": False, "slopes": ONE_WAY[0], "right_slopes": ONE_WAY[1],
                     "window": (2, 1), "key_bound": np.full((2, 4), 9, np.float32)},
    "positions": {"positions": np.arange(9.0) ** 2, "query_positions": np.arange(9.0) ** 2,
                  "causal": False, "query_start": np.zeros(2, int)},
    "dropout": {"dropout": 0.5, "dropout_key": jax.random.key(0)},
    "mask": {"mask": np.tri(9, k=-1, dtype=bool)},
    "added": {"mask": np.where(np.tri(9, k=-1), 0.5, -np.inf)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", STRICTLY)
def test_what_jax_is_strict_about_stops_no_call_of_ours(name, implementation, dtype):
    """Ranks and dtypes that differ, infinite scores; also in what is kept for backward."""
    if implementation not in {"mask": ("blocked", "dense"), "added": ("dense",)}.get(
        name, IMPLEMENTATIONS
    ):
        pytest.skip("it takes no such mask")
    arrays = [jnp.asarray(x, dtype) for x in random(2, 9, 4, 8)]
    options = STRICTLY[name] | {"implementation": implementation}

    def loss(q, k, v):
        return (attention(q, k, v, **options).astype(jnp.float32) ** 2).sum()

    run = jax.value_and_grad(loss, argnums=(0, 1, 2))
    jitted = jax.value_and_grad(jax.jit(loss), argnums=(0, 1, 2))
    expected = run(*arrays)
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.debug_infs(True),
        jax.debug_nans(True),
    ):
        found = run(*arrays), jitted(*arrays)
    for each in found:
        assert_close(each, expected, 1e-5)
        assert [x.dtype for x in each[1]] == [x.dtype for x in arrays]


@pytest.mark.parametrize("name", ("scale", "dropout", "tolerance", "causal"))
def test_traced_values_where_numbers_are_needed_are_refused(name):
    words = "causal must be True or False" if name == "causal" else f"{name} must be a number"
    with pytest.raises(TypeError, match=f"attention: {words}, got .*Trace"):
        jax.jit(lambda x: attention(*random(*SIZES), **{name: x}))(0.5)


def test_traced_slopes_are_taken_as_they_are():
    q, k, v = random(*SIZES)
    negative = jax.jit(lambda left: attention(q, k, v, left))(jnp.array([-1.0, 1, 1, 1]))
    assert negative.shape == SIZES
