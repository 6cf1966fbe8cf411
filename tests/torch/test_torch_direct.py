"""Plain calls run without their operators, and whoever looks still finds these."""

import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import linbias.torch
from linbias.torch.operators import operator


class See:
    def __init__(self):
        super().__init__()
        self.seen = []

    def see(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeeOperators(See, TorchDispatchMode):
    __torch_dispatch__ = See.see


class SeeFunctions(See, TorchFunctionMode):
    __torch_function__ = See.see


def under_a_mode(mode, run, q):
    with mode:
        run(q)
    return mode.seen


def profiled(run, q):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run(q)
    return [event.key for event in found.key_averages()]


WHO_LOOKS = {
    "dispatch mode": lambda run, q: under_a_mode(SeeOperators(), run, q),
    "function mode": lambda run, q: under_a_mode(SeeFunctions(), run, q),
    "profiler": profiled,
    "make_fx": lambda run, q: [str(node.target) for node in make_fx(run)(q).graph.nodes],
    "make_fx before dispatch": lambda run, q: [
        str(node.target) for node in make_fx(run, pre_dispatch=True)(q).graph.nodes
    ],
}


@pytest.mark.parametrize("who", WHO_LOOKS)
@pytest.mark.parametrize("implementation", ("cpu", "blocked"))
def test_whoever_looks_finds_the_operator(who, implementation):
    def run(q):
        return linbias.torch.attention(q, q, q, slopes, implementation=implementation)

    slopes = torch.rand(2)
    seen = WHO_LOOKS[who](run, torch.randn(1, 2, 9, 8))
    assert any("linbias" in name and f"{implementation}_forward" in name for name in seen)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("implementation", ("cpu", "blocked"))
def test_plain_calls_give_the_bits_of_the_operator(implementation, dtype, monkeypatch):
    q, k, v = (torch.randn(2, n, 70, 8, dtype=dtype) for n in (4, 2, 2))
    left, right = torch.rand(4), torch.rand(2, 4)
    left[1] = torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v, left, right)]

    def run():
        given = {"implementation": implementation, "right_slopes": right, "causal": False}
        out, lse = linbias.torch.attention(q, k, v, left, **given, return_lse=True)
        with torch.no_grad():
            alone = linbias.torch.attention(q, k, v, left, implementation=implementation)
        loss = (out.double() ** 2).sum() + lse.double().sin().sum()
        return [out, lse, alone, *torch.autograd.grad(loss, leaves)]

    direct = run()
    assert "Direct" in direct[1].grad_fn.name()
    monkeypatch.setattr(operator, "unobserved", lambda *_: False)
    by_operator = run()
    assert "Direct" not in by_operator[1].grad_fn.name()
    for one, other in zip(direct, by_operator, strict=True):
        assert torch.equal(one, other)


def test_lazy_negatives_are_read_as_what_they_stand_for():
    """PyTorch keeps some tensors, such as parts of conjugates, in memory of the other sign."""
    negative = torch._neg_view(torch.randn(1, 2, 9, 8))
    assert negative.is_neg()
    plain = negative.clone()
    assert not plain.is_neg()
    run = linbias.torch.attention
    assert torch.equal(run(negative, negative, negative), run(plain, plain, plain))
    leaf = plain.clone().requires_grad_()
    out = run(leaf, plain, plain)
    for dout in (negative, plain):
        wanted = torch.autograd.grad(out, leaf, plain, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(out, leaf, dout, retain_graph=True)[0], wanted)


@pytest.mark.parametrize("implementation", ("cpu", "blocked"))
def test_hooks_may_give_what_was_saved_in_other_strides(implementation):
    q, k, v = torch.randn(3, 2, 2, 70, 8, requires_grad=True)

    def gradients():
        out = linbias.torch.attention(q, k, v, implementation=implementation)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    def in_other_strides(x):
        return x.movedim(0, -1).contiguous().movedim(-1, 0)

    wanted = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, in_other_strides):
        found = gradients()
    torch.testing.assert_close(found, wanted)


def test_activation_checkpointing_recomputes_a_plain_call():
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    leaf = q.requires_grad_()
    wanted = torch.autograd.grad(linbias.torch.attention(leaf, k, v).sum(), leaf)[0]
    out = checkpoint(linbias.torch.attention, leaf, k, v, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.sum(), leaf)[0], wanted)


FIRST_CALL = """
import sys, torch
before = set(sys.modules)
import linbias.torch
q = torch.ones(1, 2, 9, 8, requires_grad=True)
linbias.torch.attention(q, q, q).sum().backward()
linbias.torch.MultiheadAttention(8, 2)(torch.ones(3, 1, 8))
print(*{name.split(".")[0] if name[:5] != "torch" else name for name in set(sys.modules) - before})
"""


@pytest.mark.processes
def test_the_first_call_loads_no_compiler():
    """PyTorch's compiler takes a second to import."""
    command = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not [n for n in loaded if n.startswith(("torch._", "torch.fx", "torch.export"))]
    assert not loaded & {"sympy", "mpmath", "triton"}
