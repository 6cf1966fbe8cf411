"""The explorer's numbers, in a real browser: the book chapter's tables, and `linbias.explain` to the last digit."""

import contextlib
import io

import numpy as np
import pytest

import linbias
from chapter import HEADS, OUTPUT, SCALED, chapters_table
from explorer_page import explained
from linbias import explore
from linbias.explore import data
from linbias.explore.bundle import bundle, read_module
from linbias.explore.data import WORDS
from linbias.schedules import SCHEDULES


@pytest.fixture(scope="module")
def functions(chromium):
    """The page's own functions, to be called in the browser."""
    probe = (
        'import { fixed, general } from "./numbers.js";\n'
        'import { slopes } from "./attention.js";\n'
        'import { vectors } from "./vectors.js";\n'
        "Object.assign(globalThis, { fixed, general, slopes, vectors });\n"
    )
    page = chromium.new_page()
    page.evaluate(
        bundle("probe.js", lambda name: probe if name == "probe.js" else read_module(name))
    )
    yield page
    page.close()


# The book chapter's tables

SCORES = """
The 0.000 0.207 -0.293 -1.500 -1.293
cat 0.914 0.000 0.914 -1.000 -1.500
sat -0.293 0.207 1.414 -0.500 -0.293
on -1.500 -1.000 -0.500 0.000 -0.500
mat -2.000 -0.793 -0.293 -0.500 0.707
"""


def test_the_chapters_weights_and_outputs_are_in_the_page(open_state):
    page = open_state()
    for head, table in zip(
        ("Head 1", "Head 2", "Mean of all heads"), HEADS.split("\n\n"), strict=True
    ):
        page.choose_head(head)
        assert page.cells() == chapters_table(table)
        assert page.table("The matrix as a table") == chapters_table(table)
    assert page.table("Outputs") == chapters_table(OUTPUT)
    # For the mean, the steps are the weights that it is made of.
    rows = [chapters_table(table)[0] for table in HEADS.split("\n\n")]
    columns = zip(WORDS[:5], *(row[1:] for row in rows), strict=True)
    assert page.table("Step by step") == [list(column) for column in columns]


def test_the_chapters_steps_are_in_the_page(open_state):
    page = open_state()
    distance = abs(np.subtract.outer(np.arange(5), np.arange(5)))
    for quantity, table in (("scaled", SCALED), ("scores", SCORES)):
        page.choose("Show", quantity)
        for row, wanted in zip(page.cells(), chapters_table(table), strict=True):
            places = len(wanted[1].split(".")[1])
            assert [f"{float(cell):.{places}f}" for cell in row[1:]] == wanted[1:]
    for head, slope in (("Head 1", 0.5), ("Head 2", 0.25)):
        page.choose("Show", "bias")
        page.choose_head(head)
        bias = [[float(cell) for cell in row[1:]] for row in page.cells()]
        np.testing.assert_array_equal(bias, -slope * distance)
    # Rows "The" and "cat" step by step: the bias, and the weights with and without the bias.
    page.choose_head("Head 1")
    assert page.bars() == {
        "The": ("0.2879", "0.1237"),
        "cat": ("0.3541", "0.2509"),
        "sat": ("0.2148", "0.2509"),
        "on": ("0.0642", "0.1237"),
        "mat": ("0.0790", "0.2509"),
    }
    page.choose_row("cat")
    bias = [row[3] for row in page.table("Step by step")]
    assert bias == ["-0.5000", "0.0000", "-0.5000", "-1.0000", "-1.5000"]


def test_the_chapters_slopes_are_in_the_page(open_state):
    page = open_state(heads=8)
    rows = page.table("Slopes")
    assert [row[:5] for row in (*rows[:4], rows[7])] == [
        ["1", "0.5", "1/2", "-5", "Ultra-local"],
        ["2", "0.25", "1/4", "-2.5", "Local"],
        ["3", "0.125", "1/8", "-1.25", "Medium-range"],
        ["4", "0.0625", "1/16", "-0.625", "Broad"],
        ["8", "0.00390625", "1/256", "-0.0390625", "Near-global"],
    ]


def test_the_chapters_inputs_are_in_the_page(open_state):
    page = open_state()
    for name, rows in zip(
        "qkv", (linbias.example.Q, linbias.example.K, linbias.example.V), strict=True
    ):
        shown = page.table("Inputs", caption=name)
        assert [[float(cell) for cell in row[1:]] for row in shown] == rows


# Numbers against Python, to the last printed digit

