"""Tools of PyTorch's that look at a program: the FLOP counter, ONNX export, `torch.jit.trace`."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import linbias.torch
from linbias.torch import MultiheadAttention
from linbias.torch.export import decompositions
from linbias.torch.impl import blocked, cpu, dense, triton
from linbias.torch.operators.operator import Inputs

# What the exporter warns of on the way.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

# In a fresh process: formulas are there from the first call on, also for a counter that counts.
COUNTED = """
import torch, linbias.torch
from torch.utils.flop_counter import FlopCounterMode
def count(attend):
    q, k, v = (torch.randn(2, n, 50, 16, requires_grad=True) for n in (4, 2, 2))
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v).sum().backward()
    return counter.get_total_flops()
for name in ("cpu", "blocked", "cpu"):
    print(count(lambda *x: linbias.torch.attention(*x, implementation=name)))
"""


@pytest.mark.processes
def test_the_flop_counter_counts_every_pair_of_query_and_key():
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    pairs = 2 * 4 * 50 * 50  # each costs 16 multiplications and additions in 2 + 5 products
    assert list(map(int, done.stdout.split())) == [2 * pairs * 16 * 7] * 3


class Call(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return linbias.torch.attention(q, k, v, **self.options)


LENGTH = torch.export.Dim("length", min=2, max=4096)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    (
        {},
        pytest.param({"causal": False}, marks=pytest.mark.thorough),
        pytest.param(  # some queries see no key
            {"key_range": torch.tensor([[0, 7], [2, 9]])}, marks=pytest.mark.thorough
        ),
        pytest.param({"implementation": "sdpa", "scale": 0.3}, marks=pytest.mark.thorough),
    ),
    ids=str,
)
def test_a_call_exported_to_onnx_gives_the_same(options, tmp_path):
    free = ({2: LENGTH},) * 3 if "key_range" not in options else None
    check_onnx(Call(**options), lambda n: torch.randn(3, 2, 4, n, 16), free, tmp_path)


@pytest.mark.thorough
def test_a_layer_exported_to_onnx_gives_the_same(tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = MultiheadAttention(32, 4, variant="asymmetric", batch_first=True)

        def forward(self, x):
            return self.attend(x)[0]

    check_onnx(Layer().eval(), lambda n: torch.randn(1, 2, n, 32), ({1: LENGTH},), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("points", [False, True])
def test_an_exported_program_goes_to_onnx_by_its_decompositions(points, tmp_path):
    class Points(torch.nn.Module):
        def forward(self, q, k, v):
            attend = linbias.torch.attention_points
            return attend(q, k, v, points=k[:, 0, :, :2], implementation="cpu")

    module = Points() if points else Call(causal=False, slopes=[0.5, 0.25])
    q, k, v = torch.randn(3, 2, 2, 9, 16)
    # A size that is free in points as well would tie blocks to short sequences.
    free = None if points else ({2: LENGTH},) * 3
    program = torch.export.export(module, (q, k, v), dynamic_shapes=free)
    assert any("linbias" in str(node.target) for node in program.graph.nodes)
    program = program.run_decompositions(decompositions())
    draw = lambda n: torch.randn(3, 2, 2, n, 16)  # noqa: E731
    check_onnx(module, draw, free, tmp_path, program)


@pytest.mark.parametrize("implementation", [triton, cpu, blocked], ids=lambda m: m.NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operator_and_its_decomposition_have_results_of_one_kind(implementation, dtype):
    operators = implementation.operators
    q, k, v = torch.randn(3, 2, 4, 9, 16).to(dtype)
    numbers = {"scale": 0.25, "dropout": 0.0, "tolerance": 0.0}
    inputs = Inputs(q, k, v, torch.rand(4), None, None, None, None, None, **numbers)
    found = decompositions()[operators.forward._opoverload](*inputs)
    expected = operators.empty_results(inputs)
    for own, other in zip(found, expected, strict=True):
        assert (own.shape, own.dtype) == (other.shape, other.dtype)
    out, lse = dense.attention(inputs)
    torch.testing.assert_close(found.out.to(dtype), out)
    torch.testing.assert_close(operators.lse_of(found), lse)


def check_onnx(module, draw, free, folder, program=None):
    onnxruntime = pytest.importorskip("onnxruntime")
    options = {"dynamo": True, "dynamic_shapes": free} if program is None else {}
    program = torch.onnx.export(program or module, tuple(draw(9)), verbose=False, **options)
    program.save(folder / "program.onnx")
    session = onnxruntime.InferenceSession(folder / "program.onnx")
    for n in (9, 40) if free else (9,):
        given = tuple(draw(n))
        named = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
        with torch.no_grad():
            expected = module(*given)
        np.testing.assert_allclose(session.run(None, named)[0], expected, atol=2e-6)


def test_tracing_is_refused_with_what_to_use_instead():
    x = torch.randn(3, 1, 2, 9, 8)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace.* torch\.export"):
        torch.jit.trace(Call(), tuple(x))
