"""The explorer's views of results and of near to far: their data, and their numbers in a real
browser.
"""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linbias
from linbias import explore, near_to_far
from linbias.explore import data
from linbias.lm import read_results
from linbias.lm.report.records import ExtrapolationResults
from linbias.lm.settings import ExtrapolateSettings
from linbias.methods import METHODS
from test_lm_findings import record

ROOT = Path(__file__).parents[2]
JS = ROOT / "src" / "linbias" / "explore" / "js"
SIZE = 16  # of the heads in the view of near to far


# Near to far: the page's algorithm and its random numbers


def normals(stream: int, count: int) -> np.ndarray:
    """What near_to_far.js calls by this name."""
    bits = ((stream + 1) * 0x9E3779B9 + np.arange(count, dtype=np.uint64)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ bits >> shift) * factor & 0xFFFFFFFF
    bits ^= bits >> 16
    return (sum(bits >> 8 * byte & 255 for byte in range(4)).astype(np.int64) - 510) / 147.8


def heads(num_heads: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """q and k [H, T, D] of the page."""
    streams = [normals(i, length * SIZE).reshape(length, SIZE) for i in range(2 * num_heads)]
    return np.stack(streams[::2]), np.stack(streams[1::2])


def truth(
    length, position, left, tolerance, block, causal, times=1
) -> tuple[list[Any], np.ndarray]:
    """The tile of each head, and what it leaves out."""
    q, k = heads(len(left), length)
    row = times * q[:, position : position + 1]
    options = {"causal": causal, "query_start": position}
    visit = near_to_far.attention(
        row, k, k, left, tolerance=tolerance, rows=1, keys=block, **options
    )
    tiles = [head[0] for head in visit.tiles[0]]
    ends = [[[getattr(tile, name)] for tile in tiles] for name in ("first", "end")]
    return tiles, near_to_far.share_outside(row, k, *ends, left, **options)[:, 0]


@pytest.mark.parametrize(
    ("length", "position", "left", "tolerance", "block", "causal", "times"),
    [
        (512, 511, [0.5, 0.25, 0.004], 2.0**-24, 16, True, 1),
        (300, 120, [1.0, 0.125, 0.03], 2.0**-12, 32, False, 1),  # both sides, uneven last blocks
        (300, 120, [0.2, 0.125, 0.03], 2.0**-24, 8, False, 1),
        (512, 500, [0.5, 0.25, 4.0], 2.0**-24, 16, False, 7),  # scores too large for one term
        (512, 511, [0.5], 2.0**-25, 16, True, 1),  # below rounding all is precise
        (64, 0, [0.5], 2.0**-53, 8, True, 1),  # no key before the query
        (256, 200, [0.5, 0.0], 0.0, 16, False, 1),  # nothing may be left out
        (256, 255, [0.5, 0.0], 0.25, 64, True, 1),  # no slope
    ],
)
def test_the_page_reads_what_near_to_far_reads(
    chromium, length, position, left, tolerance, block, causal, times
):
    page = chromium.new_page()
    module = base64.b64encode((JS / "near_to_far.js").read_bytes()).decode()
    found = page.evaluate(
        """async ([module, size, length, position, left, tolerance, block, causal, times]) => {
            const js = await import("data:text/javascript;base64," + module);
            return left.map((slope, head) => {
                const row = js.normals(2 * head, size, position * size);
                const query = row.map((value) => value * times * size ** -0.5);
                const keys = js.normals(2 * head + 1, length * size);
                const made = js.prepareQuery({ query, keys, position });
                const slopes = [slope, causal ? Infinity : slope];
                const window = js.windowOf(slope, made, tolerance);
                const visible = js.numVisible(made, slopes);
                return { ...js.visit(made, { slopes, tolerance, block }), window, visible };
            });
        }""",
        [module, SIZE, length, position, left, tolerance, block, causal, times],
    )
    page.close()
    tiles, left_out = truth(length, position, left, tolerance, block, causal, times)
    q, k = heads(len(left), length)
    for h, (tile, js) in enumerate(zip(tiles, found, strict=True)):
        assert (js["first"], js["end"]) == (tile.first, tile.end)
        assert js["visible"] == (position + 1 if causal else length)
        names = ("side", "first", "end", "stop")
        steps = [tuple(step[name] for name in names) for step in js["steps"]]
        assert steps == [(s.side, s.first, s.end, s.terms == 0) for s in tile.steps]
        bounds = [s.bound for s in tile.steps]
        np.testing.assert_allclose([s["bound"] for s in js["steps"]], bounds, rtol=1e-10)
        np.testing.assert_allclose(js["leftOut"], left_out[h], rtol=1e-10)
        for side in {s.side for s in tile.steps}:
            stopped = any(s.terms == 0 for s in tile.steps if s.side == side)
            assert js["ended"][side] == ("bound" if stopped else "keys")
        if tolerance and left[h]:
            norms = times * np.linalg.norm(q[h, position]), np.linalg.norm(k[h], axis=1).max()
            lead = 2 * SIZE**-0.5 * norms[0] * norms[1]
            reach = near_to_far.reach(left[h], lead, tolerance=tolerance, num_keys=length)
            np.testing.assert_allclose(js["window"], reach, rtol=1e-12)


RAISED = str.maketrans(
    "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789"
)


def number(text: str) -> float:
    """What the page writes as 1.23 x 10 with a raised -4, or 1,234."""
    return float(re.sub(r"\s\u00d7\s10", "e", text.replace(",", "")).translate(RAISED))


def open_view(visit, file: Path, name: str, **options: Any) -> tuple[Any, Any]:
    """The page, and the panel of one view."""
    page = visit(file, **options)
    page.get_by_role("tab", name=name).click()
    return page, page.get_by_role("tabpanel", name=name)


def strip_numbers(panel) -> list[tuple[int, int, float]]:
    """Of each head: keys read, keys seen, what is left out."""

    def numbers(row):
        count, left_out = (
            row.locator(f".strip-{name}").inner_text().replace(",", "")
            for name in ("count", "left")
        )
        return (*map(int, count.split(" of ")), number(left_out))

    return [numbers(row) for row in panel.get_by_role("radio", name=re.compile("^Head ")).all()]


def assert_shows(panel, length, position, left, tolerance, block, causal=True) -> None:
    tiles, left_out = truth(length, position, left, tolerance, block, causal)
    visible = position + 1 if causal else length
    shown = strip_numbers(panel)
    assert [row[:2] for row in shown] == [(t.end - t.first, visible) for t in tiles]
    np.testing.assert_allclose([row[2] for row in shown], left_out, rtol=0.05)  # two digits
    read = sum(tile.end - tile.first for tile in tiles)
    headline = panel.locator(".headline").inner_text()
    assert f"reads {read:,} of {visible * len(left):,} keys" in headline
    share = float(re.match(r"([\d.]+)%", headline)[1])
    assert share == pytest.approx(100 * read / (visible * len(left)), abs=0.5)


def test_every_control_of_near_to_far(visit, explorer_file):
    page, panel = open_view(visit, explorer_file, "Cost")
    left = linbias.slopes(8).tolist()
    assert_shows(panel, 2048, 2047, left, 2.0**-24, 16)

    def choose(group: str, value: str) -> None:
        panel.get_by_role("group", name=group).get_by_role("radio", name=value, exact=True).click()

    choose("Length", "512")  # the query stays at the end
    assert_shows(panel, 512, 511, left, 2.0**-24, 16)
    assert panel.get_by_label("Query at key, exact").input_value() == "511"
    choose("Heads", "4")
    left = linbias.slopes(4).tolist()
    choose("Keys of a block", "32")
    assert_shows(panel, 512, 511, left, 2.0**-24, 32)
    panel.get_by_label("Query at key, exact").fill("300")
    panel.get_by_label("Tolerance, exact").fill("2^-12")
    assert_shows(panel, 512, 300, left, 2.0**-12, 32)
    choose("Query sees", "both sides")
    assert_shows(panel, 512, 300, left, 2.0**-12, 32, causal=False)
    panel.get_by_label("Tolerance", exact=True).focus()
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
    assert_shows(panel, 512, 300, left, 2.0**-20, 32, causal=False)
    panel.get_by_role("radio", name="Head 1, slope 1/16").click()
    panel.get_by_label("Slope of the head, exact").fill("3/4")
    assert_shows(panel, 512, 300, [left[0], 0.75, *left[2:]], 2.0**-20, 32, causal=False)
    panel.get_by_label("Slope of the head, exact").fill("0")
    assert "no key is too far to matter" in panel.locator(".story").inner_text()
    panel.get_by_role("button", name="Reset slope").click()
    panel.get_by_label("Tolerance, exact").fill("0")
    assert "nothing may be left out" in panel.locator(".story").inner_text()
    assert_shows(panel, 512, 300, left, 0.0, 32, causal=False)


def test_a_tolerance_that_cannot_be_is_refused_in_words(visit, explorer_file):
    panel = visit(explorer_file, "view=cost&length=256&heads=1").get_by_role("tabpanel")
    field = panel.get_by_label("Tolerance, exact")
    for text in ("-1", "0.5", "2^9", "x", ""):
        field.fill("2^-24")
        assert panel.get_by_text("Must be").count() == 0
        field.fill(text)
        assert panel.get_by_text("Must be").inner_text().endswith("; still 2^-24.")
    assert_shows(panel, 256, 255, linbias.slopes(1).tolist(), 2.0**-24, 16)


def test_the_bounds_of_a_head_are_the_oracles(visit, explorer_file):
    page, panel = open_view(visit, explorer_file, "Cost")
    panel.get_by_role("radio", name="Head 2, ").press("ArrowUp")
    assert panel.get_by_role("radio", name="Head 1").get_attribute("aria-checked") == "true"
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Head 1")
    (_, tile), (_, left_out) = truth(2048, 2047, [0.5, 0.25], 2.0**-24, 16, True)
    # The chart's cursor stands at the stop; its keys walk the steps.
    chart = panel.get_by_role("slider", name=re.compile("^The bound on all keys"))
    for step in reversed(tile.steps):
        text = chart.get_attribute("aria-valuetext")
        assert text.startswith(f"key {step.end - 1:,} and all beyond: at most ")
        most, really = re.search(r"at most (.*), really (.*)", text).groups()
        assert number(most) == pytest.approx(min(1, np.exp(step.bound)), rel=6e-3)
        if step.terms == 0:
            assert number(really) == pytest.approx(left_out, rel=6e-3)
        assert number(really) <= number(most)
        chart.press("ArrowRight")


def test_the_share_falls_as_the_text_grows(visit, explorer_file):
    _, panel = open_view(visit, explorer_file, "Cost")
    chart = panel.get_by_role("slider", name=re.compile("^Keys read by the last query"))
    for key, length in (("Home", 256), ("End", 4096)):
        chart.press(key)
        tiles, _ = truth(length, length - 1, linbias.slopes(8), 2.0**-24, 16, True)
        read = sum(tile.end - tile.first for tile in tiles)
        text = chart.get_attribute("aria-valuetext")
        assert text == f"at {length:,} tokens: every key {8 * length:,}, near to far {read:,}"


# Results


def test_the_package_holds_the_run_of_the_documentation():
    (run,) = data.results()["runs"]
    page = (ROOT / "docs/guides/train-short.md").read_text(encoding="utf-8")
    table = page.partition("<!-- extrapolation:")[2].partition("<!-- /extrapolation -->")[0]
    assert f"`{run['made']['command']}`" in table
    (group,) = run["groups"]
    for line in group["lines"]:
        found = {point["x"]: f"{point['y']:.3f}" for point in line["lengths"]}
        cells = [found.get(length, "-") for length in group["test_lengths"]]
        assert f"| {METHODS[line['method']].label} | {' | '.join(cells)} |" in table
    assert {line["method"]: line["limit"] for line in group["lines"]}["learned"] == 128


def test_losses_by_length_follow_the_cursor_and_the_switches(visit, explorer_file):
    page, panel = open_view(visit, explorer_file, "Results")
    (group,) = data.results()["runs"][0]["groups"]
    chart = panel.get_by_role("slider", name="Loss by test length")
    positions = panel.get_by_role("slider", name="Loss by position")

    def expected(length: int, off: str = "") -> set[str]:
        shown = set()
        for line in group["lines"]:
            at = {point["x"]: f"{point['y']:.3f}" for point in line["lengths"]}
            label = METHODS[line["method"]].label
            if label != off:
                shown.add(f"{label} {at.get(length, 'no rows past 128')}")
        return shown

    def shown() -> tuple[str, set[str]]:
        where, _, values = chart.get_attribute("aria-valuetext").partition(": ")
        return where, set(values.split(", "))

    assert shown() == ("at 4,096 tokens", expected(4096))
    chart.press("ArrowLeft")
    assert shown() == ("at 2,048 tokens", expected(2048))
    chart.press("Home")
    assert shown() == ("at 128 tokens", expected(128))
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.46 * box["width"], box["y"] + 80)
    assert shown() == ("at 512 tokens", expected(512))

    switch = panel.get_by_role("button", name=re.compile("^rotary")).first
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert shown() == ("at 512 tokens", expected(512, off="rotary"))
    assert "rotary" not in positions.get_attribute("aria-valuetext")  # off in both charts
    switch.press("Enter")
    assert shown() == ("at 512 tokens", expected(512))

    learned = "learned table: no rows past 128"
    assert panel.get_by_text(learned, exact=True).count() == 2  # the chapter's crash, in both
    rotary = next(line for line in group["lines"] if line["method"] == "rotary")
    positions.press("Home")
    text = positions.get_attribute("aria-valuetext")
    assert text.startswith("after 1 token: ")
    assert f"rotary {rotary['positions'][0]['y']:.2f}" in text


