"""The experiment at toy size: resuming, refusing, and the report of a real run."""

import io
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from linbias._run.files import JsonLog
from linbias._run.folders import hold_run_folder
from linbias.cli import report
from linbias.cli.tables import NumberTable
from linbias.explore.data import links
from linbias.lm.extrapolation import extrapolate
from linbias.lm.report import findings, page
from linbias.lm.report.records import ExtrapolationResults
from linbias.lm.settings import ExtrapolateSettings, TrainSettings

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def settings(word_file):
    return ExtrapolateSettings(
        methods=("alibi", "learned"),
        train_lengths=(16, 8),
        test_lengths=(16, 32),
        seeds=(0, 1),
        corpus=str(word_file),
        limit_tokens=500,
        training=TrainSettings(TINY, length=16, batch_size=2, steps=2, threads=1),
    )


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return folder, extrapolate(settings, folder, command="linbias <test>", progress=False)


@pytest.fixture
def copy_of_finished(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def measured(results):
    return [(r.method, r.train_length, r.seed, r.test_length) for r in results.evaluations]


def test_every_model_is_measured_at_every_length_it_can_read(finished):
    expected = set()
    for seed in (0, 1):
        for train_length in (16, 8):
            for test_length in {16, 32, train_length}:
                expected.add(("alibi", train_length, seed, test_length))
            expected.add(("learned", train_length, seed, train_length))
    assert sorted(measured(finished[1])) == sorted(expected)


def test_models_that_are_compared_read_and_score_equally_many_tokens(finished):
    _, results = finished
    assert {record.metrics.tokens for record in results.trainings} == {2 * 2 * 16}
    assert {record.evaluation.num_tokens for record in results.evaluations} == {500}
    assert {record.evaluation.num_bytes for record in results.evaluations} == {500}


def test_the_run_leaves_records_plot_and_report(finished):
    folder, results = finished
    written = json.loads((folder / "results.json").read_text())
    assert written == json.loads(json.dumps(results.to_dict()))
    assert ExtrapolationResults.from_dict(written) == results
    written["settings"]["training"]["prompt"] = None  # a setting that there is no more
    assert ExtrapolationResults.from_dict(written) == results
    kinds = [record["kind"] for record in JsonLog(folder / "results.jsonl").records]
    assert kinds.count("training") == 8
    assert kinds.count("evaluation") == len(results.evaluations)
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob(".*"))  # no half-written file is left


def test_a_finished_run_neither_trains_nor_measures_again(settings, finished, monkeypatch):
    folder, results = finished

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setitem(extrapolate.__globals__, "evaluate", never)
    monkeypatch.setattr("transformers.Trainer.train", never)
    path = folder / "settings.json"
    older = json.loads(path.read_text())
    older["training"] |= {"validate_lengths": [], "prompt": None}  # which went
    path.write_text(json.dumps(older))
    again = extrapolate(settings, folder, command="linbias <test>", progress=False)
    assert again.evaluations == results.evaluations
    assert again.trainings == results.trainings


@pytest.mark.parametrize(("kind", "field"), [("training", "loss"), ("evaluation", "nll")])
def test_a_line_that_lacks_a_field_is_named(settings, copy_of_finished, kind, field):
    log = JsonLog(copy_of_finished / "results.jsonl")
    number = next(i for i, record in enumerate(log.records, start=1) if record["kind"] == kind)
    del log.records[number - 1][field]
    log.restart(log.records)
    message = rf"extrapolate: line {number} of .*results\.jsonl is damaged \(it lacks {field}\)"
    with pytest.raises(ValueError, match=message):
        extrapolate(settings, copy_of_finished, progress=False)


