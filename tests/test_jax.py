"""`linbias.jax.attention`: every implementation against the contract, and what only JAX has."""

import functools
import os
import subprocess
import sys
from contextlib import contextmanager

# The suite compiles some hundred small programs: the compiler's optimiser would take most of its time.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linbias
import linbias.jax
from budget import assert_within_budget
from cases import CASES, by_name
from contract import SEED, check_case, check_certificate_holds, expected
from linbias import _checks
from linbias._checks import TOLERANCE
from linbias.jax import attention, blocked, cpu, functional
from linbias.jax.operator import Inputs

IMPLEMENTATIONS = ("dense", "blocked", "cpu")
HEADS_SECOND = ("out", "q", "k", "v", "lse")  # arrays that JAX wants [B, T, H, ...]


@contextmanager
def known_dropout():
    """Draw SEED for the dropout mask, so that the mask is known."""
    original = functional.draw_seed
    functional.draw_seed = lambda _: jnp.uint32(SEED)
    yield
    functional.draw_seed = original


class JaxSubject:
    def __init__(self, implementation: str) -> None:
        self.implementation = implementation

    def attention(self, case, tolerance=None):
        def attend(leaves):
            out, lse = attention(
                **leaves,
                causal=case.causal,
                scale=case.scale,
                **case.placement,
                dropout=case.dropout,
                dropout_key=jax.random.key(0),
                tolerance=tolerance,
                implementation=self.implementation,
                return_lse=True,
            )
            return {"out": out, "lse": lse}

        return attend

    @functools.cache  # noqa: B019  # a case runs twice, and compiling is what takes the time
    def program(self, case, tolerance):
        def run(leaves, dout, dlse):
            results, pull = jax.vjp(self.attention(case, tolerance), leaves)
            dlse = jnp.where(results["lse"] > -jnp.inf, dlse, 0)
            return results, pull({"out": dout, "lse": dlse})[0]

        return jax.jit(run)

    def run(self, inputs, case, dtype, *, tolerance=None, layout="plain"):
        assert layout == "plain", "JAX arrays have no strides"
        wide = "float64" if dtype == "float64" else "float32"
        with jax.enable_x64(dtype == "float64"), known_dropout():
            arrays = {
                name: to_jax(name, array, dtype if name in ("q", "k", "v", "dout") else wide)
                for name in ("q", "k", "v", "left", "right", "dout", "dlse")
                if (array := getattr(inputs, name)) is not None
            }
            dout, dlse = (arrays.pop(name) for name in ("dout", "dlse"))
            results, gradients = self.program(case, tolerance)(arrays, dout, dlse)
            assert (results["out"].dtype, results["lse"].dtype) == (dtype, wide)
            assert {n: (g.dtype, g.shape) for n, g in gradients.items()} == {
                n: (x.dtype, x.shape) for n, x in arrays.items()
            }
        return to_numpy(results), to_numpy(gradients)


def to_jax(name, array, dtype):
    return jnp.asarray(array if name in ("left", "right") else array.swapaxes(1, 2), dtype)


def to_numpy(arrays):
    arrays = {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}
    return {n: a.swapaxes(1, 2) if n in HEADS_SECOND else a for n, a in arrays.items()}


# Compiling takes all the time, so each implementation runs the cases that its own code tells apart: the core's door
# passes arrays on, and the core has its own tests; `dense` knows no tiles.
OF_DENSE = {
    "T-above-S", "T-one", "no-queries", "no-keys", "no-batch", "multi-query", "scale", "slopes-mixed", "slopes-extreme",
    "symmetric-T-above-S", "asymmetric-per-batch", "directional", "both-sides-hidden", "hidden-right-of-a-gap",
    "filled-cache", "empty-range", "extreme-logits", "dropout-range-symmetric",
}  # fmt: skip
OF_BLOCKED = {
    "T-above-S", "no-queries", "no-keys", "slopes-mixed", "hidden-right-of-a-gap", "empty-range",
    "dropout-range-symmetric", "long-cache", "long-symmetric", "long-T-above-S", "long-per-batch", "long-range",
    "long-extreme-logits",
}  # fmt: skip
CHOSEN = [
    (implementation, case)
    for implementation, names in (
        ("dense", OF_DENSE),
        ("blocked", OF_BLOCKED),
        ("cpu", {case.name for case in CASES}),
    )
    for case in CASES
    if case.name in names
]
NARROW = [
    ("dense", "symmetric", "bfloat16"),
    ("blocked", "range-symmetric", "float64"),
    ("blocked", "range-symmetric", "bfloat16"),
    *(
        ("cpu", name, dtype)
        for name in ("symmetric", "dropout", "filled-cache")
        for dtype in ("float64", "bfloat16", "float16")
    ),
]

