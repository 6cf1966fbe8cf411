"""The explorer in a real browser: every control, and every number against `linbias.explain`."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import linbias
from explorer_page import Explorer, chapters_table
from linbias import explore
from linbias.explore import data
from linbias.explore.bundle import bundle, read_module
from linbias.schedules import SCHEDULES
from linbias.variants import variant_slopes
from test_cli import run

WORDS = data.WORDS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    path.write_text(explore.page(), encoding="utf-8")
    return path


@pytest.fixture
def open_state(visit, file):
    """Open the explorer in a state, given as in the page's address."""

    def opened(options: dict[str, Any] | None = None, **state: object) -> Explorer:
        return Explorer(visit(file, urlencode(state), **(options or {})))

    return opened


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

HEADS = """
The 0.2879 0.3541 0.2148 0.0642 0.0790
cat 0.3791 0.1520 0.3791 0.0559 0.0339
sat 0.1003 0.1653 0.5527 0.0815 0.1003
on 0.0796 0.1312 0.2163 0.3566 0.2163
mat 0.0341 0.1140 0.1880 0.1528 0.5110

The 0.2142 0.3384 0.1299 0.2052 0.1122
cat 0.3002 0.1901 0.1480 0.2338 0.1279
sat 0.1077 0.2806 0.1776 0.2806 0.1534
on 0.1106 0.1421 0.0899 0.4750 0.1824
mat 0.1545 0.0978 0.1256 0.3271 0.2949

The 0.2510 0.3462 0.1724 0.1347 0.0956
cat 0.3397 0.1710 0.2636 0.1449 0.0809
sat 0.1040 0.2229 0.3652 0.1810 0.1268
on 0.0951 0.1366 0.1531 0.4158 0.1994
mat 0.0943 0.1059 0.1568 0.2400 0.4030
"""
OUTPUT = """
The 0.3274 0.3936 0.1861 0.2613
cat 0.3961 0.1689 0.2120 0.2977
sat 0.1504 0.2154 0.2544 0.3573
on 0.1877 0.2393 0.1811 0.5662
mat 0.2896 0.3695 0.2731 0.4746
"""
SCALED = """
The 0.0000 0.7071 0.7071 0.0000 0.7071
cat 1.4142 0.0000 1.4142 0.0000 0.0000
sat 0.7071 0.7071 1.4142 0.0000 0.7071
on 0.0000 0.0000 0.0000 0.0000 0.0000
mat 0.0000 0.7071 0.7071 0.0000 0.7071
"""
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
    # Rows "The" and "cat" step by step: the penalty, and the weights with and without the bias.
    page.choose_head("Head 1")
    assert page.bars() == {
        "The": ("0.2879", "0.1237"),
        "cat": ("0.3541", "0.2509"),
        "sat": ("0.2148", "0.2509"),
        "on": ("0.0642", "0.1237"),
        "mat": ("0.0790", "0.2509"),
    }
    page.choose_row("cat")
    assert [row[3] for row in page.table("Step by step")] == [
        "0.5000",
        "0.0000",
        "0.5000",
        "1.0000",
        "1.5000",
    ]


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
    {
        "variant": "causal",
        "schedule": "paper",
        "heads": 3,
        "head": 3,
        "row": 4,
        "text": " ".join(WORDS[:9]),
    },
    {
        "variant": "directional",
        "schedule": "mpt",
        "heads": 6,
        "head": 5,
        "row": 2,
        "text": " ".join(WORDS[:7]),
    },
    {
        "variant": "asymmetric",
        "schedule": "geometric",
        "heads": 5,
        "head": 2,
        "left": "2:0.3",
        "right": "2:1.7",
    },
    {"variant": "symmetric", "left": "1:0 2:0", "row": 3},
    {
        "variant": "causal",
        "schedule": "paper",
        "heads": 16,
        "head": 7,
        "row": 64,
        "text": " ".join(WORDS),
    },
]


