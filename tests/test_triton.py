"""The Triton kernels: in Triton's interpreter where there is no GPU, on small tiles; compiled on the device where there is one."""

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import linbias.torch
from budget import assert_within_budget
from cases import CASES, Case, by_name, short
from contract import check_case, expected
from interpreter import repaired
from linbias._checks import TOLERANCE, Described, check
from linbias.kernels.triton import forward, sizes
from linbias.kernels.triton.sizes import Sizes, Tile
from linbias.models import LinbiasConfig, LinbiasForCausalLM
from linbias.torch import triton
from test_torch import TorchSubject

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here: see the gpu tests"
)
# The interpreter computes with NumPy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LITTLE = Sizes(Tile(32, 16, 4, 2), Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2))


@pytest.fixture
def little_tiles(monkeypatch):
    """Tiles small enough that short cases have several, with uneven ends, in an interpreter that knows bfloat16 and bounds."""
    monkeypatch.setattr(triton, "INTERPRETED", ("float16", "bfloat16", "float32"))
    monkeypatch.setattr(forward, "FEWEST_BLOCKS", 2)
    with sizes.forced(LITTLE), repaired():
        yield


def little(case: Case, H: int = 2, G: int = 1) -> Case:
    """The case with fewer heads: the interpreter takes some 50 ms for each."""
    if case.left == "mixed" or "per_batch" in (case.left, case.right):
        return replace(case, B=min(case.B, 2 if case.left == "per_batch" else 1))
    return replace(case, H=min(case.H, H), G=min(case.G, G))


SHORT = [case for case in short() if case.S < 100]
LONG = (
    Case("long", B=1, T=65, S=131),
    Case("long-symmetric", B=1, T=40, S=90, causal=False),
    Case("long-asymmetric", B=1, T=40, S=130, causal=False, right="halved"),
    Case("long-range", T=35, S=120, key_range=((50, 119), (5, 120))),
    Case("long-range-symmetric", T=35, S=120, key_range=((50, 119), (5, 67)), causal=False),
    Case("far-key-aligned", B=1, T=35, S=120, keys="far_aligned", causal=False),
    Case("keys-off-center", B=1, T=35, S=120, keys="off_center", dropout=0.2),
    Case("long-extreme-logits", B=1, T=33, S=97, logits=100.0),
)


@interpreted
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_contract_in_float32(case, little_tiles, poisoned_memory):
    check_case(TorchSubject("triton"), little(case), "float32")


@interpreted
@pytest.mark.parametrize("case", [c for c in SHORT if c.name != "slopes-extreme"], ids=str)
def test_contract_in_bfloat16(case, little_tiles, poisoned_memory):
    check_case(TorchSubject("triton"), little(case), "bfloat16")


@interpreted
@pytest.mark.parametrize("name", ("T-below-S", "asymmetric", "range-symmetric", "dropout"))
def test_contract_in_float16(name, little_tiles, poisoned_memory):
    check_case(TorchSubject("triton"), little(by_name(name)), "float16")


@interpreted
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("case", LONG, ids=str)
def test_contract_where_keys_are_left_out(case, dtype, little_tiles, poisoned_memory):
    check_case(TorchSubject("triton"), replace(case, H=1, G=1, left="steep"), dtype)


def drawn(seed: int) -> tuple[Case, Sizes]:
    """A case and tile sizes at random."""
    rng = np.random.default_rng(seed)
    G, group, T, S = (int(rng.integers(1, n)) for n in (3, 3, 40, 70))
    keys, rows = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    dkv = Tile(16, int(rng.choice([16, 32])), 4, 1)
    ranges = [sorted(int(n) for n in rng.integers(0, S + 1, 2)) for _ in "ab"]
    case = Case(
        f"drawn-{seed}",
        H=G * group,
        G=G,
        T=T,
        S=S,
        D=int(rng.integers(1, 33)),
        E=int(rng.integers(1, 33)),
        causal=bool(causal := rng.random() < 0.6),
        left=str(rng.choice(["paper", "steep", "zero", "mixed"])),
        right=None if causal or rng.random() < 0.5 else str(rng.choice(["halved", "mixed"])),
        keys=str(rng.choice(["normal", "off_center", "far_aligned"])),
        key_range=tuple(map(tuple, ranges)) if rng.random() < 0.4 else None,
        dropout=0.25 if rng.random() < 0.3 else 0.0,
    )
    tiles = Sizes(Tile(rows, keys, 4, 1), Tile(16, 16, 4, 1), dkv, Tile(16, 16, 4, 1))
    return case, tiles


