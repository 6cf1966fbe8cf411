"""One sequence over four devices gives what one gives, and sends no more than the heads need.

JAX has to know the number of its devices before it starts: the checks on four run in one process,
this file as a program. `jax.vmap` with a named axis stands in for devices where nothing is sent.
"""

import builtins
import json
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import linbias
import linbias.jax
from budget import compare
from linbias import _request
from linbias.jax.context_parallel import attention, needed_halo
from linbias.jax.impl import cpu

NUM_SHARDS, T = 4, 16
INF = np.inf
HAS_CORE = cpu.WHY_MISSING is None


@dataclass(frozen=True)
class Case:
    """A sequence of NUM_SHARDS * T tokens. halo None: what is measured."""

    slopes: tuple[float, ...]
    right: tuple[float, ...] | None = None
    causal: bool = True
    num_kv_heads: int = 2
    halo: int | tuple[int, ...] | None = None
    dtype: str = "float32"
    implementation: str = "cpu"
    check_vma: bool = True
    window: tuple[int, int] | None = None

    @property
    def options(self):
        return {"causal": self.causal, "window": self.window}

    def arrays(self, seed=0):
        """q, k, v, the slopes, and what out and lse are weighed with, in float64."""
        random = np.random.default_rng(seed)
        H, G, S = len(self.slopes), self.num_kv_heads, NUM_SHARDS * T
        shapes = {"q": (H, 8), "k": (G, 8), "v": (G, 6), "dout": (H, 6), "dlse": (H,)}
        found = {name: random.normal(size=(2, S, *shape)) for name, shape in shapes.items()}
        found |= {"slopes": np.array(self.slopes)}
        if self.right is not None:
            found["right_slopes"] = np.array(self.right)
        narrow = ("q", "k", "v", "dout")
        dtypes = {name: self.dtype if name in narrow else "float32" for name in found}
        return {name: np.asarray(jnp.asarray(x, dtypes[name])) for name, x in found.items()}


LEFT = (2.0, 0.5, 1.5, 0.6)
CASES = {
    "causal": Case(LEFT),
    "symmetric": Case(LEFT, causal=False, check_vma=False),
    "directional": Case((2.0, 0.7, INF, INF), (INF, INF, 2.0, 0.7), causal=False),
    "asymmetric": Case(LEFT, (0.9, 3.0, 0.6, 1.0), causal=False),
    "hops": Case((3.0, 2.0, 0.6, 0.1), num_kv_heads=4, halo=(13, 18, 46, 48)),
    "slopes of 0 and inf": Case((0.0, INF, 0.5, INF), num_kv_heads=4),
    "one key/value head": Case(LEFT, (1.0,) * 4, causal=False, num_kv_heads=1, halo=47),
    "bfloat16": Case(LEFT, dtype="bfloat16"),
    "blocked": Case(LEFT, (INF, 1.0, 1.0, 1.0), causal=False, implementation="blocked"),
    "dense": Case(LEFT, implementation="dense"),
    "a window beyond the next shard": Case(
        (0.0, 0.1, 1.5, 0.6), causal=False, window=(21, 5), implementation="blocked"
    ),
    "a causal window": Case((0.0,) * 4, window=(9, 0), halo=48, implementation="dense"),
}


def on_one_device(case, arrays, implementation, x64=False):
    """Results and gradients of the whole sequence, or in float64."""
    with jax.enable_x64(x64):
        wide = {name: jnp.asarray(x, "float64" if x64 else x.dtype) for name, x in arrays.items()}
        attend = partial(linbias.jax.attention, implementation=implementation, return_lse=True)
        return with_gradients(case, attend, wide)


def with_gradients(case, attend, arrays):
    leaves = {name: x for name, x in arrays.items() if name not in ("dout", "dlse")}

    @jax.jit
    def run(leaves, dout, dlse):
        (out, lse), pull = jax.vjp(lambda x: attend(**x, **case.options), leaves)
        return {"out": out, "lse": lse} | {f"d{n}": x for n, x in pull((dout, dlse))[0].items()}

    results = run(leaves, arrays["dout"], arrays["dlse"])
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