def explained(state: dict[str, Any]) -> tuple[linbias.Explanation, list[str]]:
    """The same by Python: slopes by name, those set by hand instead, and a right side a quarter as steep."""
    variant, num_heads = state.get("variant", "symmetric"), state.get("heads", 2)
    left, right = variant_slopes("test", variant, num_heads, state.get("schedule", "halving"))
    if variant == "asymmetric":
        right = [slope / 4 for slope in right]
    for side, slopes in (("left", left), ("right", right)):
        for head, slope in re.findall(r"(\d+):(\S+)", state.get(side, "")):
            slopes[int(head) - 1] = float(slope)
    if variant == "symmetric":
        right = left
    tokens = state.get("text", " ".join(WORDS[:5])).split()
    q, k, v = explore.vectors(tokens, num_heads)
    causal = variant == "causal"
    return linbias.explain(q, k, v, left, causal=causal, right=None if causal else right), tokens


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.get("variant", "start"))
def test_numbers_equal_explain(open_state, state):
    page = open_state(**state)
    trace, tokens = explained(state)
    head, row = state.get("head", 1) - 1, state.get("row", 1) - 1
    printed = trace.table(query=row, head=head, tokens=tokens).splitlines()
    assert page.table("Step by step") == [line.split() for line in printed[2:-1]]
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
        "bias": 0.0 - trace.penalty,
        "scores": trace.biased,
        "weights": trace.weight,
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
    mean = trace.weight.mean(0)
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
    values = [
        0.0,
        -0.0,
        0.5,
        1 / 32,
        3 / 32,
        -1 / 32,
        2.0**-9,
        3 * 2.0**-9,
        0.1,
        9.99995,
        999999.5,
        1e-5,
        1e22,
    ]
    values += [
        123456789.0,
        1e6,
        1e5,
        0.00001234565,
        -2.5,
        0.96875,
        *rng.normal(size=200),
        *(2.0 ** -np.arange(16)),
    ]
    values += (
        rng.integers(-500, 500, 200) / 64
    ).tolist()  # many lie halfway between two numbers of four digits
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


# Controls


def test_the_slider_overrides_the_slope_of_one_head(open_state):
    page = open_state()
    slider = page.page.get_by_role("slider", name="Slope")
    slider.press("ArrowLeft")
    slope = 2 ** (-1 - 1 / 8)
    assert slider.get_attribute("aria-valuetext") == f"{slope:g}"
    assert [row[1] for row in page.table("Slopes")] == [f"{slope:g}", "0.25"]
    page.choose_head("Head 2")
    assert slider.get_attribute("aria-valuetext") == "0.25"
    page.page.get_by_role("button", name="Back to the schedule").click()
    assert [row[1] for row in page.table("Slopes")] == ["0.5", "0.25"]
    page.page.get_by_role("switch", name="One slope for all heads").check()
    assert [row[1] for row in page.table("Slopes")] == ["0.25", "0.25"]
    slider.press("End")
    assert [row[1] for row in page.table("Slopes")] == ["2", "2"]


TYPED = [
    ("1/8", "0.125", ""),
    ("0.3", "0.3", ""),
    ("0", "0", ""),
    ("-1", "0", "Must be at least 0, got -1; still 0."),
    ("steep", "0", 'Must be a number, got "steep"; still 0.'),
    ("", "0", 'Must be a number, got ""; still 0.'),
    ("1/0", "0", 'Must be a number, got "1/0"; still 0.'),
    (" .25 ", "0.25", ""),
    ("1001", "0.25", "Must be at most 1000, got 1001; still 0.25."),
    ("<b>1", "0.25", 'Must be a number, got "<b>1"; still 0.25.'),
]


def test_a_slope_can_be_typed_and_a_bad_one_changes_nothing(open_state):
    page = open_state()
    field = page.page.get_by_role("textbox", name="Slope, exact")
    for typed, slope, message in TYPED:
        field.fill(typed)
        field.blur()
        assert page.table("Slopes")[0][1] == slope, typed
        alerts = page.page.get_by_role("alert").all_inner_texts()
        assert [alert for alert in alerts if alert] == [message] * bool(message)
        assert field.get_attribute("aria-invalid") == ("true" if message else None)


def test_sides_schedule_and_number_of_heads(open_state):
    page = open_state()
    page.choose("Sides", "causal")
    page.choose("Slope schedule", "paper")
    page.page.get_by_role("textbox", name="Number of heads, exact").fill("3")
    assert [row[1] for row in page.table("Slopes")] == [f"{x:g}" for x in linbias.slopes(3)]
    page.choose("Show", "bias")
    assert page.cells()[0][1:] == ["0.0000", *["-inf"] * 4]
    page.choose("Sides", "directional")  # which asks for an even number
    assert [row[0] for row in page.table("Slopes")] == ["1 left", "2 left", "3 right", "4 right"]
    page.choose_head("Head 3")
    assert page.cells()[4][1:] == [*["-inf"] * 4, "0.0000"]
    assert page.page.get_by_role("slider", name="Slope to the right").count() == 1
    page.choose("Sides", "asymmetric")
    page.page.get_by_role("textbox", name="Slope to the right, exact").fill("2")
    page.page.get_by_role("textbox", name="Slope to the left, exact").fill("1")
    assert page.cells()[2][1:] == ["-2.0000", "-1.0000", "0.0000", "-2.0000", "-4.0000"]


