"""What "auto" takes: by record, for calls like those that were measured, and never with another result."""

import json
import sys
from pathlib import Path

import pytest
import torch

import linbias.torch
from linbias.kernels import core
from linbias.torch import choice, functional
from linbias.torch.choice import explain_choice

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
import fastest

pytestmark = pytest.mark.skipif(bool(core.WHY_MISSING), reason=str(core.WHY_MISSING))


@pytest.fixture
def measured(monkeypatch):
    """PyTorch's attention was faster up to 128 tokens, and up to 32 with gradients."""
    records = {
        (core.target(), "float32", False): {64: (16, 128), 16: (16, 0)},
        (core.target(), "float32", True): {64: (16, 32)},
    }
    monkeypatch.setattr(choice, "_BY_KIND", records)
    choice._measured_lengths.cache_clear()
    yield
    choice._measured_lengths.cache_clear()


@pytest.fixture
def taken(measured, monkeypatch):
    """Names of what ran."""
    names = []
    original = functional._dispatch.choose

    def choose(*arguments):
        chosen = original(*arguments)
        names.append(chosen.NAME)
        return chosen

    monkeypatch.setattr(functional._dispatch, "choose", choose)
    return names


def test_auto_takes_what_was_faster_in_calls_like_those_measured(taken):
    run = linbias.torch.attention
    q = torch.randn(1, 2, 128, 64)
    leaf, short = q.clone().requires_grad_(), torch.randn(1, 2, 32, 64, requires_grad=True)
    slopes = torch.rand(2, requires_grad=True)
    calls = {
        "sdpa": [lambda: run(q, q, q), lambda: run(q, q, q, causal=False), lambda: run(short, short, short)],
        "cpu": [
            lambda: run(leaf, leaf, leaf),  # with gradients it was faster at 32 only
            lambda: run(*[torch.randn(1, 2, 129, 64)] * 3),
            lambda: run(*[torch.randn(1, 2, 32, 8)] * 3),  # nearest to head size 16
            lambda: run(*[torch.randn(1, 2, 32, 256)] * 3),  # near to none
            lambda: run(*[torch.randn(1, 2, 8, 64)] * 3),  # nothing so short was measured
            lambda: run(*[q.double()] * 3),  # not measured
            lambda: run(q[:, :, :100], q, q),
            lambda: run(q, q, q, return_lse=True),
            lambda: run(q, q, q, dropout=0.1),
            lambda: run(q, q, q, query_start=torch.zeros(1, dtype=torch.int64)),
            lambda: run(short, short, short, slopes),
            lambda: torch.func.grad(lambda x: run(x, x, x).sum())(q),
            lambda: torch.compile(run, backend="eager")(q, q, q),
        ],
    }  # fmt: skip
    for name, functions in calls.items():
        for function in functions:
            taken.clear()
            function()
            assert taken == [name], (name, functions.index(function))


@pytest.mark.parametrize("causal", (True, False))
def test_the_choice_changes_results_by_rounding_only(measured, causal):
    q, k, v = torch.randn(2, 4, 64, 64), *torch.randn(2, 2, 2, 64, 64)
    left = torch.tensor([0.5, 0.25, torch.inf, 0.0])
    run = linbias.torch.attention
    out = run(q, k, v, left, causal=causal)
    torch.testing.assert_close(out, run(q, k, v, left, causal=causal, implementation="cpu"))


def test_reasons_are_given_for_every_implementation(measured):
    short = explain_choice("8,8,128,128,64,float32")
    assert short.name == "sdpa" and short.reasons["sdpa"] is None
    assert "PyTorch's attention was faster at this length" in short.reasons["cpu"]
    training = explain_choice("8, 8, 128, 128, 64, float32, backward")
    assert training.name == "cpu"
    assert training.reasons["sdpa"] == "it was faster up to length 32 only"
    assert "was not measured on" in explain_choice("8,8,128,128,64,float16").reasons["sdpa"]
    for wrong in ("8,8,128", "8,8,128,128,64,float32,forward", "8,8,128,128,64,float128"):
        with pytest.raises(ValueError, match="call must be B,H,T,S,D,dtype"):
            explain_choice(wrong)


def test_the_table_follows_from_records():
    key = ("avx2", "float32", False, 64)
    times = {
        (key, n): {"cpu": cpu, "sdpa": 1.0}
        for n, cpu in ((64, 2.0), (128, 1.2), (256, 1.05), (512, 3.0))
    }
    times[("avx2", "float32", True, 64), 64] = {"cpu": 1.0, "sdpa": 1.0}
    assert fastest.table(times) == {key: (64, 128), ("avx2", "float32", True, 64): (64, 0)}


def test_the_committed_table_is_that_of_the_committed_records():
    """`python runs/fastest.py` writes it."""
    assert fastest.table(fastest.newest(fastest.ROOT / "records")) == choice.SDPA_IS_FASTER


def test_doctor_tells_what_a_call_takes(measured):
    from typer.testing import CliRunner

    from linbias.cli import app

    found = CliRunner().invoke(app, ["doctor", "--call", "8,8,128,128,64,float32", "--json"])
    assert json.loads(found.stdout)["name"] == "sdpa"
    shown = CliRunner().invoke(app, ["doctor", "--call", "8,8,512,512,64,float32"]).stdout
    assert "taken" in shown and "it was faster up to length 128" in " ".join(shown.split())