STATES = [
    {},
    {"variant": "causal", "schedule": "paper", "heads": 3, "head": 3, "row": 4, "text": " ".join(WORDS[:9])},
    {"variant": "directional", "schedule": "mpt", "heads": 6, "head": 5, "row": 2, "text": " ".join(WORDS[:7])},
    {"variant": "asymmetric", "schedule": "geometric", "heads": 5, "head": 2, "left": "2:0.3", "right": "2:1.7"},
    # These repeat a variant; the last has thousands of cells.
    pytest.param({"variant": "symmetric", "left": "1:0 2:0", "row": 3}, marks=pytest.mark.thorough),
    pytest.param({"variant": "causal", "schedule": "paper", "heads": 16, "head": 7, "row": 64, "text": " ".join(WORDS)}, marks=pytest.mark.thorough),
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.get("variant", "start"))
def test_numbers_equal_explain(open_state, state):
    page = open_state(**state)
    trace, tokens = explained(state)
    head, row = state.get("head", 1) - 1, state.get("row", 1) - 1
    printed = trace.table(query=row, head=head, tokens=tokens).splitlines()
    assert page.table("Step by step") == [line.split() for line in printed[3:-1]]
    assert printed[-1].strip() in page.after_steps()
    code = page.fold("In Python").locator("code").inner_text()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    assert out.getvalue().splitlines() == printed
    outputs = np.concatenate(list(trace.output), axis=1)
    assert page.table("Outputs") == [
        [t, *map("{:.4f}".format, row)] for t, row in zip(tokens, outputs, strict=True)
    ]
    wanted = {
        "q \u00b7 k": trace.raw,
        "scaled": trace.scaled,
        "bias": trace.bias,
        "scores": trace.scores,
        "weights": trace.weights,
    }
    if len(tokens) > 10:  # thousands of cells: two of the five will do
        wanted = {name: wanted[name] for name in ("scores", "weights")}
    for quantity, values in wanted.items():
        page.choose("Show", quantity)
        shown = page.table("The matrix as a table")
        assert shown == [
            [t, *map("{:.4f}".format, row)] for t, row in zip(tokens, values[head], strict=True)
        ]
    page.choose_head("Mean of all heads")
    mean = trace.weights.mean(0)
    assert [row[1:] for row in page.table("The matrix as a table")] == [
        [f"{x:.4f}" for x in row] for row in mean
    ]


def test_slope_0_is_standard_attention(open_state):
    page = open_state()
    page.page.get_by_role("slider", name="Slope").press("Home")
    q, k, _ = explore.vectors(WORDS[:5], 2)
    scores = np.exp(q[0] @ k[0].T / np.sqrt(2))
    standard = scores / scores.sum(1, keepdims=True)
    assert [row[1:] for row in page.cells()] == [[f"{x:.4f}" for x in row] for row in standard]
    assert {with_bias == without for with_bias, without in page.bars().values()} == {True}
    assert page.table("Slopes")[0][1:5] == ["0", "", "0", "Global"]
    page.choose_row("on")
    assert page.bars()["mat"] == ("0.2000", "0.2000")


def test_numbers_are_rounded_as_python_rounds(functions):
    rng = np.random.default_rng(0)
    values = [0.0, -0.0, 0.5, 1 / 32, 3 / 32, -1 / 32, 2.0**-9, 3 * 2.0**-9, 0.1, 9.99995, 999999.5, 1e-5, 1e22]  # fmt: skip
    values += [123456789.0, 1e6, 1e5, 0.00001234565, -2.5, 0.96875, *rng.normal(size=200)]
    values += [
        *(2.0 ** -np.arange(16)),
        *(rng.integers(-500, 500, 200) / 64),
    ]  # many of these lie halfway
    # NaN and infinity are no JSON, but Playwright carries them.
    values += [float("inf"), -float("inf"), float("nan")]
    values = [float(value) for value in values]
    shown = functions.evaluate("values => values.map((x) => [fixed(x), general(x)])", values)
    assert shown == [[f"{x:.4f}", f"{x:g}"] for x in values]


def test_slopes_and_vectors_are_those_of_python(functions):
    shown = functions.evaluate(
        "schedules => schedules.map((name) => Array.from({length: 16}, (_, h) => slopes(h + 1, name)))",
        SCHEDULES,
    )
    for schedule, lists in zip(SCHEDULES, shown, strict=True):
        for num_heads, values in enumerate(lists, 1):
            assert values == linbias.slopes(num_heads, schedule).tolist()
    tokens = ["The", "mat", "dog", "\u05e9\u05dc\u05d5\u05dd", "e\u0301", '"', "\U0001f642"]
    heads = functions.evaluate(
        "([tokens, example]) => vectors(tokens, 5, example)", [tokens, data.example()]
    )
    for name, values in zip("qkv", explore.vectors(tokens, 5), strict=True):
        assert [head[name] for head in heads] == values.tolist()
