"""`linbias windows`: what it prints is what the weights say."""

import json

import numpy as np
import pytest
import torch

from linbias.models.loading import load
from linbias.models.windows import weights_windows
from small_models import build
from test_cli import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    build(num_key_value_heads=2).float().save_pretrained(folder)
    return folder


def test_it_prints_the_windows_of_every_head(folder):
    result = run("windows", folder)
    expected = weights_windows(load(folder)).windows()
    for number in (*expected.flat, *expected.sum(1), expected.sum()):
        assert f"{number:,.0f}" in result.stdout
    assert "head 3" in result.stdout and "1/256" in result.stdout


def test_json_has_all_numbers(folder):
    found = json.loads(run("windows", folder, "--tolerance", "1e-4", "--json").stdout)
    given = weights_windows(load(folder))
    np.testing.assert_array_equal(found["windows"], given.windows(1e-4))
    np.testing.assert_allclose(found["lead"], given.lead)
    assert found["tolerance"] == 1e-4 and found["why_not"] == {}


def test_many_heads_are_summed_up(tmp_path):
    build(num_attention_heads=16, hidden_size=32).float().save_pretrained(tmp_path)
    expected = weights_windows(load(tmp_path)).windows()
    shown = run("windows", tmp_path).stdout
    assert "head" not in shown.splitlines()[1] and "median" in shown
    assert f"{np.median(expected[0]):,.0f}" in shown and f"{expected[1].max():,.0f}" in shown


def test_heads_without_a_window_need_all_keys(tmp_path):
    torch.manual_seed(0)
    build(slope_scale=1e-310).float().save_pretrained(tmp_path)
    shown = run("windows", tmp_path).stdout
    assert "all" in shown and "0 of 8 heads have a window" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tolerance", "0"], "--tolerance: must be in (0, 1), got 0.0"),
        (["--tolerance", "nan"], "--tolerance: must be in (0, 1), got nan"),
    ],
)
def test_bad_input_ends_in_one_line(folder, words, message):
    result = run("windows", folder, *words)
    assert result.exit_code == 2 and message in result.stderr


def test_a_model_without_linear_biases_is_refused(tmp_path):
    build(position="rotary").float().save_pretrained(tmp_path)
    result = run("windows", tmp_path)
    assert result.exit_code == 2 and "linear biases" in result.stderr