def test_a_line_that_a_crash_cut_off_is_measured_again(settings, finished, copy_of_finished):
    log = copy_of_finished / "results.jsonl"
    *whole, last = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(whole) + last[: len(last) // 2])
    again = extrapolate(settings, copy_of_finished, progress=False)
    assert measured(again) == measured(finished[1])
    assert [r.evaluation.nll for r in again.evaluations] == [
        r.evaluation.nll for r in finished[1].evaluations
    ]
    assert all(json.loads(line) for line in log.read_text().splitlines())


def test_what_cannot_be_run_is_refused_and_leaves_the_folder_alone(settings, finished, tmp_path):
    folder = finished[0]
    other = replace(settings, training=replace(settings.training, steps=3))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ValueError, match=r"extrapolate: .*another run.*training\.steps"):
        extrapolate(other, folder, progress=False)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    in_use = pytest.raises(ValueError, match="extrapolate: output must be used by one run at a")
    with hold_run_folder(folder, "test"), in_use:
        extrapolate(settings, folder, progress=False)
    with pytest.raises(ValueError, match=r"test_lengths must be at most 500, .* got 512"):
        extrapolate(replace(settings, test_lengths=(512,)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ()}, "methods must be one or more different values"),
        ({"methods": ("alibi", "alibi")}, "methods must be one or more different values"),
        ({"methods": ("alibi", "rope")}, "methods must be among alibi, .*, got 'rope'"),
        ({"train_lengths": (0,)}, "train_lengths must be at least 1, got 0"),
        ({"test_lengths": (-1,)}, "test_lengths must be at least 1, got -1"),
        ({"limit_tokens": 0}, "limit_tokens must be at least 1, got 0"),
        ({"stride": 129}, r"stride must be in \[1, shortest test length = 128\], got 129"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match="^ExtrapolateSettings: " + message):
        ExtrapolateSettings(**change)


def test_the_page_needs_nothing_but_itself(finished):
    html = (finished[0] / "report.html").read_text()
    assert "default-src 'none'" in html
    assert not re.search(
        r"<(script|link|img|iframe|object)[^>]* (src|href)=\"(?!data:)|@import", html
    )
    assert all(url.startswith(("#", "data:")) for url in re.findall(r"url\(([^)]*)\)", html))
    assert set(re.findall(r'href="([^#"][^"]*)"', html)) == {"data:,"}  # it has no icon
    assert set(re.findall(r"https?://[^\"' ]*", html)) <= {
        "http://www.w3.org/2000/svg",  # names of formats, not addresses
        "http://www.w3.org/1999/xlink",
        *links().values(),  # to be followed by the reader
    }


def shown_at(width: int, renderables: Iterable[RenderableType]) -> str:
    """What a terminal of this width shows."""
    console = Console(width=width, file=io.StringIO())
    for renderable in renderables:
        console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_tables_are_cut_nowhere_at_any_width(finished, width):
    _, results = finished
    table = NumberTable("length", "perplexity", "bits/byte", "tokens/s", "memory", title="Scores")
    table.add_row("16,384", "1,234.567", "1.2345", "123,456", "12,345 MiB")
    shown = shown_at(width, [*report.tables(results), table])
    assert max(map(len, shown.splitlines())) <= width
    assert "\u2026" not in shown  # the dots of a text that was cut
    words = shown.split()
    for word in ("length", "perplexity", "bits/byte", "tokens/s", "memory", "change", "trained"):
        assert word in words
    for word in ("1,234.567", "123,456", "12,345", "Scores"):
        assert words.count(word) == 1
    assert words.count("16,384") == shown.count("length")  # with every part of the table


def test_figures_have_an_alternative_text_and_the_pages_colours(finished):
    html = (finished[0] / "report.html").read_text()
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) == 1
    for figure in figures:
        (text,) = re.findall(r'^<svg role="img" aria-label="([^"]+)"', figure)
        assert "ALiBi trained on 16 tokens" in text
        assert not re.search(r"(fill|stroke|color): *#", figure)
    for name in set(re.findall(r"var\(--([\w-]+)\)", "".join(figures))):
        assert f"--{name}: light-dark(#" in html, name


def test_page_and_tables_show_the_measured_numbers(finished):
    folder, results = finished
    html = (folder / "report.html").read_text()
    shown = shown_at(100, report.tables(results))
    for method, train_length, length in [("alibi", 16, 16), ("alibi", 8, 32), ("learned", 8, 8)]:
        points = findings.curve(results.evaluations, method, train_length)
        loss = next(f"{point.mean:.3f}" for point in points if point.test_length == length)
        assert loss in html
        assert loss in shown
    assert html.count(findings.HOW_SCORED) == 1
    assert "beyond its table" in shown
    assert "linbias \\u003ctest>" in html
    assert max(map(len, shown.splitlines())) <= 100


def test_the_report_can_be_made_again_from_results_json(finished, tmp_path):
    folder, _ = finished
    results = json.loads((folder / "results.json").read_text())
    page.write_report(ExtrapolationResults.from_dict(results), tmp_path)
    text = (folder / "report.html").read_text()
    without_ids = [
        re.sub(r"[pm][0-9a-f]{10}", "", t) for t in (text, (tmp_path / "report.html").read_text())
    ]
    assert without_ids[0] == without_ids[1]