@interpreted
@pytest.mark.parametrize("seed", range(18))
def test_drawn_cases_are_right_to_a_few_roundings(seed, little_tiles, poisoned_memory):
    """A wrong key or row shows; the budget, which knows no large scores and nothing rounded on the way, is for named cases."""
    case, tiles = drawn(seed)
    dtype, allowed = (("float32", 2.0**-16), ("bfloat16", 2.0**-5), ("float16", 2.0**-8))[seed % 3]
    inputs, truth, _ = expected(case, dtype)
    with sizes.forced(tiles):
        actual = TorchSubject("triton").run(inputs, case, dtype)
    for true_arrays, arrays in zip(truth, actual, strict=True):
        for name, array in arrays.items():
            seen = np.isfinite(true_arrays[name])
            assert np.array_equal(seen, np.isfinite(array)), name
            error = np.abs(array - true_arrays[name])[seen].max(initial=0)
            assert error <= allowed * np.abs(true_arrays[name][seen]).max(initial=1), name


DECODING = (
    Case("one", T=1, S=197),
    Case("group", B=1, T=2, S=197, H=4, G=2, D=64, E=32),
    Case("both-sides", B=1, T=4, S=133, causal=False, right="halved"),
    Case("range", T=3, S=197, key_range=((0, 150), (70, 197))),
    Case("empty-range", T=1, S=53, key_range=((5, 7), (3, 3))),
)


@interpreted
@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "bfloat16") for case in DECODING),
        (DECODING[1], "float32"),
        (DECODING[3], "float16"),
    ],
    ids=str,
)
def test_decoding_from_a_cache(case, dtype, bounded, little_tiles):
    case = case if case.H == 4 else little(case)
    inputs, truth, plains = expected(case, dtype)
    arrays = {n: torch.tensor(getattr(inputs, n), dtype=getattr(torch, dtype)) for n in "qkv"}
    out, lse = linbias.torch.attention(
        **arrays,
        left=inputs.left,
        right=inputs.right,
        causal=case.causal,
        key_range=torch.tensor(case.key_range) if case.key_range else None,
        key_bound=arrays["k"].float().norm(dim=-1).amax(-1) * 1.001 if bounded else None,
        implementation="triton",
        return_lse=True,
    )
    for name, result, narrow in (("out", out, dtype), ("lse", lse, "float32")):
        plain = [p[0][name] for p in plains]
        actual = result.double().numpy()
        assert_within_budget(name, actual, truth[0][name], plain, narrow, TOLERANCE[dtype])


@interpreted
def test_a_key_bound_spares_reading_far_keys(little_tiles):
    """Far keys that nobody may read are NaN here."""
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 512, 16), torch.randn(1, 2, 512, 16)
    bound = k.norm(dim=-1).amax(-1)
    expected_out = linbias.torch.attention(q, k, v, [0.5, 1.0])
    k[:, :, :256], v[:, :, :256] = torch.nan, torch.nan
    out = linbias.torch.attention(q, k, v, [0.5, 1.0], key_bound=bound, implementation="triton")
    torch.testing.assert_close(out, expected_out)


