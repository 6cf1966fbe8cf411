"""The compiled core: targets, the NumPy front end, threads, strides, and life without it."""

import ast
import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import linbias
from cases import by_name, far_block, make_inputs
from contract import check_case, rows
from forks import a_child_gives_the_same
from linbias import cpu
from linbias.kernels import core
from linbias.torch import addresses, attention
from linbias.torch.call import prepare
from linbias.torch.impl import cpu as torch_cpu
from linbias.torch.operators import operator
from test_torch import DTYPES, TorchSubject
from truth import true_attention

pytestmark = pytest.mark.skipif(core.target() is None, reason="the core is not compiled here")


CONTRACT = {  # what `make test` runs; in the other dtypes the long ones are for `make check`
    "symmetric": DTYPES,
    "asymmetric-per-batch": DTYPES,
    "long-range": (),
    "long-symmetric": ("float32",),
    "long-directional": (),
    "long-past-the-keys": ("float64", "bfloat16"),
    "range-per-head-symmetric": DTYPES,
    "dropout": DTYPES,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    rows(lambda name, dtype: dtype in CONTRACT[name], *product(CONTRACT, DTYPES)),
)
@pytest.mark.parametrize("target", core.targets())
def test_every_target_keeps_the_contract(target, name, dtype, forced_target):
    forced_target(target)
    assert core.target() == target
    check_case(TorchSubject("cpu"), by_name(name), dtype)


@pytest.mark.parametrize(
    "sizes", ((1, 1), (15, 16), (17, 31), (64, 65), (128, 129), (129, 127), (256, 255))
)
@pytest.mark.parametrize("target", core.targets())
def test_head_sizes_around_the_vector_width(target, sizes, forced_target):
    forced_target(target)
    check_case(TorchSubject("cpu"), by_name("T-below-S", D=sizes[0], E=sizes[1]), "float32")


SMALL_KEYS = {"float32": (1e-13, 1e-19), "bfloat16": (1e-13, 1e-19), "float64": (1e-81, 1e-170)}


@pytest.mark.parametrize("dtype", SMALL_KEYS)
@pytest.mark.parametrize("target", core.targets())
def test_far_keys_count_although_squares_of_entries_vanish(target, dtype, forced_target):
    forced_target(target)
    for size in SMALL_KEYS[dtype]:
        arrays, slope, scale = far_block(1 / size, size)
        q, k, v = (torch.tensor(x).to(getattr(torch, dtype))[None] for x in arrays)
        for num_rows in (70, 1):
            given = q[:, :, -num_rows:], k, v
            options = {"slopes": np.array([slope]), "scale": scale}
            expected, actual = (
                attention(*(x.to(wide) for x in given), **options, implementation=implementation)
                for implementation, wide in (("dense", torch.float64), ("cpu", q.dtype))
            )
            error = (actual.double() - expected).abs().max()
            assert error < (1e-2 if dtype == "bfloat16" else 1e-5), (size, num_rows)


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"force_target: name must be one of \[.*\], got 'sse9'"):
        core.force_target("sse9")


def arrays(name="asymmetric", **changes):
    inputs = make_inputs(by_name(name, **changes), "float32")
    return [x.astype(np.float32) for x in (inputs.q, inputs.k, inputs.v)]


@pytest.mark.parametrize(
    ("kinds", "expected_dtype", "allowed"),
    [
        ("float16 float16 float16", "float16", 2e-3),
        ("float32 float32 float32", "float32", 2e-6),
        ("float64 float64 float64", "float64", 1e-14),
        ("int64 int64 int64", "float64", 1e-14),
        ("float32 int64 float16", "float32", 1e-6),
        ("float16 float32 float16", "float16", 2e-3),
        ("bfloat16 bfloat16 bfloat16", "bfloat16", 2e-2),
    ],
)
def test_numpy_arrays_of_any_type_come_through(kinds, expected_dtype, allowed):
    if "bfloat16" in kinds:
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    numbers = [rng.integers(-2, 3, size=(2, 4, n, 3)) for n in (5, 7, 7)]
    given = [x.astype(kind) for x, kind in zip(numbers, kinds.split(), strict=True)]
    options = {"causal": False, "right_slopes": [0.1] * 4, "return_lse": True}
    out, lse = cpu.attention(*given, **options)
    expected, expected_lse = linbias.attention(*numbers, **options)
    assert out.dtype == expected_dtype
    np.testing.assert_allclose(out.astype(float), expected, atol=allowed)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6 if allowed > 1e-13 else 1e-13)