needs_core = pytest.mark.skipif(
    cpu.why_not(_checks.Problem(1, 1, 1, 1, 1, 1, 1, "float32", "cpu", True, 1.0, 0.0))
    is not None,
    reason="linbias._xla is not compiled here",
)


def test_every_chosen_case_exists():
    assert len(CHOSEN) == len(OF_DENSE) + len(OF_BLOCKED) + len(CASES)


@pytest.mark.parametrize(("implementation", "case"), CHOSEN, ids=str)
def test_contract_in_float32(implementation, case):
    check_case(JaxSubject(implementation), case, "float32")


@pytest.mark.parametrize(("implementation", "name", "dtype"), NARROW)
def test_contract_in_other_dtypes(implementation, name, dtype):
    check_case(JaxSubject(implementation), by_name(name), dtype)


@pytest.mark.parametrize("name", ("far-key-aligned-symmetric",))
def test_dropped_mass_is_at_most_the_tolerance(name):
    check_certificate_holds(JaxSubject("blocked"), by_name(name), 1e-2)


def test_the_certificate_leaves_most_of_a_long_sequence():
    """A steep head visits few bands, a head without slope all of them, and tolerance 0 leaves nothing out."""
    q, k, v = (jnp.asarray(x) for x in random(1, 2048, 2, 16))
    call = Arguments(q, k, v, jnp.array([[0.5, 0.0]]), None, None, None, None, None)
    for tolerance, bands in ((2.0**-24, [2, 8]), (0.0, [8, 8])):
        kept = jax.jit(
            lambda call, t=tolerance: blocked._forward(call, Numbers(0.25, 0.0, t), True)[2]
        )(call)
        assert kept.visited[:, 0].tolist() == bands


@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
def test_decoding_from_a_long_cache(implementation, bounded):
    case = by_name("long-cache", T=1, key_range=((0, 1500), (700, 2053)))
    inputs, truth, plains = expected(case, "float32")
    arrays = {n: to_jax(n, getattr(inputs, n), "float32") for n in "qkv"}
    bound = jnp.linalg.norm(arrays["k"], axis=-1).max(1) * 1.001 if bounded else None
    out, lse = attention(
        **arrays, left=inputs.left, key_range=np.array(case.key_range), key_bound=bound, return_lse=True, implementation=implementation
    )  # fmt: skip
    for name, actual in to_numpy({"out": out, "lse": lse}).items():
        plain = [p[0][name] for p in plains]
        assert_within_budget(name, actual, truth[0][name], plain, "float32", TOLERANCE["float32"])


def random(B, T, H, D, seed=0):
    return np.random.default_rng(seed).normal(size=(3, B, T, H, D)).astype(np.float32)


def numpy_attention(q, k, v, *args, **options):
    out = linbias.attention(
        *(np.asarray(x, float).swapaxes(1, 2) for x in (q, k, v)), *args, **options
    )
    return out.swapaxes(1, 2)