def visited_blocks(left, tolerance=2.0**-24, S=160):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, len(left), S, 16)
    arguments = (q, k, v, torch.tensor(left), None, None, None, None, 0.25, 0.0, tolerance, True)
    return triton.forward(*arguments)[3][0, :, : S // 32, 0]


@interpreted
def test_the_certificate_leaves_far_keys_of_steep_heads_only(little_tiles):
    steep, flat = visited_blocks([2.0, 0.0])
    assert steep.max() <= 2
    assert flat.tolist() == list(range(0, 10, 2))


@interpreted
@pytest.mark.parametrize(("scale", "key", "query"), [(1e24, 1e-23, 1.0), (1e6, 2e-23, 4e18)])
def test_keys_whose_squares_underflow_are_not_forgotten(scale, key, query, little_tiles):
    q, k, v = (
        torch.full((1, 1, 160, 16), query),
        torch.zeros(1, 1, 160, 16),
        torch.zeros(1, 1, 160, 4),
    )
    k[:, :, 0], v[:, :, 0] = key, 1.0
    ours, truth = (
        linbias.torch.attention(q, k, v, [1.0], scale=scale, implementation=name)
        for name in ("triton", "dense")
    )
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


@interpreted
def test_tolerance_zero_visits_every_key(little_tiles):
    assert visited_blocks([9.0], tolerance=0.0)[0].tolist() == list(range(0, 10, 2))


@interpreted
def test_a_slope_that_is_nan_gives_nan_and_ends(little_tiles):
    visited = visited_blocks([float("nan")])
    assert visited[0].tolist() == list(range(0, 10, 2))


@interpreted
@pytest.mark.parametrize("tolerance", (1e-2, 1e-4))
@pytest.mark.parametrize("keys", ("normal", "far_aligned"))
def test_dropped_mass_is_at_most_the_tolerance(keys, tolerance, little_tiles):
    case = Case("mass", B=1, H=2, G=2, T=40, S=160, causal=False, left="steep", keys=keys)
    inputs, truth, _ = expected(case, "float32")
    lse = TorchSubject("triton").forward(inputs, case, "float32", tolerance)[0]["lse"]
    loss = -torch.expm1(lse.detach().double() - torch.from_numpy(truth[0]["lse"]))
    assert loss.max() <= tolerance + 1e-5
    assert loss.min() >= -1e-5


@interpreted
@pytest.mark.parametrize("where", ("k", "v"))
def test_values_that_are_not_finite_are_never_left_out(where, little_tiles):
    arrays = {name: torch.randn(1, 2, 160, 8) for name in "qkv"}
    arrays[where][0, 1, 3, 2] = torch.nan
    out = linbias.torch.attention(**arrays, left=[3.0, 3.0], implementation="triton")
    assert torch.isfinite(out[0, 0]).all()
    assert not torch.isfinite(out[0, 1, 3:]).all(-1).any()


@interpreted
@pytest.mark.parametrize("where", ("q", "k", "v"))
def test_values_that_are_not_finite_show_in_the_gradients(where, little_tiles):
    """In those of every row and key that meets them, and in no other head."""
    torch.manual_seed(0)
    arrays = {name: torch.randn(1, 2, 70, 8) for name in "qkv"}
    arrays[where][0, 1, 40, 2] = torch.nan
    leaves = {name: array.requires_grad_() for name, array in arrays.items()}
    out = linbias.torch.attention(**leaves, left=[3.0, 0.1], implementation="triton")
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves.values())
    assert all(torch.isfinite(gradient[0, 0]).all() for gradient in (dq, dk, dv))
    assert not torch.isfinite(dq[0, 1, 40]).all()
    if where == "q":
        assert not torch.isfinite(dk[0, 1, :41]).all(-1).any()
    else:
        assert not torch.isfinite(dq[0, 1, 40:]).all(-1).any()


