"""The repaired interpreter: it multiplies bfloat16, and catches a kernel that strays."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles here", allow_module_level=True)

import triton.language as tl  # noqa: E402

from interpreter import repaired  # noqa: E402


@triton.jit
def double(X, Y, n):
    i = tl.arange(0, 16)
    tl.store(Y + i, 2 * tl.load(X + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def multiply(X, Y, Z):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(Z + at, tl.dot(tl.load(X + at), tl.load(Y + at)).to(tl.bfloat16))


@pytest.mark.parametrize(("sizes", "n"), [((16, 16), 16), ((12, 16), 12), ((16, 12), 12)])
def test_access_within_the_arguments_is_free(sizes, n):
    x, y = (torch.ones(size) for size in sizes)
    with repaired():
        double[1,](x, y, n)
        double[1,](Y=y, X=y, n=n)
    assert y[:n].tolist() == [4.0] * n


@pytest.mark.parametrize("sizes", ((12, 16), (16, 12)))
def test_access_beyond_the_arguments_is_an_error(sizes):
    x, y = (torch.ones(100)[10 : 10 + size] for size in sizes)  # inside a larger allocation
    for given, named in (((x, y, 13), {}), ((), {"n": 13, "X": x, "Y": y})):
        words = "1 of 13 addresses"
        with repaired(), pytest.raises(triton.runtime.errors.InterpreterError, match=words):
            double[1,](*given, **named)


def test_bfloat16_rounds_and_multiplies_as_pytorch_does():
    torch.manual_seed(0)
    x, y, z = torch.randn(3, 16, 16).bfloat16()
    with repaired():
        multiply[1,](x, y, z)
    assert torch.equal(z, (x.float() @ y.float()).bfloat16())
