"""The Triton kernels compiled, for a GPU or on one, and what they say they cannot run."""

import functools
import json
import os
import subprocess
import sys
import time

import pytest
import torch

import linbias.torch
from cases import CASES, by_name
from contract import check_case
from linbias._request import Described, Request, check
from linbias.torch.impl import triton
from test_torch import TorchSubject

pytest.importorskip("triton")


def call(device="cuda", dtype="bfloat16", D=64):
    q = Described((1, 8, 1024, D), dtype, device)
    return check("attention", Request(q=q, k=q, v=q))


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
    assert "needs compute capability 8.0 or newer, and Some GPU has 7.5" in triton.why_not(call())
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


@pytest.mark.processes
def test_every_kernel_compiles_without_a_gpu():
    """And runs Hopper's products together; in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-m", "triton_compile", "90", "64", "plain", "gates", "packed"],
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
    for name in ("T-below-S", "asymmetric", "gaps-asymmetric", "range-per-head-symmetric", "long")
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


@pytest.mark.processes
def test_the_gpu_script_runs_dry(tmp_path):
    """All but the tests that it calls, at tiny sizes, in the interpreter; and its page."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here")
    script = os.path.join(os.path.dirname(__file__), "../../evidence/benchmarks/bench_gpu.py")
    stages = ["speed", "decode", "training", "gates", "tiles"]
    done = subprocess.run(
        [sys.executable, script, "--dry-run", "--output", str(tmp_path), "--stages", *stages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (records,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    only_compiled = {"flex", "flex, window mask"}  # has no backward pass on a CPU
    for line in lines:
        assert "left_out" not in line or line["implementation"] in only_compiled, line
    page = (tmp_path / "page.md").read_text()
    assert all(f"- {stage}: ok" in page for stage in stages)
    shown = {line["case"] for line in lines if "B" in line}
    kinds = ("causal", "zero-slopes", "decode", "gates", "tiles-forward", "tiles-dkv")
    assert shown == {f"{kind}-16" for kind in kinds}
    assert all(f"**{case}, " in page for case in shown)
