"""What "auto" takes, and what is said of it."""

import json

import pytest

from linbias import _dispatch
from linbias._request import Described, Request, check
from linbias.kernels import core
from linbias.torch.choice import asked_in_turn, explain_choice

pytestmark = pytest.mark.skipif(bool(core.WHY_MISSING), reason=str(core.WHY_MISSING))


def test_reasons_are_given_for_every_implementation():
    short = explain_choice("8,8,128,128,64,float32")
    assert short.name == "cpu" and short.reasons["cpu"] is None
    assert short.reasons["sdpa"] == "cpu is faster, or needs less memory"
    wide = explain_choice("8, 8, 128, 128, 300, float32, backward")
    assert wide.name == "blocked" and "256" in str(wide.reasons["cpu"])
    for wrong in ("8,8,128", "8,8,128,128,64,float32,forward", "8,8,128,128,64,float128"):
        with pytest.raises(ValueError, match="call must be B,H,T,S,D,dtype"):
            explain_choice(wrong)


def test_on_a_gpu_one_call_goes_before_many_small_ones_while_its_bias_is_small():
    first = {}
    for length in (128, 1 << 15):
        q = Described((1, 1, length, 64), "float64", "cuda:0")  # which `triton` does not take
        problem = check("attention", Request(q=q, k=q, v=q))
        turn = asked_in_turn(problem)
        first[length] = _dispatch.choose("attention", "auto", problem, turn).NAME
    assert first == {128: "sdpa", 1 << 15: "blocked"}


def test_doctor_tells_what_a_call_takes():
    from typer.testing import CliRunner

    from linbias.cli import app

    found = CliRunner().invoke(app, ["doctor", "--call", "8,8,128,128,64,float32", "--json"])
    assert json.loads(found.stdout)["name"] == "cpu"
    shown = CliRunner().invoke(app, ["doctor", "--call", "8,8,512,512,300,float32"]).stdout
    assert "taken" in shown and "head sizes go up to 256" in " ".join(shown.split())