@interpreted
def test_keys_outside_the_key_range_may_hold_anything(little_tiles):
    case = little(by_name("range-symmetric"))
    inputs = expected(case, "float32")[0]
    clean = TorchSubject("triton").run(inputs, case, "float32")
    poisoned = replace(inputs, k=inputs.k.copy(), v=inputs.v.copy())
    for b, (first, end) in enumerate(case.key_range):
        for array in (poisoned.k, poisoned.v):
            array[b, :, :first] = float("nan")
            array[b, :, end:] = float("inf")
    for before, after in zip(
        clean, TorchSubject("triton").run(poisoned, case, "float32"), strict=True
    ):
        for name in before:
            assert (before[name] == after[name]).all(), name


@interpreted
@pytest.mark.parametrize("layout", ("heads last", "every second element"))
def test_strides_do_not_matter(layout, little_tiles):
    check_case(TorchSubject("triton"), little(by_name("symmetric")), "float32", layout)


@interpreted
def test_slope_gradients_are_left_out_where_no_one_asks(little_tiles):
    leaves = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in "qkv"]
    left = torch.tensor([0.5, 0.25], requires_grad=True)
    gradients = []
    for slopes in (left, left.detach()):
        out = linbias.torch.attention(*leaves, slopes, implementation="triton")
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operator_passes_opcheck_and_compiles_whole(little_tiles):
    q, k, v = (torch.randn(1, n, 9, 8, requires_grad=True) for n in (2, 1, 1))
    left = torch.rand(2, requires_grad=True)
    arguments = (q, k, v, left, None, None, None, None, 0.3, 0.0, 1e-7, True)
    torch.library.opcheck(triton.forward, arguments)

    def run(q, k, v, left):
        return linbias.torch.attention(q, k, v, left, implementation="triton").square().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(
        *(torch.autograd.grad(f(q, k, v, left), (q, k, v, left)) for f in (run, compiled)),
        strict=True,
    ):
        torch.testing.assert_close(traced, eager)


@interpreted
def test_packed_sequences_and_layers_take_it(little_tiles):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 57, 2, 16)
    edges = torch.tensor([0, 20, 20, 41, 57])
    layer = linbias.torch.MultiheadAttention(32, 2, implementation="triton")
    x = torch.randn(2, 40, 32)
    for attend in (
        lambda name: linbias.torch.attention_varlen(q, k, v, edges, edges, implementation=name),
        lambda name: setattr(layer, "implementation", name) or layer(x, x, x)[0],
    ):
        torch.testing.assert_close(attend("triton"), attend("dense"))


@interpreted
def test_language_models_train_and_decode_with_it(little_tiles):
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    tokens = torch.arange(48).reshape(1, 48) % 50
    results = []
    for name in ("triton", "dense"):
        torch.manual_seed(0)
        model = LinbiasForCausalLM(
            LinbiasConfig(**config, position="alibi", attention_implementation=name)
        )
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        written = model.generate(tokens, max_new_tokens=4, do_sample=False)
        results.append((loss, *(p.grad for p in model.parameters()), written))
    for ours, definition in zip(*results, strict=True):
        torch.testing.assert_close(ours, definition, rtol=1e-4, atol=1e-5)


def call(device="cuda", dtype="bfloat16", D=64):
    q = Described((1, 8, 1024, D), dtype, device)
    return check("attention", q, q, q)


