"""The explorer's numbers, in a real browser: the book chapter's tables, and `linbias.explain` to
the last digit.
"""

import numpy as np
import pytest

import linbias
from explorer_page import explained, printed, ran
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
        'import { slopes, vectors } from "./attention.js";\n'
        "Object.assign(globalThis, { fixed, general, slopes, vectors });\n"
    )
    page = chromium.new_page()
    read = {"probe.js": probe}
    page.evaluate(bundle("probe.js", lambda name: read.get(name) or read_module(name)))
    yield page
    page.close()


def test_the_chapters_slopes_are_in_the_page(open_state):
    page = open_state(heads=8, left="6:0")
    rows = page.table("Slopes")
    assert [row[:5] for row in (*rows[:4], *rows[6:])] == [
        ["0", "0.5", "1/2", "\u22125", "Ultra-local"],
        ["1", "0.25", "1/4", "\u22122.5", "Local"],
        ["2", "0.125", "1/8", "\u22121.25", "Medium-range"],
        ["3", "0.0625", "1/16", "\u22120.625", "Broad"],
        ["6", "0", "", "0", "Global"],
        ["7", "0.00390625", "1/256", "\u22120.0390625", "Near-global"],
    ]


# Numbers against Python, to the last printed digit

STATES = [
    ("start", {}),
    ("symmetric", {"left": "0:0"}),  # plain attention
    ("causal", {"schedule": "paper", "heads": 3, "head": 2, "row": 3, "text": WORDS[:9]}),
    ("directional", {"schedule": "mpt", "heads": 6, "head": 4, "row": 1, "text": WORDS[:7]}),
    (
        "asymmetric",
        {"schedule": "geometric", "heads": 5, "head": 1, "left": "1:0.3", "right": "1:1.7"},
    ),
]


@pytest.mark.parametrize(("variant", "changes"), STATES)
def test_numbers_equal_explain(open_state, variant, changes):
    state = {} if variant == "start" else {"variant": variant, **changes}
    if "text" in state:
        state["text"] = " ".join(state["text"])
    page = open_state(**state)
    trace, tokens = explained(state)
    head, row = state.get("head", 0), state.get("row", 1)
    plain, _ = explained({**state, "left": slopes_of_0(trace), "right": slopes_of_0(trace)})
    columns = [trace.raw, trace.scaled, trace.bias, trace.scores, trace.weights, plain.weights]
    rows = zip(*(values[head, row] for values in columns), strict=True)
    shown = page.locator(".row-table tbody tr").evaluate_all(
        "rows => rows.map(({ cells }) => [...cells].slice(1, 7).map((cell) => cell.textContent))"
    )
    assert shown == [[printed(x) for x in numbers] for numbers in rows]
    after = page.locator(".row-panel .after").inner_text()
    outputs = "\u2002".join(printed(x) for x in trace.output[head, row])
    assert f"output [{outputs}]" in after
    assert f"log-sum-exp {printed(trace.lse[head, row])}" in after
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy code").click()
    page.get_by_role("button", name="Code copied").wait_for()
    code = page.evaluate("navigator.clipboard.readText()")
    assert ran(code)[1] == trace.table(query=row, head=head, tokens=tokens) + "\n"
    weights = zip(tokens, trace.weights[head], strict=True)
    assert page.table("Weights as a table") == [[t, *map(printed, row)] for t, row in weights]
    for grid, matrix in enumerate((trace.scaled, trace.bias, trace.weights)):
        assert page.cells(grid) == [
            [token, *(printed(x, 2) for x in row)]
            for token, row in zip(tokens, matrix[head], strict=True)
        ]


def slopes_of_0(trace):
    """In the form of the address; sides that are hidden stay so."""
    return " ".join(f"{head}:0" for head in range(len(trace.slopes)))


def test_numbers_are_rounded_as_python_rounds(functions):
    rng = np.random.default_rng(0)
    values = [0.0, -0.0, 0.5, 1 / 32, 3 / 32, -1 / 32, 2.0**-9, 3 * 2.0**-9, 0.1, 9.99995]
    values += [999999.5, 1e-5, 1e22, 123456789.0, 1e6, 1e5, 0.00001234565, -2.5, 0.96875]
    # Many of these lie halfway.
    values += [*rng.normal(size=200), *2.0 ** -np.arange(16), *rng.integers(-500, 500, 200) / 64]
    # NaN and infinity are no JSON, but Playwright carries them.
    values += [float("inf"), -float("inf"), float("nan")]
    values = [float(value) for value in values]
    shown = functions.evaluate("values => values.map((x) => [fixed(x), general(x)])", values)
    assert shown == [[f"{x:.4f}", f"{x:g}"] for x in values]


def test_slopes_and_vectors_are_those_of_python(functions):
    all_slopes = "(name) => Array.from({ length: 16 }, (_, h) => slopes(h + 1, name))"
    shown = functions.evaluate(f"schedules => schedules.map({all_slopes})", SCHEDULES)
    for schedule, lists in zip(SCHEDULES, shown, strict=True):
        for num_heads, values in enumerate(lists, 1):
            assert values == linbias.slopes(num_heads, schedule).tolist()
    tokens = ["The", "mat", "dog", "\u05e9\u05dc\u05d5\u05dd", "e\u0301", '"', "\U0001f642"]
    vectors = "([tokens, example]) => vectors(tokens, 5, example)"
    heads = functions.evaluate(vectors, [tokens, data.example()])
    for name, values in zip("qkv", explore.vectors(tokens, 5), strict=True):
        assert [head[name] for head in heads] == values.tolist()


# The modules of the page, joined

A, B = 'import { a } from "./a.js";', 'import { x } from "./b.js";'
OTHER_LINES = ['import x from "y";', "export default 1;", "const { x } = y;", "f('</script>');"]
REFUSED = [
    ([B], ["const x = 1;"], "a.js imports x, which b.js does not export"),
    ([B, "const y = 1;"], ["export const x = 1;", "const y = 2;"], "names must be unique, got y"),
    ([B, "export const a = 1;"], [A, "export const x = 1;"], "modules must not import each other"),
    *(([line], [], "a.js has a line that cannot be joined") for line in OTHER_LINES),
]


@pytest.mark.parametrize(("first", "second", "message"), REFUSED)
def test_modules_that_cannot_be_joined_are_refused(first, second, message):
    files = {"a.js": first, "b.js": second}
    with pytest.raises(ValueError, match=f"^bundle: {message}"):
        bundle("a.js", lambda name: "".join(f"{line}\n" for line in files[name]))