PLACED_NAMES = """filled-cache right-padding gaps-asymmetric range-per-head
range-per-head-symmetric start-symmetric hidden-left-past-the-keys slopes-per-batch
long-range-per-head long-cache-per-head no-queries no-keys no-batch window-per-batch scattered
scattered-few-queries long-window-range"""


@pytest.mark.parametrize("name", PLACED_NAMES.split())
def test_numpy_arrays_stand_where_they_are_placed(name):
    case = by_name(name)
    inputs = make_inputs(case)
    sides = {"right_slopes": inputs.right, "causal": case.causal}
    given = inputs.q, inputs.k, inputs.v, inputs.left
    out, lse = cpu.attention(*given, **sides, **case.placement, return_lse=True)
    truth, _ = true_attention(inputs, case)
    np.testing.assert_allclose(out, truth["out"], atol=1e-12)
    np.testing.assert_allclose(lse, truth["lse"], rtol=1e-13, atol=1e-12)


def test_batch_axes_may_be_none_or_several():
    q, k, v = arrays("range-per-head", B=6, key_range=None)
    left = np.linspace(0.1, 1, 36, dtype=np.float32).reshape(6, 6)
    starts = np.arange(6) * 3 - 5
    ranges = np.array([[[i, 6 + i], [0, 11], [2, 3]] for i in range(6)], np.int32)
    placed = {"key_range": ranges, "query_start": starts}
    expected, lse = cpu.attention(q, k, v, left, **placed, return_lse=True)
    q2, k2, v2, ranges2, starts2 = (
        x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v, ranges, starts)
    )
    placed2 = {"key_range": ranges2, "query_start": starts2}
    out, lse2 = cpu.attention(q2, k2, v2, left, **placed2, return_lse=True)
    np.testing.assert_array_equal(out, expected.reshape(out.shape))
    np.testing.assert_array_equal(lse2, lse.reshape(lse2.shape))
    for b in range(6):
        alone = cpu.attention(
            q[b], k[b], v[b], left[b], key_range=ranges[b], query_start=int(starts[b])
        )
        np.testing.assert_array_equal(alone, expected[b])
    one_for_all = cpu.attention(q[0], k[0], v[0], left[0], key_range=[2, 9])
    in_a_batch = cpu.attention(q[:1], k[:1], v[:1], left[0], key_range=[[2, 9]])
    np.testing.assert_array_equal(one_for_all, in_a_batch[0])


ONES = np.ones((1, 2, 3, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        # The rules of `linbias.attention`, each of which has a row in test_errors.py.
        ({"right_slopes": [1.0] * 2}, "right_slopes contradicts causal=True"),
        ({"slopes": [1.0, -1.0]}, r"slopes must be at least 0 \(or inf\), got -1"),
        ({"key_range": [[0, 5]]}, r"0 <= first <= end <= S = 3, got \[0, 5\] in batch row 0"),
    ],
)
def test_the_numpy_front_end_says_what_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        cpu.attention(ONES, ONES, ONES, **options)


