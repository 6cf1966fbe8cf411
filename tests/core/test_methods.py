"""One record says all about a position method, and everybody can tell their lines apart."""

import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from linbias.explore.bundle import style
from linbias.methods import DECODER, ENCODER, METHODS, WEIGHTS, methods_of

ADD_A_METHOD = """
import json, re, sys, types
from linbias.methods import METHODS, Method
METHODS["dummy"] = Method(
    "dummy", "a dummy", "#123456", "#FEDCBA", "dummies.Dummy", ("decoder", "encoder"),
    linear=True, even="hidden_size",
)

import torch
from typer.testing import CliRunner
from linbias import explore
from linbias.cli import app
from linbias.lm.report import figures, page, summary
from linbias.lm.report.records import ExtrapolationResults, TrainingRecord
from linbias.lm.settings import ExtrapolateSettings, TrainSettings
from linbias.lm.training import LanguageModelMetrics
from linbias.models import LinbiasConfig, LinbiasForCausalLM, LinbiasForMaskedLM
from linbias.models.decoder.positions import Position
from test_lm_findings import record

sys.modules["linbias.models.decoder.dummies"] = types.ModuleType("linbias.models.decoder.dummies")
sys.modules["linbias.models.decoder.dummies"].Dummy = Dummy = type("Dummy", (Position,), {})

for family, field in ((LinbiasForCausalLM, "position"), (LinbiasForMaskedLM, "encoder_position")):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LinbiasConfig(**sizes, **{field: "dummy"})
    position = family(config).model.position
    assert type(position) is Dummy and position.causal == (field == "position")
try:
    LinbiasConfig(hidden_size=9, num_attention_heads=1, position="dummy")
    raise AssertionError("an odd size was taken")
except ValueError as error:
    assert "hidden_size must be even for position='dummy', got 9" in str(error)

for command in ("train", "extrapolate"):
    words = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert "dummy" in words, words

settings = ExtrapolateSettings(methods=("dummy",), training=TrainSettings(steps=1))
metrics = LanguageModelMetrics(
    steps=1, tokens=4, seconds=1.0, peak_memory_bytes=1, num_parameters=1, num_processes=1,
    loss=1.0,
)
training = TrainingRecord("dummy", 4, 0, metrics, date="today")
tested = tuple(record("dummy", n, 3.0) for n in (4, 16))
results = ExtrapolationResults({}, settings, (training,), tested)
report = page.html(results)
assert report.count("--dummy: light-dark(#123456, #FEDCBA);") == 1
assert ">a dummy" in report and "stroke: var(--dummy)" in report
(panel,) = figures.loss_by_length(tested).axes
assert "#123456" in {line.get_color() for line in panel.lines}
assert "a dummy  3.00" in {text.get_text() for text in panel.texts}

shown = explore.page({"runs": [summary.summary(results, "run")]})
data = json.loads(re.search(r'id="data">(.*?)</script>', shown, re.DOTALL)[1])
assert data["results"]["runs"][0]["groups"][0]["lines"][0]["method"] == "dummy"
dummy = {"label": "a dummy", "colour": "light-dark(#123456, #FEDCBA)", "main": True}
assert data["methods"]["dummy"] == dummy
"""


@pytest.mark.processes
def test_a_method_is_added_by_its_class_and_its_record():
    done = subprocess.run(
        [sys.executable, "-c", ADD_A_METHOD],
        cwd=Path(__file__).parents[1] / "lm",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


GROUNDS = {"colour": ("#FFFFFF", "#FAF8F3"), "dark": ("#16181C", "#171613")}  # report, explorer
# How the three kinds of colour blindness see linear sRGB: Machado, Oliveira and Fernandes, 2009,
# at full strength.
SIGHT = {
    "all colours": "1 0 0   0 1 0   0 0 1",
    "no red": "0.152286 1.052583 -0.204868   0.114503 0.786281 0.099216"
    "   -0.003882 -0.048116 1.051998",
    "no green": "0.367322 0.860646 -0.227968   0.280085 0.672501 0.047413"
    "   -0.011820 0.042940 0.968881",
    "no blue": "1.255528 -0.076749 -0.178779   -0.078411 0.930809 0.147602"
    "   0.004733 0.691367 0.303900",
}
# Linear sRGB to OKLab, in two steps around a cube root: Ottosson, 2020.
CONES = "0.412221 0.536333 0.051446   0.211903 0.680700 0.107397   0.088302 0.281719 0.629979"
OKLAB = "0.210454 0.793618 -0.004072   1.977998 -2.428592 0.450594   0.025904 0.782772 -0.808676"


def matrix(rows: str) -> np.ndarray:
    return np.array(rows.split(), float).reshape(3, 3)


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def seen(colour: str, sight: str) -> np.ndarray:
    shown = np.clip(matrix(sight) @ linear(colour), 0, 1)
    return matrix(OKLAB) @ np.cbrt(matrix(CONES) @ shown)


@pytest.mark.parametrize("field", GROUNDS)
def test_lines_stand_out_from_the_page(field):
    for method in METHODS.values():
        for ground in GROUNDS[field]:
            low, high = sorted(
                linear(colour) @ [0.2126, 0.7152, 0.0722]
                for colour in (getattr(method, field), ground)
            )
            assert (high + 0.05) / (low + 0.05) >= 3, method  # WCAG 2.2, 1.4.11


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("field", GROUNDS)
def test_methods_of_a_chart_differ_for_every_kind_of_sight(field, sight):
    """Lines of encoders also differ in dashes and markers: linear biases from all others."""
    for model, other_style in ((DECODER, 0.08), (ENCODER, 0.045)):
        for pair in combinations([METHODS[name] for name in methods_of(model)], 2):
            first, second = (seen(getattr(method, field), SIGHT[sight]) for method in pair)
            least = 0.08 if pair[0].linear == pair[1].linear else other_style
            assert np.linalg.norm(first - second) >= least, pair


def test_weights_have_one_colour():
    light, dark = WEIGHTS
    assert f"--accent: light-dark({light}, {dark});" in style()
    site = (Path(__file__).parents[2] / "docs/_static/linbias.css").read_text(encoding="utf-8")
    assert set(re.findall("--color-brand-primary: (.*);", site)) == {light, dark}
