"""The explorer's views of results, of near to far and of a model: their data, and their numbers in a real browser."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertLMHeadModel

import linbias
from linbias import explore, near_to_far
from linbias.data.dictionary import Dictionary
from linbias.data.tokenizers import byte_tokenizer
from linbias.data.words import save_word_tokenizer
from linbias.explore import model, results
from linbias.lm.settings import ExtrapolateSettings
from linbias.methods import METHODS
from linbias.models import (
    LinbiasConfig,
    LinbiasForCausalLM,
    PaperConfig,
    PaperForCausalLM,
    fuse,
    load,
)
from test_cli import run

ROOT = Path(__file__).parents[1]
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


def truth(length, position, left, tolerance, block, causal) -> tuple[list[Any], np.ndarray]:
    """The tile of each head, and what it leaves out."""
    q, k = heads(len(left), length)
    row = q[:, position : position + 1]
    options = {"causal": causal, "query_start": position}
    visit = near_to_far.attention(
        row, k, k, left, tolerance=tolerance, rows=1, keys=block, **options
    )
    tiles = [head[0] for head in visit.tiles[0]]
    ends = [[[getattr(tile, name)] for tile in tiles] for name in ("first", "end")]
    return tiles, near_to_far.share_outside(row, k, *ends, left, **options)[:, 0]


@pytest.mark.parametrize(
    ("length", "position", "left", "tolerance", "block", "causal"),
    [
        (512, 511, [0.5, 0.25, 0.004], 2.0**-24, 16, True),
        (300, 120, [1.0, 0.125, 0.03], 2.0**-12, 32, False),  # both sides, uneven last blocks
        (64, 0, [0.5], 2.0**-53, 8, True),  # no key before the query
        (256, 200, [0.5, 0.0], 0.0, 16, False),  # nothing may be left out
        (256, 255, [0.5, 0.0], 0.25, 64, True),  # no slope
    ],
)
def test_the_page_reads_what_near_to_far_reads(
    chromium, length, position, left, tolerance, block, causal
):
    page = chromium.new_page()
    module = base64.b64encode((JS / "near_to_far.js").read_bytes()).decode()
    found = page.evaluate(
        """async ([module, size, length, position, left, tolerance, block, causal]) => {
            const js = await import("data:text/javascript;base64," + module);
            return left.map((slope, head) => {
                const query = js.normals(2 * head, size, position * size);
                const keys = js.normals(2 * head + 1, length * size);
                const made = js.prepareQuery({ query, keys, position, scale: size ** -0.5 });
                const slopes = [slope, causal ? Infinity : slope];
                const { first, end, steps, ended, leftOut } = js.visit(made, { slopes, tolerance, block });
                const window = js.windowOf(slope, made.qNorm, made.kNorm, made.scale, tolerance, length);
                return { first, end, steps, ended, leftOut, window, visible: js.numVisible(made, slopes) };
            });
        }""",
        [module, SIZE, length, position, left, tolerance, block, causal],
    )
    page.close()
    tiles, left_out = truth(length, position, left, tolerance, block, causal)
    q, k = heads(len(left), length)
    for h, (tile, js) in enumerate(zip(tiles, found, strict=True)):
        assert (js["first"], js["end"]) == (tile.first, tile.end)
        assert js["visible"] == (position + 1 if causal else length)
        names = ("side", "first", "end", "read")
        steps = [tuple(step[name] for name in names) for step in js["steps"]]
        assert steps == [(s.side, s.first, s.end, s.read) for s in tile.steps]
        bounds = [s.bound for s in tile.steps]
        np.testing.assert_allclose([s["bound"] for s in js["steps"]], bounds, rtol=1e-10)
        np.testing.assert_allclose(js["leftOut"], left_out[h], rtol=1e-10)
        for side in {s.side for s in tile.steps}:
            stopped = any(not s.read for s in tile.steps if s.side == side)
            assert js["ended"][side] == ("bound" if stopped else "keys")
        if tolerance and left[h]:
            norms = np.linalg.norm(q[h, position]), np.linalg.norm(k[h], axis=1).max()
            scale = SIZE**-0.5
            window = near_to_far.window(
                left[h], *norms, scale=scale, tolerance=tolerance, num_keys=length
            )
            np.testing.assert_allclose(js["window"], window, rtol=1e-12)


def number(text: str) -> float:
    """What the page writes as 1.23 x 10 with a raised -4, or 1,234."""
    raised = str.maketrans("\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789")  # fmt: skip
    return float(re.sub(r"\s\u00d7\s10(.+)", lambda m: "e" + m[1].translate(raised), text.replace(",", "")))  # fmt: skip


def open_view(visit, file: Path, name: str, **options: Any) -> tuple[Any, Any]:
    """The page, and the panel of one view."""
    page = visit(file, **options)
    page.get_by_role("tab", name=name).click()
    return page, page.get_by_role("tabpanel", name=name)


def strip_numbers(panel) -> list[tuple[int, int, float]]:
    """Of each head: keys read, keys seen, what is left out."""
    return [
        (*map(int, re.sub(",", "", row.locator(".strip-count").inner_text()).split(" of ")), number(row.locator(".strip-left").inner_text()))
        for row in panel.get_by_role("radio", name=re.compile("^Head ")).all()
    ]  # fmt: skip


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
    page, panel = open_view(visit, explorer_file, "Near to far")
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
    panel.get_by_role("radio", name="Head 2, slope 1/16").click()
    panel.get_by_label("Slope of the head, exact").fill("3/4")
    assert_shows(panel, 512, 300, [left[0], 0.75, *left[2:]], 2.0**-20, 32, causal=False)
    panel.get_by_label("Slope of the head, exact").fill("0")
    assert "no key is too far to matter" in panel.locator(".story").inner_text()
    panel.get_by_role("button", name="Slope of the schedule").click()
    panel.get_by_label("Tolerance, exact").fill("0")
    assert "nothing may be left out" in panel.locator(".story").inner_text()
    assert_shows(panel, 512, 300, left, 0.0, 32, causal=False)


def test_a_tolerance_that_cannot_be_is_refused_in_words(visit, explorer_file):
    _, panel = open_view(visit, explorer_file, "Near to far")
    field = panel.get_by_label("Tolerance, exact")
    for text in ("-1", "0.5", "2^9", "x", ""):
        field.fill("2^-24")
        assert panel.get_by_text("Must be").count() == 0
        field.fill(text)
        assert panel.get_by_text("Must be").inner_text().endswith("; still 2^-24.")
    assert_shows(panel, 2048, 2047, linbias.slopes(8).tolist(), 2.0**-24, 16)


def test_the_steps_of_a_head_are_the_oracles(visit, explorer_file):
    page, panel = open_view(visit, explorer_file, "Near to far")
    panel.get_by_role("radio", name="Head 3").press("ArrowUp")
    assert panel.get_by_role("radio", name="Head 2").get_attribute("aria-checked") == "true"
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Head 2")
    panel.get_by_text("Every step of this head").click()
    panel.locator("details tbody tr").first.wait_for()
    rows = panel.locator("details tbody tr").all()
    tiles, left_out = truth(2048, 2047, [0.5, 0.25], 2.0**-24, 16, True)
    for row, step in zip(rows, tiles[1].steps, strict=True):
        bound, tolerance, outside, state = row.locator("td").all_inner_texts()
        assert row.locator("th").inner_text() == f"{step.first:,} \u2013 {step.end - 1:,}"
        assert number(bound) == pytest.approx(min(1, np.exp(step.bound)), rel=6e-4)
        assert number(tolerance) == pytest.approx(2.0**-24, rel=6e-4)
        assert number(outside) <= number(bound)
        assert state == ("read" if step.read else "stop")
    assert "chosen" in row.get_attribute("class")
    assert number(outside) == pytest.approx(left_out[1], rel=6e-4)
    # The chart's cursor stands at the stop; its keys walk the steps.
    chart = panel.get_by_role("slider", name=re.compile("^The bound on all keys"))
    assert f"at most {bound[:4]}" in chart.get_attribute("aria-valuetext")
    before = chart.get_attribute("aria-valuetext")
    chart.press("ArrowRight")
    assert chart.get_attribute("aria-valuetext") != before


def test_the_share_falls_as_the_text_grows(visit, explorer_file):
    _, panel = open_view(visit, explorer_file, "Near to far")
    chart = panel.get_by_role("slider", name=re.compile("^Keys read by the last query"))
    for key, length in (("Home", 256), ("End", 4096)):
        chart.press(key)
        tiles, _ = truth(length, length - 1, linbias.slopes(8), 2.0**-24, 16, True)
        read = sum(tile.end - tile.first for tile in tiles)
        text = chart.get_attribute("aria-valuetext")
        assert text == f"at {length:,} tokens: every key {8 * length:,}, near to far {read:,}"


# Results


def test_the_package_holds_the_run_of_the_readme():
    (run,) = results.default()["runs"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("<!-- extrapolation:")[2].partition("<!-- /extrapolation -->")[0]
    assert f"`{run['made']['command']}`" in table
    (group,) = run["groups"]
    for line in group["lines"]:
        found = {point["x"]: f"{point['y']:.3f}" for point in line["lengths"]}
        cells = [found.get(length, "-") for length in group["test_lengths"]]
        assert f"| {line['method']} | {' | '.join(cells)} |" in table
    assert {line["method"]: line["limit"] for line in group["lines"]}["learned"] == 128


def test_losses_by_length_follow_the_cursor_and_the_switches(visit, explorer_file):
    page, panel = open_view(visit, explorer_file, "Lengths")
    (group,) = results.default()["runs"][0]["groups"]
    chart, positions = (
        panel.get_by_role("slider", name=re.compile(f"^Loss by {what}"))
        for what in ("test length", "position")
    )

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

    assert shown() == ("at 2,048 tokens", expected(2048))
    chart.press("ArrowLeft")
    assert shown() == ("at 1,024 tokens", expected(1024))
    chart.press("Home")
    assert shown() == ("at 128 tokens", expected(128))
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 80)
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


def test_the_table_of_losses(visit, explorer_file):
    _, panel = open_view(visit, explorer_file, "Lengths")
    (group,) = results.default()["runs"][0]["groups"]
    rows = panel.get_by_role("row").all()[1:]
    for row, line in zip(rows, group["lines"], strict=True):
        cells = row.get_by_role("cell").all_inner_texts()
        at = {point["x"]: point["y"] for point in line["lengths"]}
        assert cells[:-1] == [
            f"{at[length]:.3f}" if length in at else "no rows" for length in group["test_lengths"]
        ]
        if line["limit"] is None:
            change = 100 * (at[2048] / at[128] - 1)
            assert float(cells[-1].strip("%").replace("\u2212", "-")) == pytest.approx(
                change, abs=0.051
            )
    panel.get_by_text("How this was made").click()
    assert panel.get_by_text("linbias extrapolate --methods").is_visible()


def record(method: str, length: int, seed: int, nll: float, test_length: int) -> dict[str, Any]:
    return {
        **{"kind": "evaluation", "method": method, "train_length": length, "seed": seed},
        **{"length": test_length, "stride": None, "num_tokens": 400, "num_bytes": 400},
        **{"nll": nll, "tokens_per_second": 1.0, "peak_memory_bytes": 1, "date": "today"},
        "loss_by_position": [nll] * test_length,
        "count_by_position": [400 // test_length] * test_length,
    }


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of two training lengths and two seeds, one method of which ends with its table and one diverges."""
    settings = ExtrapolateSettings(
        methods=("alibi", "learned"), train_lengths=(4, 8), seeds=(0, 1)
    )
    evaluations = [
        record("alibi", length, seed, nll * (1 + seed), test_length)
        for length in (4, 8)
        for seed in (0, 1)
        for test_length, nll in ((length, 1.0), (16, 0.5))
    ] + [record("learned", 4, seed, float("inf"), 4) for seed in (0, 1)]
    folder = tmp_path / "<b>run"
    folder.mkdir()
    content = {
        **{"made": {"command": "<b>made</b>"}, "settings": settings.to_dict()},
        **{"trainings": [], "evaluations": evaluations},
    }
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def test_runs_are_means_and_ranges_over_seeds(run_folder):
    (run,) = explore.read_results([run_folder])["runs"]
    bit = 1 / np.log(2)
    first, second = run["groups"]
    assert (run["name"], run["num_seeds"]) == ("<b>run", 2)
    assert (first["test_lengths"], second["test_lengths"]) == ([4, 16], [8, 16])
    alibi, learned = first["lines"]
    low, mean, high = (round(n * bit, 5) for n in (1.0, 1.5, 2.0))
    assert alibi["lengths"][0] == {"x": 4, "y": mean, "low": low, "high": high}
    assert alibi["limit"] is None
    assert learned["limit"] == 4
    assert learned["lengths"] == [{"x": 4, "y": None, "low": None, "high": None}]
    assert [line["method"] for line in second["lines"]] == ["alibi"]
    assert alibi["positions"][-1]["y"] == pytest.approx(0.75 * bit, abs=1e-5)