def test_tokens_are_edited_counted_and_cut(open_state):
    page = open_state()
    text = page.page.get_by_role("textbox", name=re.compile("^Text"))
    length = page.page.get_by_role("textbox", name="Tokens, exact")
    length.fill("10")
    assert text.input_value().split() == WORDS[:10]
    # The chapter's vectors stay; what Python makes of the others, the page makes, too.
    trace, _ = explained({"text": " ".join(WORDS[:10])})
    assert page.cells()[1][1:] == [f"{x:.4f}" for x in trace.weight[0, 1]]
    assert "linbias.explore.vectors" in page.page.locator(".text .note").inner_text()
    message = page.page.locator(".text .message").first
    text.fill("")
    assert message.inner_text() == "Needs at least one token."
    assert len(page.cells()) == 10
    text.fill("word " * 70 + "x" * 50)
    assert message.inner_text() == "Cut to the first 64 of 71 tokens."
    assert length.input_value() == "64"
    text.fill("\U0001f642" * 33)
    assert message.inner_text() == "Tokens longer than 32 characters are cut."
    assert page.table("The matrix as a table") == [["\U0001f642" * 32, "1.0000"]]


NAUGHTY = [
    "<img src=x onerror=alert(1)>",
    "</script><b>",
    '"quotes"',
    "'&amp;",
    "\u05e9\u05dc\u05d5\u05dd",
    "e\u0301\u0301\u0301",
    "$data",
]


def test_tokens_are_text_and_never_markup(open_state):
    tokens = [token.replace(" ", "\u2007") for token in NAUGHTY]  # a figure space would split them
    tokens = [token.replace("\u2007", "/") for token in tokens]
    page = open_state(text=" ".join(tokens))
    text = page.page.get_by_role("textbox", name=re.compile("^Text"))
    for _ in range(2):
        assert [row[0] for row in page.table("The matrix as a table")] == tokens
        assert page.page.get_by_role("columnheader", name=tokens[0], exact=True).count() > 0
        page.choose_row(tokens[1])
        assert page.page.locator(".row-panel h3").inner_text() == f"Query {tokens[1]}"
        tokens = tokens[::-1]
        text.fill(" ".join(tokens))
    assert (
        page.page.locator("img, b:not(.track b), script:not(#data)").count() == 1
    )  # the page's own script


def test_data_cannot_leave_their_element(visit, tmp_path):
    results = {
        "name": "</script><script>document.title = 'broken'</script><!--",
        "other": "\u2028 \\u003c",
    }
    text = explore.page(results=results)
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    page = visit(path)
    assert page.title() == "linbias explore"
    found = page.evaluate("JSON.parse(document.getElementById('data').textContent).results")
    assert found == results
    with pytest.raises(ValueError, match="not JSON compliant"):
        explore.page(results={"loss": float("nan")})


def test_with_and_without_bias_stand_side_by_side(open_state):
    page = open_state()
    page.page.get_by_role("switch", name="Without bias beside it").check()
    assert page.page.get_by_role("grid").count() == 2
    assert page.cells(1)[3][1:] == ["0.2000"] * 5  # the chapter: a query of zeros
    page.choose("Show", "scores")
    assert page.cells(1) == chapters_table(SCALED)
    page.page.get_by_role("grid").nth(1).get_by_role("row").nth(5).click()
    assert page.page.locator(".row-panel h3").inner_text() == "Query mat"