def test_any_strides_are_read_rightly():
    q, k, v = arrays()
    expected = cpu.attention(q, k, v)
    rounded = np.concatenate([v, np.full_like(v, np.nan)], axis=-1)
    odd = np.frombuffer(b"x" + v.tobytes(), np.uint8)[1:].view(np.uint8)
    misaligned = np.ndarray(v.shape, v.dtype, odd.data)
    for q2, k2, v2 in (
        [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)],
        (q[..., ::-1][..., ::-1], k, v),
        (q[:, :, ::-1], k[:, :, ::-1], v[:, :, ::-1]),  # negative
        (np.asfortranarray(q), k.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), v),
        (q, k, rounded[..., : v.shape[-1]]),
        (q, k, misaligned),
    ):
        out = cpu.attention(q2, k2, v2)
        if q2.strides[2] < 0:
            reference = linbias.attention(*(x.astype(float) for x in (q2, k2, v2)))
            np.testing.assert_allclose(out, reference, atol=2e-6)
        else:
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("axis", range(4))
def test_an_axis_may_be_one_entry_seen_many_times(axis):
    q, k, v = (np.broadcast_to(x.take([0], axis), x.shape) for x in arrays())
    expected = cpu.attention(*(np.array(x, order="C") for x in (q, k, v)))
    np.testing.assert_array_equal(cpu.attention(q, k, v), expected)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_entries_of_a_row_may_lie_apart(size):
    q = torch.randn(1, 2, size, 9).mT
    assert q.stride(3) == 9
    found = attention(q, q, q, implementation="cpu")
    assert torch.equal(found, attention(*[q.contiguous()] * 3, implementation="cpu"))


@pytest.mark.parametrize("name", ("key_range", "query_start", "query_range"))
def test_integers_of_32_bits_are_no_memory_of_64(name):
    """Whoever calls the operator itself has no `prepare` before it that widens them."""
    value = {"key_range": [[1, 7], [0, 6]], "query_start": [2, 1], "query_range": [[1, 5]] * 5}
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 7, 4)
    given = {name: torch.tensor(value[name])}
    inputs, _ = prepare("attention", q, k, k, None, **given)
    narrow = inputs._replace(**{name: getattr(inputs, name).int()})
    assert torch.equal(
        torch_cpu.attention(narrow, False)[0], torch_cpu.attention(inputs, False)[0]
    )


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    leaves = [torch.randn(1, n, 300, 24, requires_grad=True) for n in (4, 2, 2)]
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = linbias.torch.attention(*leaves, implementation="cpu")
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_no_more_threads_than_cores_share_a_call(monkeypatch):
    calls = []

    def call(**fields):
        calls.append((fields["num_threads"], fields["team"]))
        return build(**fields)

    build = core.Call
    monkeypatch.setattr(core, "Call", call)
    monkeypatch.setattr(core, "_WORK_PER_AWAKE_THREAD", 1)
    monkeypatch.setattr(core, "_WORK_PER_THREAD", 1)
    monkeypatch.setattr(addresses, "_NUM_CORES", 2)
    q = torch.ones(1, 4, 64, 8)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            attention(q, q, q, implementation="cpu")
    finally:
        torch.set_num_threads(before)
    assert calls == [(1, addresses.TEAM), (2, addresses.TEAM), (2, 0)]


@pytest.mark.parametrize(
    ("T", "S", "awake", "asleep"),
    [
        (1, 32, 1, 1),
        (1, 64, 2, 1),  # one token of a small cache
        (1, 4096, 2, 2),
        (16, 8192, 2, 2),  # a piece of a long text
        (16, 16, 1, 1),
        (96, 96, 2, 1),
        (1024, 1024, 2, 2),
    ],
)
def test_threads_are_as_many_as_the_work_is_worth(T, S, awake, asleep):
    sizes = (1, 8, 8, T, S, 64, 64)
    assert core.num_threads(sizes, 2, awake=True) == awake
    assert core.num_threads(sizes, 2) == asleep


def test_several_python_threads_may_call_at_once():
    q, k, v = arrays("long")
    expected = cpu.attention(q, k, v, num_threads=2)
    results = [None] * 4

    def call(index):
        for _ in range(5):
            results[index] = cpu.attention(q, k, v, num_threads=2)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, where a test has loaded it