def test_several_runs_are_chosen_by_name(visit, run_folder, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        explore.page(results=explore.read_results([run_folder, run_folder])), encoding="utf-8"
    )
    _, panel = open_view(visit, path, "Lengths")
    names = panel.get_by_role("group", name="Run").get_by_role("radio").all()
    assert len(names) == 2
    assert panel.get_by_text("<b>run").count() == 2  # text, never markup
    assert panel.locator("b").count() == 0
    panel.get_by_role("group", name="Trained on, tokens").get_by_role(
        "radio", name="8", exact=True
    ).click()
    assert "trained on 8 tokens" in panel.locator(".lede").inner_text()
    assert "Lines are means of 2 seeds" in panel.inner_text()
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
        explore.read_results([tmp_path])


# A model


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "<i>text.txt"
    path.write_text(
        '<b>"a" &amp;</b>\n\u05e9\u05dc\u05d5\u05dd e\u0301\tmore and more words', "utf-8"
    )
    return path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LinbiasConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        initializer_range=0.4,
    )
    folder = tmp_path_factory.mktemp("model") / "model"
    LinbiasForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def shown_model(model_folder, text_file) -> dict[str, Any]:
    return model.read(model_folder, text_file, limit_tokens=40)


@pytest.fixture(scope="module")
def weights(model_folder, text_file) -> np.ndarray:
    """[layers, heads, T, T], from the model itself."""
    ids = torch.tensor([list(text_file.read_bytes()[:40])])
    with torch.no_grad():
        found = load(model_folder, device="cpu")(ids, output_attentions=True).attentions
    return torch.cat(found).numpy()


