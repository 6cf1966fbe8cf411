"""`torch.compile`, `torch.export` and the custom operators' own checks."""

import subprocess
import sys

import pytest
import torch

import linbias.torch
from linbias.torch import MultiheadAttention, blocked, cpu
from linbias.torch.operator import Inputs

# What the compiler itself warns of on the way.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.mark.parametrize("implementation", ("dense", "blocked", "cpu", "sdpa"))
def test_compiles_whole_and_gives_the_same(implementation):
    def run(q, k, v, left):
        out, lse = linbias.torch.attention(
            q, k, v, left, implementation=implementation, return_lse=True
        )
        return out.square().sum() + lse.sum()

    leaves = [
        torch.randn(2, 4, 9, 8),
        torch.randn(2, 2, 9, 8),
        torch.randn(2, 2, 9, 8),
        torch.rand(4),
    ]
    gradients = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        gradients.append(torch.autograd.grad(function(*inputs), inputs))
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_compiles_with_inductor():
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    run = torch.compile(linbias.torch.attention, fullgraph=True)
    torch.testing.assert_close(run(q, k, v), linbias.torch.attention(q, k, v))


@pytest.mark.parametrize("padded", (False, True))
def test_module_compiles_whole(padded):
    module, x = (
        MultiheadAttention(16, 4, variant="asymmetric", batch_first=True),
        torch.randn(2, 9, 16),
    )
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 5:] = True
    arguments = (x, None, None, padding) if padded else (x,)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    real = ~padding
    torch.testing.assert_close(compiled(*arguments)[0][real], module(*arguments)[0][real])


def test_module_exports_with_a_free_length():
    module, x = MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 9, 16)
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(module, (x,), dynamic_shapes={"query": {1: length}}).module()
    longer = torch.randn(2, 700, 16)
    torch.testing.assert_close(exported(longer)[0], module(longer)[0])


@pytest.mark.parametrize("implementation", (blocked, cpu), ids=lambda module: module.NAME)
@pytest.mark.parametrize("variant", ("causal", "asymmetric per batch", "range", "dropout"))
def test_operators_pass_opcheck(implementation, variant):
    q, k, v = (torch.randn(2, n, 9, 8, requires_grad=True) for n in (4, 2, 2))
    left = torch.rand(4, requires_grad=True)
    right = key_range = seed = None
    dropout = 0.0
    if variant == "asymmetric per batch":
        left, right = (torch.rand(2, 4, requires_grad=True) for _ in range(2))
    if variant == "range":
        key_range = torch.tensor([[[0, 9], [2, 9]], [[3, 7], [4, 5]]])
    if variant == "dropout":
        seed, dropout = torch.tensor(7), 0.5
    arrays = q, k, v, left, right, key_range, None, None, seed
    inputs = Inputs(*arrays, scale=0.3, dropout=dropout, tolerance=1e-7, precise=True)
    torch.library.opcheck(implementation.operators.forward, tuple(inputs))


class Both(torch.nn.Module):
    def forward(self, q, k, v, offsets):
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        out = linbias.torch.attention(q, k, v)
        return out, linbias.torch.attention_varlen(*packed, offsets, offsets)


@pytest.mark.processes
def test_a_saved_program_loads_where_linbias_is_imported_and_says_so_elsewhere(tmp_path):
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    arguments = (q, k, v, torch.tensor([0, 4, 9]))
    torch.export.save(torch.export.export(Both(), arguments), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for found, wanted in zip(loaded(*arguments), Both()(*arguments), strict=True):
        torch.testing.assert_close(found, wanted)
    code = f"import torch; torch.export.load({str(tmp_path / 'program.pt2')!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode and "torch.ops.linbias." in done.stderr
    assert "Please import the custom op to register it" in done.stderr