# The bodies of the tests on four devices.


def the_mesh():
    return jax.make_mesh((NUM_SHARDS,), ("x",), axis_types=(AxisType.Auto,))


SHARDS = P(None, "x")


def in_shards(function, arrays, out_specs=SHARDS, check_vma=True):
    """A function of whole arrays that runs on their shards."""
    specs = {name: P() if "slopes" in name else SHARDS for name in arrays}

    def run(**arrays):
        options = {"mesh": the_mesh(), "out_specs": out_specs, "check_vma": check_vma}
        in_specs = ({name: specs[name] for name in arrays},)
        return jax.shard_map(lambda given: function(**given), in_specs=in_specs, **options)(arrays)

    return run


def measured_halo(case, arrays, **options):
    given = {name: arrays[name] for name in ("q", "k", "slopes", "right_slopes") if name in arrays}
    measure = partial(needed_halo, axis_name="x", **case.options, **options)
    found = jax.jit(in_shards(measure, given, P()))(**given)
    assert (found.dtype, found.shape) == (np.int32, (case.num_kv_heads,))
    return np.asarray(found)


def on_four_devices(case, arrays, halo):
    name = case.implementation if HAS_CORE or case.implementation != "cpu" else "blocked"
    attend = partial(attention, axis_name="x", halo=halo, implementation=name, return_lse=True)

    def run(causal, window, **leaves):
        function = partial(attend, causal=causal, window=window)
        return in_shards(function, leaves, (SHARDS, SHARDS), case.check_vma)(**leaves)

    return with_gradients(case, run, arrays)


@cache
def references(name):
    case, arrays = CASES[name], CASES[name].arrays()
    plain = on_one_device(case, arrays, "dense")
    return arrays, on_one_device(case, arrays, "dense", x64=True), plain


def worst_share(name, results):
    """The largest error of results and gradients over the budget, and in words."""
    case, (_, truth, plain) = CASES[name], references(name)
    assert results.keys() == truth.keys()
    shares = {}
    for part, actual in results.items():
        dtype = case.dtype if part in ("out", "dq", "dk", "dv") else "float32"
        tolerance = _request.TOLERANCE[case.dtype]
        share, words = compare(actual, truth[part], [plain[part]], dtype, tolerance)
        shares[part] = share, f"{name}: {part}: {words}"
    return max(shares.values())


def check_case(name):
    case, arrays = CASES[name], references(name)[0]
    halo = measured_halo(case, arrays) if case.halo is None else case.halo
    share, words = worst_share(name, on_four_devices(case, arrays, halo))
    print(f"{name}: halo {halo}, {share:.2f} of the budget", file=sys.stderr)
    assert share <= 1, words


def check_a_halo_that_is_too_small_shows():
    for name in ("causal", "symmetric"):
        case, arrays = CASES[name], references(name)[0]
        needed = measured_halo(case, arrays)
        assert (needed > 3).all()
        for halo in (np.array([needed[0], 3]), np.array([3, needed[1]])):
            share, _ = worst_share(name, on_four_devices(case, arrays, halo))
            assert share > 100, f"{name} with a halo of {halo}: {share} of the budget"