def test_a_model_is_packed_within_16_bits(shown_model, weights):
    packed = np.frombuffer(base64.b64decode(shown_model["weights"]), "<u2") / 65535
    rows, columns = np.tril_indices(40)
    np.testing.assert_allclose(
        packed, weights[..., rows, columns].ravel(), rtol=0, atol=0.5 / 65535 + 1e-7
    )
    assert shown_model["slopes"] == linbias.slopes(4).tolist()
    assert shown_model["cut"] == "The page shows the first 40 tokens of the text."
    assert (shown_model["causal"], shown_model["note"]) == (True, None)
    assert shown_model["tokens"][:5] == ["<", "b", ">", '"', "a"]
    assert shown_model["tokens"][17] == "\\xd7"  # half a letter


def test_the_words_of_a_paper_model(tmp_path):
    words = Dictionary.from_counts({"a": 2, "b": 1}, padding_factor=8)
    sizes = {"vocab_size": 8, "cutoffs": (4,), "hidden_size": 16, "num_hidden_layers": 1}
    config = PaperConfig(**sizes, num_attention_heads=2, intermediate_size=16)
    PaperForCausalLM(config).save_pretrained(tmp_path)
    words.write(tmp_path / "dict.txt")
    save_word_tokenizer(words, tmp_path)
    (tmp_path / "text").write_text("b a\nnew\n")
    shown = model.read(tmp_path, tmp_path / "text")
    assert shown["tokens"] == ["b", "a", "\n", "<unk>", "\n"]
    assert (shown["separator"], shown["cut"]) == (" ", None)
    assert shown["slopes"] == linbias.slopes(2).tolist()