def test_what_it_cannot_run_is_said(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "_properties", lambda _: ((9, 0), 232448, 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    assert triton.why_not(call()) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.why_not(call("cpu")) == "Triton's interpreter cannot multiply bfloat16"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert triton.why_not(call("cpu")) == "it runs on CUDA GPUs, and the arrays are on cpu"
    assert "got float64" in triton.why_not(call(dtype="float64"))
    assert triton.why_not(call(D=257)) == "head sizes go up to 256, got 257"
    monkeypatch.setattr(triton, "_properties", lambda _: ((7, 5), 65536, 40))
    assert (
        triton.why_not(call()) == "it needs compute capability 8.0 or newer, and Some GPU has 7.5"
    )
    monkeypatch.setattr(triton, "_properties", lambda _: ((8, 0), 20000, 40))
    assert triton.why_not(call()) == "no tile of head size 64 fits 20000 bytes of shared memory"
    monkeypatch.setattr(triton, "_VERSION", (3, 5))
    assert triton.why_not(call()) == "it needs Triton 3.6 or newer, and 3.5 is installed"
    monkeypatch.setattr(triton, "_VERSION", None)
    assert triton.why_not(call()).startswith("Triton is not installed")


def test_torch_compile_asks_the_driver_and_does_not_trace_it(monkeypatch):
    """What runs is asked inside compiled code; on a GPU the answer comes from C functions."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    # gmtime is written in C, as the driver is: ((1970, 1), 227 KiB, 132 processors) of a kind
    properties = functools.cache(lambda _: (tuple(time.gmtime(0)[:2]), 232448, 132))
    monkeypatch.setattr(triton, "_read_properties", properties)

    def run(x):
        return x + 1 if triton.why_not(call()) is None else x

    assert torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(2)).tolist() == [1, 1]


def test_auto_never_takes_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton, "attention", None)
    q = torch.ones(1, 1, 3, 300)
    assert linbias.torch.attention(q, q, q).shape == q.shape


def test_every_kernel_compiles_without_a_gpu():
    """What the interpreter does not see: types, layouts, shared memory. A process of its own, as this one interprets."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-m", "triton_compile", "90", "64"],
        capture_output=True,
        text=True,
        check=False,
        cwd=os.path.dirname(__file__),
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]


ON_A_GPU = [(case.name, "bfloat16") for case in CASES]
ON_A_GPU += [
    (name, dtype)
    for name in ("T-below-S", "asymmetric", "range-symmetric", "long")
    for dtype in ("float16", "float32")
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), ON_A_GPU)
def test_contract_on_a_gpu(name, dtype, poisoned_memory):
    check_case(TorchSubject("triton", "cuda"), by_name(name), dtype)


@pytest.mark.gpu
def test_a_call_can_be_captured_in_a_cuda_graph():
    q, k, v = torch.randn(3, 1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    slopes = torch.tensor([0.5, 0.01], device="cuda")
    linbias.torch.attention(q, k, v, slopes, implementation="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linbias.torch.attention(q, k, v, slopes, implementation="triton")
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected_out = linbias.torch.attention(q, k, v, slopes, implementation="triton")
    assert torch.equal(out, expected_out)


@pytest.mark.gpu
def test_a_captured_graph_draws_dropout_anew():
    q, k, v = torch.randn(3, 1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    run = functools.partial(linbias.torch.attention, q, k, v, dropout=0.5, implementation="triton")
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("T", (262_144, 1_048_576))
def test_a_million_tokens_stay_within_a_rounding_step_of_float64(T):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, T, 64, device="cuda", dtype=torch.bfloat16)
    slopes = torch.tensor([0.5, 2.0**-8], device="cuda")
    out = linbias.torch.attention(q[:, :, -256:], k, v, slopes, implementation="triton")
    wide = [x.double() for x in (q[:, :, -256:], k, v)]
    truth = linbias.torch.attention(*wide, slopes, implementation="dense")
    assert (out - truth).abs().max() <= 2**-8 * truth.abs().max()  # of bfloat16


@interpreted
def test_the_gpu_script_runs_dry(tmp_path):
    """Its measuring stages, at tiny sizes, in the interpreter."""
    script = os.path.join(os.path.dirname(__file__), "..", "benchmarks", "bench_gpu.py")
    stages = ["model", "speed", "decode", "accuracy", "tiles"]
    done = subprocess.run(
        [sys.executable, script, "--dry-run", "--output", str(tmp_path), "--stages", *stages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (records,) = tmp_path.glob("*.jsonl")
    lines = records.read_text().splitlines()
    implementations = [json.loads(line)["implementation"] for line in lines]
    assert "triton" in implementations and "slope * key_index" in implementations
