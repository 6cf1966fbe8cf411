"""The figures of `linbias.plots` show the numbers, in a column's width, with letters that do not
overlap.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import TightLayoutEngine
from numpy.testing import assert_allclose

import linbias
from linbias import example, near_to_far, plots
from linbias._run.files import write_json
from linbias.lm.report.records import ExtrapolationResults
from linbias.lm.settings import ExtrapolateSettings, TrainSettings
from linbias.methods import BIAS, WEIGHTS
from linbias.plots.reach import tokens_read, tokens_that_hold
from test_lm_findings import record

NAMES = ("$a$b$", "c\nd", "<i>", "a b", "mat")


def cells(panel):
    """What a panel's matrix shows."""
    (mesh,) = panel.collections
    return mesh.get_array()


def test_weights_are_those_of_the_explanation_and_hidden_keys_are_left_open():
    trace, _ = example.trace()
    figure = plots.weights(trace, average=True)
    *panels, average, _bar = figure.axes
    for panel, weight in zip(panels, trace.weights, strict=True):
        assert_allclose(cells(panel).filled(0.0), weight)
        assert (np.ma.getmaskarray(cells(panel)) == np.triu(np.ones((5, 5), bool), 1)).all()
    assert_allclose(cells(average).filled(0.0), trace.weights.mean(0))
    assert [text.get_text() for text in average.texts][:2] == ["1.00", "0.66"]


def test_bias_is_that_of_the_definition_on_one_scale_of_colours():
    left, right = [0.5, np.inf], [np.inf, 0.25]
    figure = plots.bias(left, 3, 4, causal=False, right_slopes=right)
    expected = linbias.bias(left, 3, 4, right)
    for panel, values in zip(figure.axes[:2], expected, strict=True):
        assert_allclose(cells(panel).filled(-np.inf), values)
        assert panel.collections[0].norm.vmin == expected[np.isfinite(expected)].min()
    titles = [panel.get_title() for panel in figure.axes[:2]]
    assert titles == ["head 0, slope 1/2", "head 1, slope 1/4 to the right"]


def test_the_bias_of_a_flat_head_can_be_seen_beside_a_steep_one():
    figure = plots.bias(linbias.slopes(8), 24, heads=[0, 2, 4, 7])
    *panels, bar = figure.axes
    (mesh,) = panels[-1].collections
    assert max(mesh.cmap(mesh.norm(cells(panels[-1]).min()))[:3]) < 0.95
    figure.draw_without_rendering()
    texts = [tick.get_text().replace("\N{MINUS SIGN}", "-") for tick in bar.get_yticklabels()]
    boxes = [tick.get_window_extent() for tick in bar.get_yticklabels()]
    assert sorted(bar.get_yticks()) == [-10, -1, -0.1, 0]
    assert [float(text) for text in texts] == list(bar.get_yticks())
    assert not any(a.overlaps(b) for a in boxes for b in boxes if a is not b)


def test_without_a_bias_all_is_white():
    figure = plots.bias([0.0], 4)
    (mesh,) = figure.axes[0].collections
    assert to_hex(mesh.cmap(mesh.norm(0.0))) == "#ffffff"
    figure.draw_without_rendering()


def test_weights_and_bias_have_their_colours_and_legible_numbers():
    trace, _ = example.trace()
    weights, bias = plots.weights(trace).axes[0], plots.bias([4.0], 5).axes[0]
    for panel, most, colour in ((weights, 1.0, WEIGHTS[0]), (bias, -16.0, BIAS[0])):
        (mesh,) = panel.collections
        assert to_hex(mesh.cmap(mesh.norm(most))) == colour
    ink = {text.get_text(): text.get_color() for panel in (weights, bias) for text in panel.texts}
    assert ink["1.00"] == ink["\N{MINUS SIGN}16.00"] == "white"
    assert ink["0.11"] == ink["0.00"] == ink["\N{MINUS SIGN}4.00"] == "#222222"


def test_tokens_are_written_as_text_and_do_not_overlap():
    q = np.ones((2, 3, 2))
    k = np.ones((2, 5, 2))
    figure = plots.weights(linbias.explain(q, k, k), tokens=NAMES, width="single")
    figure.draw_without_rendering()
    panel = figure.axes[0]
    written = [x.get_text() for x in panel.get_xticklabels()]
    assert written == ["$a$b$", "c\\nd", "<i>", "a b", "mat"]
    assert [y.get_text() for y in panel.get_yticklabels()] == ["<i>", "a b", "mat"]
    assert not any(x.get_parse_math() for x in panel.get_xticklabels())
    boxes = [label.get_window_extent() for label in panel.get_xticklabels()]
    assert not any(a.overlaps(b) for a in boxes for b in boxes if a is not b)


def test_reach_says_within_which_distance_the_weight_lies():
    # Weights 1/2, 1/4, 1/8 ... by distance: half of a row lies on its own position, 90 percent on
    # the nearest 4.
    flat = np.zeros((1, 64, 1))
    found = tokens_that_hold(flat, flat, np.log([2.0]), [0.49, 0.9, 0.99], {"causal": True})
    assert found[:, 0].tolist() == [1, 4, 7]
    both = tokens_that_hold(flat, flat, np.log([2.0]), [0.3, 0.99], {"causal": False})
    assert both[:, 0].tolist() == [1, 8]  # 1/3 on the own position, then 1/6 on each side, ...