def test_reach_is_measured_over_the_later_half_of_the_rows():
    bands = np.zeros((1, 2, 8, 8))
    for t in range(8):
        bands[0, 0, t, t] = 1.0  # looks at itself
        bands[0, 1, t, max(0, t - 3)] = 0.8
        bands[0, 1, t, t] += 0.2
    assert model.reach(bands) == {"mean": [[0.0, pytest.approx(0.8 * 3)]], "within": [[0, 3]]}


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_slopes_of_other_families_are_those_of_their_attention(kind):
    sizes = {"vocab_size": 64, "hidden_size": 48, "d_model": 48}
    counts = {"num_hidden_layers": 1, "n_layers": 1, "num_attention_heads": 6, "n_heads": 6}
    extra = {"falcon": {"alibi": True}}.get(kind, {})
    config = AutoConfig.for_model(kind, **sizes, **counts, **extra)
    torch.manual_seed(0)
    network = fuse(AutoModelForCausalLM.from_config(config).eval())
    for name, parameter in network.named_parameters():
        if "query_key_value" in name or "Wqkv" in name:
            torch.nn.init.zeros_(parameter)  # then the bias alone decides
    found = model.attention_weights(network, np.arange(12))
    expected = linbias.attention_weights(
        np.zeros((6, 12, 1)), np.zeros((6, 12, 1)), model.model_slopes(network, 12)
    )
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_looks_ahead_and_has_no_slopes_is_shown_with_a_note(visit, text_file, model_folder, tmp_path, monkeypatch):  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=256, **sizes, intermediate_size=16, max_position_embeddings=24)
    network = BertLMHeadModel(config).eval()
    monkeypatch.setattr(model, "load", lambda *_, **__: network)
    shown = model.read(model_folder, text_file)
    assert shown["causal"] is False
    assert shown["slopes"] is shown["alone"] is None
    assert re.search(r"\(bert\) has no linear biases.* not causal", shown["note"])
    assert "no rows for later positions" in shown["cut"]
    packed = np.frombuffer(base64.b64decode(shown["weights"]), "<u2")
    assert packed.size == 2 * 24**2
    np.testing.assert_allclose(packed.reshape(2, 24, 24).sum(-1) / 65535, 1.0, atol=24 / 65535)

    path = tmp_path / "page.html"
    path.write_text(explore.page(model=shown), encoding="utf-8")
    _, panel = open_view(visit, path, "Model")
    assert panel.get_by_text(shown["note"]).is_visible()
    panel.locator("[data-token='3']").click()
    row = packed.reshape(2, 24, 24)[0, 3] / 65535
    away = row @ np.abs(3 - np.arange(24))
    assert f"looks {away:.1f} tokens away on average" in panel.locator(".story").inner_text()
    chart = panel.get_by_role("slider", name=re.compile("^Weights of query"))
    chart.press("End")  # a key after the query
    assert chart.get_attribute("aria-valuetext").endswith(f"20 after: weight {row[23]:.4f}")