def check_messages_hold_what_heads_need_and_no_more():
    case = Case(LEFT, num_kv_heads=4)
    arrays = {name: x for name, x in case.arrays().items() if name in "qkv"}
    one_sided = (0.5, 0.5, INF, INF)
    for halo, slopes, right, window in (
        ((5, 40, 0, 16), LEFT, None, (-1, -1)),
        ((5, 40, 100, 5), LEFT, LEFT, (-1, -1)),
        # Of 48 that a ring would send to each side, for half of the heads.
        (21, one_sided, one_sided[::-1], (-1, -1)),
        (0, LEFT, None, (-1, -1)),
        ((5, 40, 100, 5), LEFT, LEFT, (17, 3)),
    ):
        options = {"slopes": slopes, "right_slopes": right, "causal": right is None}
        attend = partial(attention, axis_name="x", halo=halo, window=window, **options)
        forward = in_shards(attend, arrays)

        def both_ways(arrays, forward=forward):
            return jax.grad(lambda x: forward(**x).astype(jnp.float32).sum())(arrays)

        rows = sum(
            (np.minimum(halo, limit if limit >= 0 else 48) * np.isfinite(side)).sum()
            for side, limit in zip((slopes, right), window, strict=True)
            if side is not None
        )
        assert numbers_sent(lambda x, forward=forward: forward(**x), arrays) == 2 * 14 * rows
        assert numbers_sent(both_ways, arrays) == 2 * 2 * 14 * rows
    # Two query heads share a key/value head: it is read while one of them looks that way.
    pairs = {"q": arrays["q"]} | {name: arrays[name][:, :, :2] for name in "kv"}
    one = partial(attention, axis_name="x", halo=9, slopes=(0.5, INF, INF, INF))
    forward = in_shards(one, pairs)
    assert numbers_sent(lambda x: forward(**x), pairs) == 2 * 14 * 9
    half = {name: x.astype("bfloat16") for name, x in arrays.items()}
    run = jax.jit(in_shards(partial(attention, axis_name="x", halo=7), half))
    assert "xbf16>) -> tensor<2x28x14xbf16>" in run.lower(**half).as_text()


def numbers_sent(function, arrays):
    """What each device sends in the compiled program, counted from the shapes of its messages."""
    text = jax.jit(function).lower(arrays).compile().as_text()
    shapes = re.findall(r"= \(?f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", text)
    assert len(shapes) == len(re.findall(r" collective-permute(?:-start)?\(", text))
    return sum(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


def check_an_axis_of_two_names_and_sharded_arrays():
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    names = ("a", "b")
    q = np.random.default_rng(0).normal(size=(1, 64, 4, 8)).astype(np.float32)
    split = jax.device_put(q, NamedSharding(mesh, P(None, names)))
    attend = partial(attention, axis_name=names, halo=48)
    run = jax.shard_map(attend, mesh=mesh, in_specs=P(None, names), out_specs=P(None, names))
    expected = linbias.jax.attention(q, q, q)
    np.testing.assert_allclose(run(split, split, split), expected, atol=1e-5)
    one = partial(attention, axis_name="a", halo=1)  # the heads may be split over the other axis
    with pytest.raises(ValueError, match="slopes must be given inside shard_map, here over 'b'"):
        jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P(None, "a"))(q, q, q)


def check_the_page_runs_on_four_devices():
    from documents import ROOT, blocks

    names, (imports, *others) = {}, blocks(ROOT / "docs/jax.md", "python")
    (found,) = (block for block in others if "context_parallel" in block)
    exec(imports, names)
    exec(found, names)
    assert names["mesh"].size == NUM_SHARDS and (names["halo"] < 3 * 128).any()


CHECKS = {name: partial(check_case, name) for name in CASES} | {
    name.removeprefix("check_").replace("_", " "): function
    for name, function in sorted(globals().items())
    if name.startswith("check_") and name != "check_case"
}