def test_reach_marks_where_near_to_far_stops():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, 128, 8))
    left = np.array([1.0, 0.0])
    read = tokens_read(q[:, 64:], k, left, 2**-24, {"causal": True})
    tiles = near_to_far.attention(q[:, 64:], k, k, left, rows=2, keys=2).tiles[0]
    assert abs(read[0] - np.median([64 + t.first_row + 0.5 - t.first for t in tiles[0]])) <= 2
    assert read[1] == np.median(np.arange(65, 129))  # slope 0: everything
    figure = plots.reach(q, k, left)
    (marks,) = figure.axes[0].lines
    assert_allclose(marks.get_xdata(), read)
    assert not plots.reach(q, k, left, tolerance=0).axes[0].lines


@pytest.fixture
def folder(tmp_path):
    """What an experiment leaves."""
    evaluations = tuple(
        record(method, length, bits + seed / 10, seed)
        for method, bits in (("alibi", 3.0), ("rotary", 3.02))
        for length in (4, 16, 64)
        for seed in (0, 1)
    )
    settings = ExtrapolateSettings(training=TrainSettings(steps=1))
    write_json(
        tmp_path / "results.json", ExtrapolationResults({}, settings, (), evaluations).to_dict()
    )
    return tmp_path


@pytest.mark.parametrize("width", ["single", 6.9])
def test_loss_by_length_shows_means_in_a_column(folder, width):
    figure = plots.loss_by_length(folder, width=width)
    (panel,) = figure.axes
    lines = [line for line in panel.lines if len(line.get_xdata()) == 3]
    assert lines[0].get_xdata().tolist() == [1.0, 4.0, 16.0]
    assert_allclose(lines[0].get_ydata(), 3.05)
    figure.draw_without_rendering()
    names = [text for text in panel.texts if text.get_text() != "training length"]
    boxes = [name.get_window_extent() for name in names]
    assert len(boxes) == 2 and not boxes[0].overlaps(boxes[1])
    assert all(box.x1 <= figure.get_size_inches()[0] * figure.dpi for box in boxes)


def test_figures_are_saved_with_letters_as_letters_and_shown_in_notebooks(tmp_path):
    figure = plots.bias([0.5], 4, width="single")
    assert figure.get_size_inches()[0] == 3.3
    figure.savefig(tmp_path / "bias.pdf")
    assert b"/Type3" not in (tmp_path / "bias.pdf").read_bytes()
    figure.savefig(tmp_path / "bias.svg")
    assert ">head 0, slope 1/2</text>" in Path(tmp_path / "bias.svg").read_text()
    assert figure._repr_svg_().startswith("<?xml")


@pytest.mark.parametrize("size", [(6.4, 4.8), (4.0, 3.0)])
def test_all_draw_into_axes_of_ones_own_and_nothing_is_cut(folder, size):
    q = np.ones((4, 8, 2))
    drawers = (
        lambda ax: plots.loss_by_length(folder, ax=ax),
        lambda ax: plots.reach(q, q, ax=ax),
        lambda ax: plots.weights(np.eye(4), ax=ax),
        lambda ax: plots.bias([0.5, 0.25], 4, heads=[1], tokens=["a long word"] * 4, ax=ax),
    )
    for draw in drawers:
        figure = Figure(figsize=size)
        panel = figure.subplots()
        assert draw(panel) is figure and panel.has_data()
        figure.draw_without_rendering()
        (left, bottom), (right, top) = figure.get_tightbbox().get_points()
        assert left >= 0 and bottom >= 0 and right <= size[0] and top <= size[1]
    assert panel.get_title() == "head 1, slope 1/4"
    own = Figure(layout="tight")
    assert plots.weights(np.eye(4), ax=own.subplots()) is own
    assert isinstance(own.get_layout_engine(), TightLayoutEngine)


ONES = np.ones((1, 3, 2))
ONE = [record("alibi", 4, 3.0)]
OWN = Figure().subplots()
NO_RUN = "results must be a folder that `linbias extrapolate` finished, got absent"
NOT_RISING = "shares must be one to four, rising, got [0.9, 0.5]"
REFUSED = [
    ("bias", ([0.5], 3), {"right_slopes": [0.5]}, "right_slopes needs causal=False, got both"),
    ("bias", (0.5, 3), {}, "slopes must be [H], got []"),
    ("bias", ([0.5], 0), {}, "there must be a query and a key, got T=0, S=0"),
    ("bias", ([0.5], 3), {"heads": [1]}, "heads must be in [0, 1), got [1]"),
    ("bias", ([0.5], 3), {"tokens": "ab"}, "tokens must name the 3 keys, got 2"),
    ("bias", ([0.5], 3), {"width": "w"}, "width must be 'single', 'double' or inches, got 'w'"),
    ("weights", (ONES[None],), {}, "weights must be [H, T, S], got [1, 1, 3, 2]"),
    ("weights", (np.ones((2, 3, 3)),), {"ax": OWN}, "ax takes one head, got 2: choose with heads"),
    ("reach", (ONES[None], ONES), {}, "q must be [H, T, D], got [1, 1, 3, 2]"),
    ("reach", (ONES, ONES), {"shares": [0.9, 0.5]}, NOT_RISING),
    ("reach", (ONES, ONES), {"shares": [1.0]}, "shares must be in (0, 1), got [1.0]"),
    ("loss_by_length", ([],), {}, "results must hold an evaluation, got none"),
    ("loss_by_length", (ONE,), {"train_length": 8}, "train_length must be one of [4], got 8"),
    ("loss_by_length", ("absent",), {}, NO_RUN),
]


@pytest.mark.parametrize(("name", "arguments", "options", "message"), REFUSED)
def test_bad_calls_are_refused(name, arguments, options, message):
    with pytest.raises(ValueError, match=re.escape(f"plots.{name}: {message}")):
        getattr(plots, name)(*arguments, **options)
