"""The board of engines: its referee and its report, with engines and rows that are made up."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT

# What each does besides; all of them know "tiny-bloom" and answer with zeros.
ENGINES = {
    "good": "",
    "slow": "        time.sleep(0.25)\n",
    "crashing": "        os.kill(os.getpid(), signal.SIGSEGV)\n",
    "hanging": "        time.sleep(60)\n",
    "tiring": "        if len(ids) > 1000: time.sleep(60)\n",
    "hungry": "        bytearray(10**10)\n",
    "wrong": "        tell = lambda: None\n",
    "refusing": "",
}
START = """
import os, signal, time
PACKAGES = ("pip",)
def refuse(job):
    return "no reason" if job.engine == "refusing" else None
class Engine:
    def __init__(self, job):
        pass
    def generate(self, ids, count, tell):
        time.sleep(0.01)
"""
END = """
        for _ in range(count):
            tell()
        return [0.5] * 3
"""


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(ROOT / "evidence" / "benchmarks" / "board"), *sys.path])
    yield __import__
    for name in set(sys.modules) - before:
        if name in ("board", "environments", "models", "load", "report", "markers"):
            del sys.modules[name]


@pytest.fixture
def run(load_script, tmp_path: Path):
    """Let engines meet on some lengths, and return the rows."""
    board, np = load_script("board"), load_script("numpy")
    files, lists = tmp_path / "engines", tmp_path / "lists"
    files.mkdir()
    lists.mkdir()
    for name, does in ENGINES.items():
        (files / f"{name}.py").write_text(START + does + END)
    (files / "absent.py").write_text(START + END)
    (lists / "absent.txt").write_text("--no-index\nno-such-package-at-all\n")
    np.save(tmp_path / "reference.npy", np.zeros(3))
    asked = []

    def make(name: str, dtype: str, length: int) -> Path:
        asked.append(length)
        return tmp_path / "reference.npy"

    def start(*engines, lengths: tuple[int, ...] = (64,), **options):
        folders = {"engine_files": files, "package_lists": lists, "board": tmp_path}
        small = {"threads": 1, "tokens": 3, "memory_gb": 4.0, "tries": 1, "pause": 0.0}
        given = {"timeout": 20.0, "rounds": 2, **folders, **small, **options}
        settings = board.Settings(output=tmp_path / "rows.jsonl", engines=engines, **given)
        referee = board.Referee(settings, make)
        referee.run(["tiny-bloom"], ["float32"], lengths)
        lines = settings.output.read_text().splitlines() if settings.output.exists() else []
        return [json.loads(line) for line in lines]

    start.asked = asked
    return start


def by_engine(rows, length=64):
    return {row["engine"]: row for row in rows if row.get("length") == length}


def test_an_engine_that_answers_has_times_memory_and_error(run):
    rows = run("good")
    row = by_engine(rows)["good"]
    assert len(row["read_s"]) == 2 and min(row["read_s"]) >= 0.01
    assert len(row["token_ms"]) == 2 and row["peak_mb"] > 5
    assert row["error"] == 0.5
    assert any(set(row.get("versions", {})) == {"pip"} for row in rows)


@pytest.mark.parametrize(
    ("engine", "length", "why"),
    [
        *(
            pytest.param(engine, 64, why, marks=pytest.mark.processes)
            for engine, why in (
                ("crashing", "ended by signal 11 (Segmentation fault)"),
                ("hungry", "asked for more than 4 GB"),
                ("wrong", "AssertionError: 0 tokens, and not 4"),
                ("refusing", "refused: no reason"),
            )
        ),
        ("hanging", 64, "more than 2 s"),
        ("tiring", 4096, "more than 2 s"),  # where each turn has a process of its own
    ],
)
def test_a_failure_says_how_and_the_others_go_on(run, engine, length, why):
    timeout = 2.0 if engine in ("hanging", "tiring") else 20.0
    rows = by_engine(run(engine, "good", lengths=(length,), timeout=timeout), length)
    assert rows[engine]["failed"] == why
    assert len(rows["good"]["read_s"]) == 2 and rows["good"]["error"] == 0.5


@pytest.mark.processes
def test_an_engine_that_cannot_be_installed_is_a_row(run):
    rows = run("absent", "good")
    (absent,) = (row for row in rows if row["engine"] == "absent")
    assert absent["absent"].startswith("pip: ERROR: No matching distribution found for no-such")
    assert "read_s" in by_engine(rows)["good"]
    assert len(run("absent", "good")) == len(rows)  # said once


@pytest.mark.thorough
def test_what_has_a_row_is_not_measured_again(run):
    first = run("good", "crashing")
    assert run("good", "crashing") == first
    assert run.asked == [64]
    assert [row for row in run("good", "slow") if row not in first][-1]["engine"] == "slow"


@pytest.mark.processes
def test_what_is_measured_again_takes_the_place_of_its_old_row_alone(run):
    first = run("good", "crashing", lengths=(64, 65))
    rows = run("good", lengths=(65,), again=True, rounds=1)
    assert len(rows) == len(first)
    assert [x for x in rows if x in first] == [
        x for x in first if x != by_engine(first, 65)["good"]
    ]
    assert len(by_engine(rows, 65)["good"]["read_s"]) == 1


@pytest.mark.processes
def test_an_engine_is_not_asked_at_the_next_length_without_hope(run):
    rows = run("good", "slow", "crashing", "refusing", lengths=(64, 65))
    last = by_engine(rows, 65)
    assert "read_s" in last["good"]
    assert last["slow"]["failed"].startswith("not asked: ")
    assert last["slow"]["failed"].endswith("times the best at 64")
    assert last["crashing"]["failed"] == "not asked: failed at 64"
    assert last["refusing"]["failed"] == "refused: no reason"


def test_an_engine_is_not_asked_what_must_pass_the_limit(run):
    rows = run("slow", lengths=(64, 6400), timeout=5.0)
    assert by_engine(rows, 6400)["slow"]["failed"] == "not asked: 0 s at 64"


def test_nothing_begins_when_the_time_is_over(run):
    assert run("good", minutes=-1.0) == []
    assert by_engine(run("good"))["good"]["error"] == 0.5


@pytest.mark.processes
def test_an_environment_has_what_it_lists_and_what_this_one_has(load_script, tmp_path):
    (tmp_path / "list.txt").write_text("")
    python = load_script("environments").interpreter(tmp_path / "list.txt", tmp_path / "made")
    assert python.is_relative_to(tmp_path)
    subprocess.run([python, "-c", "import numpy"], check=True)


def made_up(engine, length, read_s=None, **more):
    row = {"engine": engine, "model": "bloom-560m", "dtype": "float32", "length": length, **more}
    return row if read_s is None else {**row, "read_s": read_s}


FIRST = [
    {"made": "2026-11-24", "machine": "a machine", "threads": 2, "commit": "abc"},
    {"engine": "vllm", "absent": "pip: ERROR: no"},
    {"engine": "onnx", "versions": {"onnxruntime": "1"}},
    made_up("linbias", 512, [1.0, 1.2, 1.1], token_ms=[9.0], peak_mb=2048, error=1e-6),
    made_up("onnx", 512, [0.9, 1.0, 0.95], token_ms=[10.0], peak_mb=1024, error=2e-6, others=0.4),
    made_up("flex", 512, [2.0], token_ms=[20.0], peak_mb=4096, error=2e-6),
    made_up("linbias", 8192, [20.0], token_ms=[9.0], peak_mb=3072, error=1e-6),
    made_up("flex", 8192, [30.0], token_ms=[12.0], peak_mb=4096, error=2e-6),
    made_up("onnx", 8192, failed="asked for 34 GB more, of 20 in all"),
    made_up("onnx", 32768, failed="not asked: failed at 8,192"),
]
SECOND = [
    {"made": "2026-11-25", "machine": "its successor", "threads": 2, "commit": "def"},
    {"engine": "onnx", "versions": {"onnxruntime": "2"}},
    made_up("linbias", 512, [0.5], token_ms=[9.0], peak_mb=2048, error=1e-6),
    made_up("onnx", 512, [0.6], token_ms=[4.5], peak_mb=1024, error=2e-6),
]


@pytest.fixture
def page(load_script, tmp_path: Path) -> str:
    """What the report writes of two machines, with empty lines between its parts."""
    report = load_script("report")
    (tmp_path / "board").mkdir()
    for name, rows in (("one", SECOND), ("two", FIRST)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "board" / f"{name}.jsonl").write_text(lines)
    page = tmp_path / "board.md"
    page.write_text(report.PAGE.read_text(encoding="utf-8"))
    report.fill(page, report.parts(tmp_path))
    return page.read_text(encoding="utf-8")


def test_each_machine_has_tables_of_its_own(page):
    first, second = page.index("## a machine"), page.index("## its successor")
    one, two = page[first:second], page[second:]
    assert "2 threads, 2026-11-24, commit abc; onnxruntime 1." in one
    assert "2 threads, 2026-11-25, commit def; onnxruntime 2." in two
    assert "| linbias | 1.10 ± 0.10 | **20.0** |" in one
    assert "| ONNX Runtime | **0.95** ± 0.05 |  |" in one
    assert "| linbias | **0.50** |\n" in two


def test_memory_and_error_are_those_of_the_longest_text_that_three_engines_read(page):
    one = page[page.index("## a machine") : page.index("## its successor")]
    assert "| peak memory in GB | bloom-560m, float32, 512 |" in one
    assert "| ONNX Runtime | **1.0** |" in one
    assert "| linbias | **1.0e-06** |" in one


def test_the_report_says_where_we_lose_on_each_machine(page):
    assert "| linbias is the fastest in | a machine | its successor |\n" in page
    assert "| reading or embedding a text | 1 of 2 cases | " in page
    assert re.search(r"\| a generated token \| [^|]+ \| 0 of 1 cases \|\n", page)
    assert "| a machine | its successor |\n|---|---|---|\n" in page
    case = "BLOOM-560m, float32, 512"
    assert f"| reading or embedding a text: {case} | 0.86 ONNX Runtime |  |\n" in page
    assert f"| a generated token: {case} |  | 0.50 ONNX Runtime |\n" in page


def test_the_report_sets_what_is_asked_beside_the_least_that_was_found(page):
    assert "| goal | a machine | its successor |" in page
    best = "(ONNX Runtime; BLOOM-560m)"
    assert f"| time to read 512 tokens, float32 | 0.95 | **0.86** {best} | 1.20 {best} |" in page
    flex = "(FlexAttention, compiled)"
    assert f"| time of BLOOM for 8,192, float32 | 2 | **1.50** {flex} |  |" in page


def test_the_report_says_once_why_there_is_no_number(page):
    case = "BLOOM-560m, float32, 8,192"
    assert f"| ONNX Runtime | asked for 34 GB more, of 20 in all | {case} |\n" in page
    assert "not asked: failed" not in page
    assert "| vLLM | not here: `pip: ERROR: no` |  |\n" in page
    assert "\n\n1 of 5 cells were measured while others used more than 5%" in page