@pytest.fixture(scope="module")
def found():
    """What each check on four devices ended with: nothing, or a traceback."""
    flags = os.environ["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={NUM_SHARDS}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize("check", CHECKS)
def test_on_four_devices(check, found):
    assert found[check] == ""


def by_vmap(function, *shards, out_axes=0):
    """A function of shards [NUM_SHARDS, B, T, ...], with an axis in the place of devices."""
    return jax.vmap(function, axis_name="x", out_axes=out_axes)(*shards)


def cut(x, length=T):
    """[B, S, ...] -> [shards, B, length, ...]."""
    return np.stack(np.split(x, x.shape[1] // length if length else NUM_SHARDS, axis=1))


def smallest_halo(q, k, slopes, right, share, length=T):
    """[G]: the smallest halo beyond which no query has more than this share."""
    q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k))
    sides = {"causal": True} if right is None else {"causal": False, "right_slopes": right}
    weights = linbias.attention_weights(q, k, slopes, **sides)
    keys, row = np.arange(q.shape[2]), np.arange(q.shape[2])[:, None]
    edge = row // length * length
    beyond = np.maximum(edge - keys, keys - (edge + length - 1))  # 1 for the key beside the edge
    left_out = [(weights * (beyond > halo)).sum(-1).max((0, 2)) for halo in range(len(keys))]
    of_groups = np.reshape(left_out, (len(keys), k.shape[1], -1)).max(2)
    return (of_groups > share).sum(0)  # it falls with the halo, down to 0


def measure(q, k, slopes, right, length=T, **options):
    sides = {"causal": True} if right is None else {"causal": False, "right_slopes": right}
    function = partial(needed_halo, axis_name="x", slopes=slopes, **sides, **options)
    return np.asarray(by_vmap(function, cut(q, length), cut(k, length), out_axes=None))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tolerance", "right"), list(product((2.0**-24, 0.01), (None, (0.8, 3.0, 1.0, 2.0))))
)
def test_what_a_measured_halo_leaves_out_is_within_the_tolerance(right, tolerance):
    slopes = (2.0, 0.8, 1.5, 0.6)
    for seed in range(3):
        arrays = Case(slopes).arrays(seed)
        for size in (0.1, 1.0, 2.0):
            q, k = arrays["q"] * np.float32(size), arrays["k"] + np.float32(seed)
            needed = measure(q, k, slopes, right, tolerance=tolerance)
            assert (needed >= smallest_halo(q, k, slopes, right, tolerance / 2)).all()


def along_one_axis(scores):
    """q and k of two heads [1, S, 2, 4] whose scores depend on the key alone, at scale 1."""
    q, k = np.zeros((2, 1, len(scores), 2, 4), np.float32)
    q[..., 0], k[..., 0] = 1, np.asarray(scores)[:, None]
    return q, k


@pytest.mark.parametrize(
    ("scores", "slope", "sides", "length", "tolerance"),
    [
        (np.ones(64), 1.0, 2, T, 2.0**-10),
        pytest.param(np.ones(64), 0.7, 1, T, 2.0**-10, marks=pytest.mark.thorough),
        # A far key that scores most, of which only its own device knows.
        (np.where(np.arange(64) == T - 9, 8, 0), 1.0, 1, T, 0.01),
        # The mean key lies at 0; the first shard scores most, and the second least of all: the far
        # tail is all that counts.
        (np.repeat([3, -3, 0, 0], T), 0.3, 1, T, 0.2),
        # Pieces of one token: its row loses as much on the one side as on the other.
        pytest.param(np.ones(16), 4.0, 2, 1, 1e-3, marks=pytest.mark.thorough),
    ],
)
def test_a_measured_halo_is_tight_where_keys_lie_as_the_bound_assumes(
    scores, slope, sides, length, tolerance
):
    (q, k), slopes = along_one_axis(scores), (slope, slope)
    right = slopes if sides == 2 else None
    smallest = smallest_halo(q * 2, k, slopes, right, tolerance / 2, length)  # its scale is 1 / 2
    needed = measure(q, k, slopes, right, length, tolerance=tolerance, scale=1.0)
    assert (smallest > 1).all()
    assert (needed >= smallest).all() and (needed <= smallest + 4).all()


@pytest.mark.thorough
def test_heads_that_need_all_keys_or_none():
    arrays, everything = Case((1.0,) * 4).arrays(), (NUM_SHARDS - 1) * T
    q, k = arrays["q"], np.concatenate([arrays["k"]] * 2, axis=2)
    assert measure(q, k, (0.0, INF, 20.0, 1e-9), None).tolist() == [everything, 0, 1, everything]
    assert measure(q, k, (3.0, INF, 2.0, INF), None, tolerance=0.0).tolist() == [everything, 0] * 2
    k = k.copy()
    k[1, 40, 0, 3], k[0, 2, 2, 0] = np.nan, np.inf
    needed = measure(q, k, (9.0, 9.0, 9.0, INF), None)
    assert needed[[0, 2, 3]].tolist() == [everything, everything, 0] and needed[1] < everything


