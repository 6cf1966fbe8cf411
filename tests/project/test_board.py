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
def load_script(monkeypatch):
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(ROOT / "evidence" / "benchmarks" / "board"), *sys.path])
    yield __import__
    for name in set(sys.modules) - before:
        if name in ("board", "environments", "models", "record", "report", "markers"):
            del sys.modules[name]


@pytest.fixture
def run(load_script, tmp_path):
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

    def start(*engines, lengths: tuple[int, ...] = (64,), **given):
        """The rows by length and engine, and what the output says about the run."""
        options = board.parse([])
        asked_of = {"engines": engines, "models": ["tiny-bloom"], "dtypes": ["float32"]}
        folders = {"engine_files": files, "package_lists": lists, "board": tmp_path}
        small = {"threads": 1, "tokens": 3, "memory_gb": 4.0, "tries": 1, "pause": 0.0}
        vars(options).update(asked_of, **folders, **small, lengths=lengths, timeout=20.0, rounds=2)
        vars(options).update(output=tmp_path / "rows.jsonl", **given)
        board.Referee(options, make).run()
        if not options.output.exists():
            return {}, {}
        about, *cases = map(json.loads, options.output.read_text().splitlines())
        return {case["length"]: case["engines"] for case in cases}, about

    start.asked = asked
    return start


def test_an_engine_that_answers_has_times_memory_and_error(run):
    rows, about = run("good")
    row = rows[64]["good"]
    assert len(row["read_s"]) == 2 and min(row["read_s"]) >= 0.01
    assert len(row["token_ms"]) == 2 and row["peak_mb"] > 5
    assert row["error"] == 0.5
    assert set(about["versions"]) == {"pip"}


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
    rows = run(engine, "good", lengths=(length,), timeout=timeout)[0][length]
    assert rows[engine] == {"failed": why}
    assert len(rows["good"]["read_s"]) == 2 and rows["good"]["error"] == 0.5


@pytest.mark.processes
def test_an_engine_that_cannot_be_installed_is_said_once(run):
    for _ in range(2):
        rows, about = run("absent", "good")
        ((engine, why),) = about["absent"]
        assert engine == "absent"
        assert why.startswith("pip: ERROR: No matching distribution found for no-such")
        assert "read_s" in rows[64]["good"]


@pytest.mark.thorough
def test_what_has_a_row_is_not_measured_again(run):
    first = run("good", "crashing")
    assert run("good", "crashing") == first
    assert run.asked == [64]
    rows, _ = run("good", "slow")
    assert list(rows[64]) == ["good", "crashing", "slow"]
    assert all(rows[64][engine] == row for engine, row in first[0][64].items())


@pytest.mark.processes
def test_what_is_measured_again_takes_the_place_of_its_old_row_alone(run):
    first, _ = run("good", "crashing", lengths=(64, 65))
    rows, _ = run("good", lengths=(65,), again=True, rounds=1)
    assert rows[64] == first[64] and list(rows[65]) == list(first[65])
    assert rows[65]["crashing"] == first[65]["crashing"]
    assert len(rows[65]["good"]["read_s"]) == 1


@pytest.mark.processes
def test_an_engine_is_not_asked_at_the_next_length_without_hope(run):
    last = run("good", "slow", "crashing", "refusing", lengths=(64, 65))[0][65]
    assert "read_s" in last["good"]
    assert last["slow"]["failed"].startswith("not asked: ")
    assert last["slow"]["failed"].endswith("times the best at 64")
    assert last["crashing"]["failed"] == "not asked: failed at 64"
    assert last["refusing"]["failed"] == "refused: no reason"


def test_an_engine_is_not_asked_what_must_pass_the_limit(run):
    rows, _ = run("slow", lengths=(64, 6400), timeout=5.0)
    assert rows[6400]["slow"]["failed"] == "not asked: 0 s at 64"


def test_nothing_begins_when_the_time_is_over(run):
    assert run("good", minutes=-1.0) == ({}, {})
    assert run("good")[0][64]["good"]["error"] == 0.5


@pytest.mark.processes
def test_an_environment_has_what_it_lists_and_what_this_one_has(load_script, tmp_path):
    (tmp_path / "list.txt").write_text("")
    python = load_script("environments").interpreter(tmp_path / "list.txt", tmp_path / "made")
    assert python.is_relative_to(tmp_path)
    subprocess.run([python, "-c", "import numpy"], check=True)


def took(read_s, token_ms, peak_mb, error, **more):
    return {"read_s": read_s, "token_ms": token_ms, "peak_mb": peak_mb, "error": error, **more}


def records(about, **lengths):
    """A file of a machine: the rows of BLOOM by engine, by length."""
    about = {"threads": 2, "absent": [], **about}
    case = {"model": "bloom-560m", "dtype": "float32"}
    rows = [{**case, "length": int(n[1:]), "engines": of} for n, of in lengths.items()]
    return "".join(json.dumps(line) + "\n" for line in (about, *rows))


FIRST = records(
    {
        **{"machine": "a machine", "days": ["2026-11-24"], "commits": ["abc"]},
        **{"versions": {"onnxruntime": "1"}, "absent": [["fastembed", "pip: ERROR: no"]]},
    },
    n512={
        "linbias": took([1.0, 1.2, 1.1], [9.0], 2048, 1e-6),
        "onnx": took([0.9, 1.0, 0.95], [10.0], 1024, 2e-6, others=0.4),
        "flex": took([2.0], [20.0], 4096, 2e-6),
    },
    n8192={
        "linbias": took([20.0], [9.0], 3072, 1e-6),
        "flex": took([30.0], [12.0], 4096, 2e-6),
        "onnx": {"failed": "asked for 34 GB more, of 20 in all"},
    },
    n32768={"onnx": {"failed": "not asked: failed at 8,192"}},
)
SECOND = records(
    {
        **{"machine": "its successor", "days": ["2026-11-25"], "commits": ["def"]},
        "versions": {"onnxruntime": "2"},
    },
    n512={
        "linbias": took([0.5], [9.0], 2048, 1e-6),
        "onnx": took([0.6], [4.5], 1024, 2e-6),
    },
)


@pytest.fixture
def page(load_script, tmp_path):
    """What the report writes of two machines, with empty lines between its parts."""
    report = load_script("report")
    (tmp_path / "board").mkdir()
    for name, lines in (("one", SECOND), ("two", FIRST)):
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
    assert "| fastembed | not here: `pip: ERROR: no` |  |\n" in page
    assert "\n\n1 of 5 cells were measured while others used more than 5%" in page