def test_the_matrix_is_walked_by_keyboard(open_state):
    page = open_state()
    rows = page.page.get_by_role("grid").get_by_role("row")
    rows.nth(1).focus()
    said = page.page.get_by_role("status")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowDown")
    assert rows.nth(3).get_attribute("aria-selected") == "true"
    assert rows.nth(3).evaluate("row => row === document.activeElement")
    assert "Query sat, Head 1: most weight on sat, 0.5527" in said.all_inner_texts()
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowRight")
    assert "sat to cat: 0.1653" in said.all_inner_texts()
    page.page.keyboard.press("End")
    assert rows.nth(5).get_attribute("aria-selected") == "true"
    page.page.keyboard.press("Home")
    assert rows.nth(1).get_attribute("aria-selected") == "true"
    assert [row.get_attribute("tabindex") for row in rows.all()[1:]] == [
        "0",
        "-1",
        "-1",
        "-1",
        "-1",
    ]
    assert rows.nth(1).get_attribute("aria-label") == "The: largest 0.3541 at cat"


def test_every_control_is_reached_by_tab_and_has_a_name(open_state):
    page = open_state()
    found = []
    for _ in range(40):
        page.page.keyboard.press("Tab")
        name = page.page.evaluate(
            """() => {
              const at = document.activeElement;
              if (at === document.body) return null;
              const label = at.labels?.[0]?.innerText ?? at.getAttribute("aria-label") ?? at.innerText;
              return `${at.tagName} ${label.trim()}`;
            }"""
        )
        if name is None:
            break
        found.append(name)
    assert [name for name in found if len(name.split()) < 2] == []
    wanted = (
        "Bias",
        "Text",
        "Tokens",
        "Slope",
        "One slope",
        "symmetric",
        "halving",
        "Number of heads",
        "weights",
    )
    wanted = (
        *wanted,
        "Without bias",
        "Step by step",
        "Outputs",
        "Slopes",
        "In Python",
        "The matrix",
        "Inputs",
    )
    for words in wanted:
        assert any(words in name for name in found), (words, found)


def test_the_state_stands_in_the_address(open_state, visit, file):
    page = open_state()
    page.choose("Sides", "asymmetric")
    page.page.get_by_role("textbox", name=re.compile("^Text")).fill("a & b=c # d%")
    page.choose_head("Head 2")
    page.page.get_by_role("textbox", name="Slope to the right, exact").fill("0.3")
    page.choose("Show", "bias")
    page.choose_row("#")
    shown = page.cells()
    page.page.wait_for_timeout(90)  # the address follows the picture after 60 ms
    again = Explorer(visit(file, page.page.evaluate("location.hash.slice(1)")))
    assert again.cells() == shown
    assert again.page.locator(".row-panel h3").inner_text() == "Query #"
    # A state that makes no sense shows the start.
    again = open_state(
        text=" ", heads="99", head="7", row="x", variant="up", left="1:-3 2:nan", quantity="?"
    )
    assert again.cells() == chapters_table(HEADS.split("\n\n")[0])


def test_light_and_dark(open_state):
    page = open_state(options={"color_scheme": "dark"})
    ground = "getComputedStyle(document.querySelector('.explore')).backgroundColor"
    picture = "document.querySelector('.heatmap canvas').toDataURL()"
    dark, dark_picture = page.page.evaluate(ground), page.page.evaluate(picture)
    page.choose("Theme", "light")
    assert page.page.evaluate(ground) != dark
    assert page.page.evaluate(picture) != dark_picture
    page.choose("Theme", "auto")
    assert page.page.evaluate(picture) == dark_picture
    page.page.emulate_media(color_scheme="light")
    assert page.page.evaluate(ground) != dark


PLACES = """() => [...document.querySelectorAll(".control, figure, details, .row-panel")].filter((part) => part.offsetParent).map((part) => {
  const { top, left, width, height } = part.getBoundingClientRect();
  return [top + scrollY, left, width, height];
})"""
SHIFT = """() => new Promise((done) => {
  new PerformanceObserver((list) => done(list.getEntries().reduce((sum, entry) => sum + entry.value, 0)))
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(0), 50);
})"""


def test_the_page_fits_every_width_and_nothing_jumps(open_state):
    phone = {"viewport": {"width": 360, "height": 800}}
    page = open_state(phone, text=" ".join(WORDS), heads=16, compare="true")
    assert page.page.evaluate(SHIFT) == 0
    slider = page.page.get_by_role("slider", name="Slope")
    for width in (360, 768, 1280, 1600):
        page.page.set_viewport_size({"width": width, "height": 800})
        assert page.page.evaluate("document.documentElement.scrollWidth") == width
        places = page.page.evaluate(PLACES)
        for key in ("ArrowLeft", "Home"):
            slider.press(key)
        page.page.wait_for_timeout(90)  # until the tables have followed
        assert page.page.evaluate(PLACES) == places