def test_a_window_needs_no_larger_halo_than_it_shows():
    """And a smaller one, where the slope hides more; a key that is not finite is not seen."""
    arrays = Case((1.0,) * 4).arrays()
    q, k = arrays["q"], np.concatenate([arrays["k"]] * 2, axis=2)
    k[0, 2, 3, 0] = np.nan
    for right, window, wanted in (
        (None, (11, 0), [11, 0, 2, 11]),
        ((0.0,) * 4, (11, 20), [20, 20, 20, 20]),
        ((20.0,) * 4, (5, 20), [5, 2, 2, 20]),
        (None, (2**40, 0), [48, 0, 2, 48]),
    ):
        needed = measure(q, k, (0.0, INF, 20.0, 1e-9), right, window=window)
        assert (needed <= wanted).all() and (needed[[0, 3]] == np.array(wanted)[[0, 3]]).all()


def test_a_halo_of_nothing_and_shards_without_rows():
    empty = np.zeros((NUM_SHARDS, 1, 0, 2, 4), np.float32)
    assert by_vmap(partial(attention, axis_name="x", halo=3), *[empty] * 3).shape == empty.shape
    assert measure(empty[0], empty[0], None, None, length=0).tolist() == [0, 0]
    q = np.random.default_rng(0).normal(size=(NUM_SHARDS, 1, T, 2, 4)).astype(np.float32)
    out = by_vmap(partial(attention, axis_name="x", halo=0), q, q, q)
    np.testing.assert_allclose(out[1], linbias.jax.attention(q[1], q[1], q[1]), atol=1e-6)


ONES = np.ones((NUM_SHARDS, 1, T, 2, 4), np.float32)
SHORTER = ONES[:, :, 1:]
WHOLE = "a sequence in shards has all its keys"
REFUSED = [
    ({"halo": -1}, "ValueError attention: halo must be at least 0, got -1"),
    (
        {"halo": [1, 2, 3]},
        "ValueError attention: halo must be an integer, or one for each of the 2",
    ),
    ({"halo": 2.5}, "TypeError attention: halo must hold integers, got float64"),
    ({"halo": True}, "TypeError attention: halo must hold integers, got bool"),
    ({"axis_name": "y"}, "ValueError attention: axis_name must be an axis of the jax.shard_map"),
    ({"axis_name": 0}, "TypeError attention: axis_name must be a string or a tuple of strings"),
    ({"mask": None}, f"TypeError attention: there is no argument mask; {WHOLE} and no dropout"),
    ({"query_range": None}, f"TypeError attention: there is no argument query_range; {WHOLE}"),
    ({"window": 7}, "TypeError attention: window must be .left, right., .*; got 7"),
    ({"is_causal": True}, "TypeError attention: there is no argument is_causal; say causal"),
    ({"k": SHORTER, "v": SHORTER}, "ValueError attention: k must be as long as q, .* got 15 keys"),
    ({"v": SHORTER}, "ValueError attention: k has 16 keys but v has 15"),
    ({"halo": "traced"}, "TypeError attention: halo must be known when the program is traced"),
]
REFUSED_TO_MEASURE = [
    ({"axis_name": "y"}, "ValueError needed_halo: axis_name must be an axis"),
    ({"halo": 1}, "TypeError needed_halo: there is no argument halo; there are q, k"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED + REFUSED_TO_MEASURE)
def test_what_is_refused_is_said(options, words):
    kind, _, words = words.partition(" ")
    arrays = [options.get(name, ONES) for name in "qkv"]
    options = {"axis_name": "x"} | {n: x for n, x in options.items() if n not in "qkv"}
    function = needed_halo if words.startswith("needed_halo") else attention
    if function is attention:
        options = {"halo": 1} | options

    def run(number):
        given = {n: number if x == "traced" else x for n, x in options.items()}
        used = arrays if function is attention else arrays[:2]
        return by_vmap(partial(function, **given), *used)

    with pytest.raises(getattr(builtins, kind), match=f"^context_parallel.{words}"):
        jax.jit(run)(1) if "traced" in options.values() else run(1)


if __name__ == "__main__":
    results = {}
    for check, body in CHECKS.items():
        try:
            body()
        except Exception:
            results[check] = traceback.format_exc()
        else:
            results[check] = ""
    print(json.dumps(results))