def test_the_page_holds_so_many_weights():
    for matrices, causal in ((24, True), (384, True), (1000, False), (10**9, True)):
        T = model.most_tokens(matrices, causal)
        cost = [t * (t + 1) / 2 if causal else t * t for t in (T, T + 1)]
        assert matrices * cost[0] <= model.MAX_WEIGHTS < matrices * cost[1] or T == 1


@pytest.mark.parametrize(
    ("content", "limit", "rule"),
    [
        (None, 8, "text must be a file that can be read"),
        (b"", 8, "text must hold at least one token"),
        (b"ok \xff", 8, "text must be UTF-8"),
        (b"text", 0, r"limit_tokens must be in \[1, 1024\]"),
        (b"text", 1025, r"limit_tokens must be in \[1, 1024\]"),
    ],
)
def test_what_a_model_cannot_read_is_refused(tmp_path, model_folder, content, limit, rule):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^explore: {rule}"):
        model.read(model_folder, path, limit_tokens=limit)


@pytest.fixture(scope="module")
def model_file(shown_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "model.html"
    path.write_text(explore.page(model=shown_model), encoding="utf-8")
    return path


def test_a_models_numbers_are_those_of_the_model(visit, model_file, shown_model, weights):
    page, panel = open_view(visit, model_file, "Model")
    chart = panel.get_by_role("slider", name=re.compile("^Weights of query"))
    alone = linbias.attention_weights(np.zeros((4, 40, 1)), np.zeros((4, 40, 1)))

    def check(layer: int, head: int, query: int) -> None:
        row = weights[layer, head, query, : query + 1]
        distance = query - np.arange(query + 1)
        within = int((np.bincount(distance, row).cumsum() < 0.9).sum())
        story = panel.locator(".story").inner_text()
        assert f"{row @ distance:.1f} tokens back on average" in story
        assert f"lies within {within}." in story
        assert float(story.rstrip(".").rpartition(": ")[2]) == pytest.approx(row.max(), abs=1e-4)
        heading = panel.get_by_role("heading", name=f"Layer {layer + 1}, head {head + 1}, slope")
        assert heading.is_visible()
        chart.press("End")
        text = chart.get_attribute("aria-valuetext")
        found = [float(part) for part in re.findall(r" (\d\.\d+)", text)]
        expected = [row[query], alone[head, query, query]]
        np.testing.assert_allclose(found, expected, atol=1e-4)

    check(0, 0, 39)
    panel.get_by_role("group", name="Layer").get_by_role("radio", name="2", exact=True).click()
    panel.get_by_role("group", name="Head").get_by_role("radio", name="3", exact=True).click()
    check(1, 2, 39)
    panel.locator("[data-token='25']").click()
    check(1, 2, 25)
    query = panel.get_by_role("slider", name="Query", exact=True)
    query.press("ArrowLeft")
    assert query.get_attribute("aria-valuenow") == "24"
    check(1, 2, 24)
    panel.get_by_role("grid").get_by_role("row").nth(1).focus()
    page.keyboard.press("ArrowDown")
    check(1, 2, 25)
    panel.get_by_role("button", name=re.compile("^Layer 1, head 4")).click()
    check(0, 3, 25)
    panel.get_by_role("radio", name="logarithmic").click()
    check(0, 3, 25)


def test_reach_of_every_head(visit, model_file, shown_model):
    _, panel = open_view(visit, model_file, "Model")
    table = panel.get_by_role("table", name="Reach of every head")
    cells = table.get_by_role("button")
    for label, name, form in (("mean distance", "mean", "{:.1f}"), ("holds 90%", "within", "{}")):
        panel.get_by_role("radio", name=label).click()
        rows = [*shown_model["reach"][name]]
        assert cells.all_inner_texts() == [form.format(x) for row in rows for x in row]
        alone = table.get_by_role("row", name="bias alone").get_by_role("cell").all_inner_texts()
        assert alone == [form.format(x) for x in shown_model["alone"][name]]


def test_a_text_is_shown_as_text(visit, model_file):
    _, panel = open_view(visit, model_file, "Model")
    assert panel.locator(".token-text").inner_text().startswith('<b>"a" &amp;</b>\u21b5\n\\xd7')
    assert "<i>text.txt" in panel.locator(".lede").inner_text()
    assert panel.locator(".token-text :not(span), .lede *, b, script").count() == 0


def test_the_command_puts_results_and_a_model_into_the_page(run_folder, model_folder, text_file, tmp_path):  # fmt: skip
    output = tmp_path / "page.html"
    fixed = ["explore", "--no-open", "-o", output]
    given = [model_folder, "--text", text_file, "--results", run_folder]
    assert run(*fixed, *given).exit_code == 0
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', output.read_text("utf-8")
    )
    content = json.loads(data[1])
    assert content["model"]["text"] == text_file.name
    assert content["model"]["name"] == "model"  # not where the folder lies
    assert [one["name"] for one in content["results"]["runs"]] == ["<b>run"]
    for arguments in ([model_folder], ["--text", text_file]):
        failed = run(*fixed, *arguments)
        assert failed.exit_code == 2
        assert "MODEL and --text must come together" in failed.output