def test_a_fork_after_threads_can_call_on(monkeypatch):
    # PyTorch's own threads, and ours: a child has neither.
    monkeypatch.setattr(core, "_WORK_PER_AWAKE_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    q, k, v = map(torch.from_numpy, arrays("long"))

    def run():
        yield linbias.torch.attention(q, k, v, implementation="cpu")
        alone = cpu.attention(*(x.numpy() for x in (q, k, v)), num_threads=2)
        yield torch.from_numpy(alone)

    assert addresses.TEAM or not torch.backends.openmp.is_available()
    assert a_child_gives_the_same(run)
    torch.set_num_threads(before)


def test_too_large_a_call_is_a_memory_error_and_no_crash():
    q = torch.ones(1, 1, 8, 4)
    k = torch.ones(4).expand(1, 1, 2**44, 4)
    with pytest.raises(MemoryError, match="no memory for the packed keys and values"):
        linbias.torch.attention(q, k, k, implementation="cpu")


def test_what_it_cannot_run_is_said_and_passed_over():
    q = torch.ones(1, 1, 3, 257)
    words = "cpu cannot run this call: head sizes go up to 256, got 257"
    for arrays in ((q, q, q), (q[..., :4], q[..., :4], q)):
        with pytest.raises(NotImplementedError, match=words):
            attention(*arrays, implementation="cpu")
    with pytest.raises(NotImplementedError, match="head sizes go up to 256"):
        cpu.attention(*[q.numpy()] * 3)
    assert attention(q, q, q).shape == q.shape


def test_without_the_compiled_core_the_reason_is_stated(monkeypatch):
    monkeypatch.setattr(core, "WHY_MISSING", "the compiled core cannot be imported")
    q = torch.ones(1, 1, 3, 4)
    with pytest.raises(NotImplementedError, match="the compiled core cannot be imported"):
        attention(q, q, q, implementation="cpu")
    assert linbias.torch.attention(q, q, q).shape == q.shape
    assert core.target() is None


def test_the_stub_says_what_the_compiled_module_has(tmp_path):
    """`src/linbias/_cpu.pyi` is `python -m nanobind.stubgen -m linbias._cpu`, formatted."""
    pytest.importorskip("nanobind")
    written = tmp_path / "_cpu.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "linbias._cpu", "-o", written],
        check=True,
    )
    stub = Path(cpu.__file__).with_name("_cpu.pyi")
    found, expected = (ast.dump(ast.parse(path.read_text()), indent=1) for path in (stub, written))
    assert found == expected, "write it anew, and ruff format"


@pytest.mark.parametrize("precise", [False, True])
def test_bfloat16_is_written_at_once_where_nothing_will_be_differentiated(precise):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 16).to(torch.bfloat16).requires_grad_()
    slopes = torch.tensor([0.5, 0.1])
    inputs = operator.Inputs(
        q=q, k=k, v=v, left=slopes, scale=0.25, tolerance=1e-4, precise=precise
    )
    out, *_ = torch_cpu.operators.forward(*inputs)
    assert out.dtype == (torch.float32 if precise else torch.bfloat16)
    expected = linbias.torch.attention(q, k, v, slopes, scale=0.25, implementation="dense")
    torch.testing.assert_close(out.to(torch.bfloat16), expected, atol=2e-2, rtol=2e-2)
    # Backward of what was not to be differentiated works all the same, and loses digits.
    (actual,) = torch.autograd.grad(out.float().sum(), q)
    (gradient,) = torch.autograd.grad(expected.float().sum(), q)
    torch.testing.assert_close(actual, gradient, atol=3e-2, rtol=3e-2)


class Told(TorchDispatchMode):
    """What the core is told of gradients."""

    def __init__(self):
        super().__init__()
        self.precise = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() == "linbias::cpu_forward":
            self.precise.append(args[operator.Inputs._fields.index("precise")])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("leaf", ("q", "k", "v", "slopes"))
def test_the_core_is_told_whether_gradients_will_follow(leaf):
    arrays = {name: torch.ones(1, 1, 3, 4) for name in "qkv"} | {"slopes": torch.ones(1)}
    arrays[leaf].requires_grad_()
    with Told() as told:
        linbias.torch.attention(**arrays, implementation="cpu")
        with torch.no_grad():
            linbias.torch.attention(**arrays, implementation="cpu")
    assert told.precise == [True, False]