def test_without_scripts_a_picture_and_the_tables_remain(visit, file):
    page = visit(file, java_script_enabled=False)
    assert page.locator("noscript svg rect").count() == 50
    tables = page.locator("noscript table").all()
    shown = [chapters_table(table.locator("tbody").inner_text()) for table in tables]
    assert shown[:3] == [chapters_table(table) for table in HEADS.split("\n\n")]
    assert shown[3] == chapters_table(OUTPUT)
    assert shown[4][7] == ["8", "0.00390625", "-0.0390625", "Near-global"]


def test_the_page_is_one_small_file():
    text = explore.page()
    assert len(text.encode()) < 1_000_000
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


# Modules joined


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.js": 'import { x } from "./b.js";\n', "b.js": "const x = 1;\n"}, "a.js imports x, which b.js does not export"),
        (
            {"a.js": 'import { x } from "./b.js";\nconst y = 1;\n', "b.js": "export const x = 1;\nconst y = 2;\n"},
            "names must be unique, got y in b.js and a.js",
        ),
        (
            {"a.js": 'import { b } from "./b.js";\nexport const a = 1;\n', "b.js": 'import { a } from "./a.js";\nexport const b = 1;\n'},
            "modules must not import each other, got a.js -> b.js -> a.js",
        ),
        ({"a.js": 'import x from "y";\n'}, "a.js has a line that cannot be joined"),
        ({"a.js": "export default 1;\n"}, "a.js has a line that cannot be joined"),
        ({"a.js": "const { x } = y;\n"}, "a.js has a line that cannot be joined"),
        ({"a.js": "f('</script>');\n"}, "a.js has a line that cannot be joined"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_joined_are_refused(files, message):
    with pytest.raises(ValueError, match=re.escape(f"bundle: {message}")):
        bundle("a.js", files.__getitem__)


# In a notebook

MODEL = """({ data, style, state }) => {
  const values = { data, style, state };
  const listeners = [];
  return globalThis.model = {
    get: (name) => values[name],
    set(name, value) { values[name] = value; listeners.forEach((listener) => listener()); },
    save_changes() {},
    on: (event, listener) => listeners.push(listener),
  };
}"""


def test_the_widget_draws_itself_and_shares_its_state(chromium):
    pytest.importorskip("anywidget")
    widget = explore.widget(state="head=2")
    page = chromium.new_page()
    page.add_script_tag(
        content=widget._esm.replace("export default", "globalThis.widget ="), type="module"
    )
    page.wait_for_function("() => globalThis.widget")
    page.evaluate(MODEL, {"data": widget.data, "style": widget.style, "state": widget.state})
    page.evaluate(
        "const el = document.createElement('div'); document.body.append(el); widget.render({ model, el })"
    )
    shown = Explorer(page)
    heads = [chapters_table(table) for table in HEADS.split("\n\n")]
    assert shown.cells() == heads[1]
    shown.choose_row("sat")
    page.wait_for_function("() => model.get('state') === 'head=2&row=3'")
    page.evaluate("model.set('state', 'row=2')")
    assert shown.cells() == heads[0]
    assert page.locator(".row-panel h3").inner_text() == "Query cat"
    page.close()


def test_a_missing_anywidget_is_named(monkeypatch):
    monkeypatch.setattr("linbias._extras._is_installed", lambda package: False)
    monkeypatch.delitem(__import__("sys").modules, "linbias.explore.notebook", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'linbias\[notebook\]'"):
        explore.widget()


# The command


def test_the_command_writes_the_page_and_opens_it(monkeypatch, tmp_path):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    path = tmp_path / "new folder" / "page.html"
    assert run("explore", "-o", path).exit_code == 0
    assert opened == [path.as_uri()]
    assert path.read_text(encoding="utf-8") == explore.page()
    assert run("explore", "-o", path, "--no-open").exit_code == 0
    assert len(opened) == 1
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    result = run("explore", "-o", path)
    assert (result.exit_code, "found no browser" in result.output) == (2, True)
    result = run("explore", "-o", tmp_path)
    assert (result.exit_code, "--output must be a file" in result.output) == (2, True)


def test_vectors_name_what_they_lack():
    with pytest.raises(
        ValueError, match="vectors: needs tokens and heads, got 0 tokens and num_heads=2"
    ):
        explore.vectors([], 2)