@pytest.mark.parametrize(
    ("read", "words"), [("lengths", "in segments"), ("sliding", "with a sliding window")]
)
def test_the_table_of_losses(visit, explorer_file, read, words):
    _, panel = open_view(visit, explorer_file, "Results")
    (group,) = data.results()["runs"][0]["groups"]
    panel.get_by_text(words, exact=True).click()
    rows = panel.get_by_role("row").all()[1:]
    for row, line in zip(rows, group["lines"], strict=True):
        cells = row.get_by_role("cell").all_inner_texts()
        at = {point["x"]: point["y"] for point in line[read]}
        assert cells[:-1] == [
            f"{at[length]:.3f}" if length in at else "no rows" for length in group["test_lengths"]
        ]
        if line["limit"] is None:
            change = float(cells[-1].strip("%").replace("\u2212", "-"))
            assert change == pytest.approx(100 * (at[4096] / at[128] - 1), abs=0.051)
    panel.get_by_text("How this was made").click()
    assert panel.get_by_text("python evidence/runs/extrapolation.py").is_visible()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of two training lengths and two seeds, one method of which diverges in its table."""
    settings = ExtrapolateSettings(
        methods=("alibi", "learned"), train_lengths=(4, 8), seeds=(0, 1)
    )
    evaluations = [
        replace(record("alibi", test_length, bits * (1 + seed), seed), train_length=length)
        for length in (4, 8)
        for seed in (0, 1)
        for test_length, bits in ((length, 1.0), (16, 0.5))
    ] + [record("learned", 4, float("inf"), seed) for seed in (0, 1)]
    results = ExtrapolationResults({"command": "<b>made</b>"}, settings, (), tuple(evaluations))
    folder = tmp_path / "<b>run"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results.to_dict()))
    return folder


def test_runs_are_means_and_ranges_over_seeds(run_folder):
    (run,) = read_results([run_folder])["runs"]
    first, second = run["groups"]
    assert (run["name"], run["num_seeds"]) == ("<b>run", 2)
    assert (first["test_lengths"], second["test_lengths"]) == ([4, 16], [8, 16])
    alibi, learned = first["lines"]
    assert alibi["lengths"][0] == {"x": 4, "y": 1.5, "low": 1.0, "high": 2.0}
    assert alibi["limit"] is None
    assert learned["limit"] == 4
    assert learned["lengths"] == [{"x": 4, "y": None, "low": None, "high": None}]
    assert [line["method"] for line in second["lines"]] == ["alibi"]
    assert alibi["positions"][-1]["y"] == pytest.approx(0.75, abs=1e-5)


def test_several_runs_are_chosen_by_name(visit, run_folder, tmp_path):
    path = tmp_path / "page.html"
    results = read_results([run_folder, run_folder])
    path.write_text(explore.page(results=results), encoding="utf-8")
    _, panel = open_view(visit, path, "Results")
    names = panel.get_by_role("group", name="Run").get_by_role("radio").all()
    assert len(names) == 2
    assert panel.get_by_text("<b>run").count() == 2  # text, never markup
    assert panel.locator("b").count() == 0
    trained = panel.get_by_role("group", name="Trained on, tokens")
    trained.get_by_role("radio", name="8", exact=True).click()
    assert "trained on 8 tokens" in panel.locator(".lede").inner_text()
    assert "Lines are means of up to 2 seeds" in panel.inner_text()
    chart = panel.get_by_role("slider", name=re.compile("^Loss by test length"))
    assert chart.locator(".band").count() == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("results.json", None, "no results.json"),
        ("results.jsonl", "{}", "not finished"),
        ("results.json", "[1", "damaged"),
        ("results.json", "[]", "damaged"),
        ("results.json", '{"made": {}, "settings": {}, "trainings": [{}]}', "damaged"),
    ],
)
def test_a_folder_without_results_is_refused(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^explore: results must be a folder.*{reason}"):
        read_results([tmp_path])


# All views


def test_a_link_shows_what_its_sender_saw(visit, explorer_file):
    link = "view=cost&length=512&heads=4&tolerance=-12&block=32&both=1&query=300&head=1&slope=0.75"
    page = visit(explorer_file, link)
    panel = page.get_by_role("tabpanel")
    left = linbias.slopes(4).tolist()
    expected = (512, 300, [left[0], 0.75, *left[2:]], 2.0**-12, 32, False)
    assert_shows(panel, *expected)
    panel.get_by_role("radio", name="32").check()  # nothing new, and the address stays
    panel.get_by_role("button", name="Reset slope").click()
    page.wait_for_url(lambda address: "slope" not in address)
    assert set(page.evaluate("location.hash.slice(1)").split("&")) == set(link.split("&")[:-1])

    bad = "view=cost&length=3&heads=x&tolerance=5&query=-1&head=99&slope=&both=2"
    panel = visit(explorer_file, bad).get_by_role("tabpanel")
    assert_shows(panel, 2048, 2047, linbias.slopes(8).tolist(), 2.0**-24, 16)