@pytest.mark.parametrize("where", ("q", "k", "v"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_that_are_not_finite_show_in_every_row_that_sees_them(implementation, where):
    arrays = dict(zip("qkv", random(1, 600, 2, 8), strict=True))
    arrays[where][0, 3, 1, 2] = np.nan
    out = np.asarray(attention(**arrays, left=[0.5, 0.5], implementation=implementation))
    assert np.isfinite(out[:, :, 0]).all()
    bad = ~np.isfinite(out[0, :, 1]).all(-1)
    if where == "q":
        assert np.flatnonzero(bad).tolist() == [3]
    else:
        assert bad[3:].all()
    if where == "k":
        assert not bad[:3].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_outside_the_key_range_may_hold_anything(implementation):
    q, k, v = random(2, 11, 2, 8)
    options = {
        "causal": False,
        "key_range": np.array([[3, 8], [1, 11]]),
        "implementation": implementation,
    }
    run = jax.jit(jax.value_and_grad(lambda *a: attention(*a, **options).sum(), argnums=(0, 1, 2)))
    clean = run(q, k, v)
    for x, value in ((k, np.nan), (v, np.inf)):
        x[0, :3], x[0, 8:], x[1, :1] = value, value, value
    for before, after in zip(*map(jax.tree.leaves, (clean, run(q, k, v))), strict=True):
        np.testing.assert_array_equal(before, after)


SIZES = (2, 9, 4, 8)


@pytest.mark.parametrize(("implementation", "seed"), [("blocked", 1), ("cpu", None), ("cpu", 1)])
def test_vmap_equals_one_call_after_the_other(implementation, seed):
    """Also of gradients, over some arguments only, and with a dropout mask for each call."""
    q, k, v = random(*SIZES)
    qs, slopes = (
        np.stack([q, q + 1, q - 1]),
        np.linspace(0.1, 1, 12, dtype=np.float32).reshape(3, 4),
    )
    keys = jax.random.split(jax.random.key(0), 3)

    def loss(q, slope, key):
        options = {} if seed is None else {"dropout": 0.5, "dropout_key": key}
        return (attention(q, k, v, slope, implementation=implementation, **options) ** 2).sum()

    run = jax.value_and_grad(loss, argnums=(0, 1))
    together = jax.jit(jax.vmap(run))(qs, slopes, keys)
    alone = [jax.jit(run)(*x) for x in zip(qs, slopes, keys, strict=True)]
    for a, b in zip(
        *map(jax.tree.leaves, (together, jax.tree.map(lambda *x: np.stack(x), *alone))),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


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


def test_without_the_door_to_the_core_the_reason_is_stated(monkeypatch):
    monkeypatch.setattr(cpu, "_xla", None)
    monkeypatch.setattr(cpu, "_REASON", "the core's door to JAX cannot be imported", raising=False)
    q = random(*SIZES)[0]
    with pytest.raises(
        NotImplementedError, match="cpu cannot run this call: the core's door to JAX"
    ):
        attention(q, q, q, implementation="cpu")
    assert attention(q, q, q).shape == q.shape


@needs_core
def test_too_large_a_call_is_an_error_and_no_crash(monkeypatch):
    """The core is told of 2^44 keys that it has to make room for before it reads any."""
    q = jax.ShapeDtypeStruct((1, 8, 1, 4), np.float32)
    k = jax.ShapeDtypeStruct((1, 2**44, 1, 4), np.float32)
    program = jax.jit(functools.partial(attention, implementation="cpu"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        program.lower(q, k, k).compile()(*(jnp.zeros(x.shape) for x in (q, k, k)))


SHARDED = """
import numpy as np, jax, jax.numpy as jnp, linbias, linbias.jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
q, k, v = np.random.default_rng(0).normal(size=(3, 2, 300, 4, 8)).astype(np.float32)
left = jnp.asarray(linbias.slopes(4), jnp.float32)
for name in ("blocked", "cpu"):
    def loss(q, k, v, left):
        return (linbias.jax.attention(q, k, v, left, causal=False, implementation=name) ** 2).sum((1, 3))
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
        found = jax.jit(jax.grad(lambda *a: parts(*a).sum(), argnums=(0, 1, 2, 3)))(*args)
        for a, b in zip(found, want):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
split = jax.device_put(q, NamedSharding(mesh, P("x")))
try:
    linbias.jax.attention(split, split, split, implementation="cpu")
except NotImplementedError as error:
    print(error)
out = linbias.jax.attention(split, split, split)
np.testing.assert_allclose(out, linbias.jax.attention(q, q, q), atol=1e-5)
"""


@needs_core
def test_shard_map_over_batch_and_heads_and_a_word_on_sharded_arrays():
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "cpu cannot run this call: the arrays lie in parts on 2 cpu devices; call it inside jax.shard_map"
        in done.stdout
    )


def call(q=(2, 5, 4, 8), k=(2, 7, 2, 8), v=(2, 7, 2, 3), left=None, **options):
    """Call with arrays of these shapes, or with what stands in a shape's place."""
    q, k, v = (np.ones(x, np.float32) if isinstance(x, tuple) else x for x in (q, k, v))
    return attention(q, k, v, left, **options)


MESSAGES = [
    (dict(q=(5, 4, 8)), ValueError, r"attention: q must have 4 axes, batch, length, heads, size, got \[5, 4, 8\]"),
    (dict(q=[[1.0]]), TypeError, "attention: q must be a jax.Array or numpy.ndarray, got list"),
    (dict(v=np.ones((2, 7, 2, 3), int)), TypeError, "v must be one of .*, got int64"),
    (dict(v=np.ones((2, 7, 2, 3))), TypeError, "v must be at most float32 while jax_enable_x64 is off, got float64"),
    (dict(k=jnp.ones((2, 7, 2, 8), jnp.bfloat16)), TypeError, "k is bfloat16 but q is float32"),
    (dict(k=(8, 7, 2, 8)), ValueError, r"k has batch 8 but q has 2 \(k \[8, 7, 2, 8\], q \[2, 5, 4, 8\]\)"),
    (dict(k=(2, 7, 4, 8)), ValueError, "k has 4 heads but v has 2"),
    (dict(v=(2, 6, 2, 3)), ValueError, "k has 7 keys but v has 6"),
    (dict(k=(2, 7, 3, 8), v=(2, 7, 3, 3)), ValueError, "q has 4 heads, which is no multiple of the 3"),
    (dict(right=[1.0] * 4), ValueError, "right contradicts causal=True"),
    (dict(left=[1.0] * 3), ValueError, r"left must have shape \[H\] = \[4\] or \[B, H\] = \[2, 4\], got \[3\]"),
    (dict(left=[1.0, -0.5, 1, 1]), ValueError, r"left must be at least 0 \(or inf\), got -0.5"),
    (dict(left=jnp.array([1.0, 1, 1, jnp.nan])), ValueError, r"left must be at least 0 \(or inf\), got nan"),
    (dict(key_range=[[0, 1]]), TypeError, "key_range must be a jax.Array or numpy.ndarray, got list"),
    (dict(key_range=np.ones((2, 2))), TypeError, "key_range must hold integers, got float64"),
    (dict(key_range=jnp.array([[0, 7], [5, 8]])), ValueError, r"0 <= first <= end <= S = 7, got \[5, 8\] in batch row 1"),
    (dict(key_bound=np.ones((2, 3))), ValueError, r"key_bound must be floating point \[B, G\] = \[2, 2\]"),
    (dict(dropout=0.5), ValueError, r"dropout needs a dropout_key, got None \(dropout 0.5\)"),
    (dict(causal=1.0), TypeError, "causal must be True or False, got float"),
    (dict(implementation="fast"), ValueError, r"implementation must be one of \('auto', 'cpu', 'blocked', 'dense'\), got 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), MESSAGES)
def test_attention_says_what_is_wrong(arguments, kind, words):
    with pytest.raises(kind, match=words):
        call(**arguments)


@pytest.mark.parametrize("name", ("scale", "dropout", "tolerance", "causal"))
def test_traced_values_where_numbers_are_needed_are_refused(name):
    words = "causal must be True or False" if name == "causal" else f"{name} must be a number"
    with pytest.raises(TypeError, match=f"attention: {words}, got .*Trace"):
        jax.jit(lambda x: call(**{name: x}))(0.5)


def test_traced_slopes_are_taken_as_they_are():
    negative = jax.jit(lambda left: call(left=left))(jnp.array([-1.0, 1, 1, 1]))
    assert negative.shape == (2, 5, 4, 3)