def test_a_link_shows_what_its_sender_saw(visit, model_file):
    panel = visit(model_file, "view=model&layer=1&head=2&query=25&log=1").get_by_role("tabpanel")
    assert panel.get_by_role("heading", name="Layer 2, head 3").is_visible()
    assert (
        panel.get_by_role("slider", name="Query", exact=True).get_attribute("aria-valuenow")
        == "25"
    )
    assert panel.get_by_role("radio", name="logarithmic").is_checked()

    link = (
        "view=reach&length=512&heads=4&tolerance=-12&block=32&both=1&query=300&head=1&slope=0.75"
    )
    page = visit(model_file, link)
    panel = page.get_by_role("tabpanel")
    left = linbias.slopes(4).tolist()
    expected = (512, 300, [left[0], 0.75, *left[2:]], 2.0**-12, 32, False)
    assert_shows(panel, *expected)
    panel.get_by_role("radio", name="32").check()  # nothing new, and the address stays
    panel.get_by_role("button", name="Slope of the schedule").click()
    page.wait_for_url(lambda address: "slope" not in address)
    assert set(page.evaluate("location.hash.slice(1)").split("&")) == set(link.split("&")[:-1])

    bad = "view=reach&length=3&heads=x&tolerance=5&query=-1&head=99&slope=&both=2"
    assert_shows(visit(model_file, bad).get_by_role("tabpanel"), 2048, 2047, linbias.slopes(8).tolist(), 2.0**-24, 16)  # fmt: skip


@pytest.mark.parametrize("view", ["Near to far", "Lengths", "Model"])
def test_no_view_is_wider_than_a_phone(visit, model_file, view):
    page, panel = open_view(visit, model_file, view, viewport={"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    box = panel.get_by_role("slider").last.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
