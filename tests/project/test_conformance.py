"""The published vectors, the checker that others run, and bugs planted for it to find."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from documents import ROOT

FOLDER = ROOT / "conformance"


def module(name):
    spec = importlib.util.spec_from_file_location(f"conformance_{name}", FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module", autouse=True)
def folder():
    """The folder's files import each other by name, as they do where they are run."""
    sys.path.insert(0, str(FOLDER))
    names = ("bugs", "check", "make")
    assert not [name for name in names if name in sys.modules]
    yield
    sys.path.remove(str(FOLDER))
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def make(folder):
    return importlib.import_module("make")


@pytest.fixture(scope="module")
def check(folder):
    return importlib.import_module("check")


@pytest.fixture(scope="module")
def definition(folder):
    return module("adapters/linbias_numpy").attention


ROWS = json.loads((FOLDER / "rows.json").read_text(encoding="utf-8"))


def run(check, function, tmp_path, *options):
    """The records of a function, and the exit code."""
    probe = type(sys)("probe")
    probe.attention = function
    sys.modules["probe"] = probe
    path = tmp_path / "records.json"
    code = check.main(["--call", "probe:attention", "--json", str(path), *options])
    del sys.modules["probe"]
    return {record["row"]: record for record in json.loads(path.read_text())}, code


# The files


def test_files_are_what_make_makes(make):
    arrays, rows = make.make()
    assert rows == ROWS
    with np.load(FOLDER / "vectors.npz", allow_pickle=False) as file:
        assert sorted(file.files) == sorted(arrays)
        for name, array in arrays.items():
            assert file[name].dtype == array.dtype
            if name.rsplit("/")[-1] in "qkv":
                np.testing.assert_array_equal(file[name], array)
            else:  # exponentials differ in the last bit between processors
                rtol = 2e-3 if array.dtype == np.float16 else 1e-13
                np.testing.assert_allclose(file[name], array, rtol=rtol, atol=rtol)


def test_inputs_are_the_same_numbers_in_every_format():
    with np.load(FOLDER / "vectors.npz", allow_pickle=False) as file:
        for name in file.files:
            if name.rsplit("/")[-1] in ("q", "k", "v"):
                bits = file[name].astype(np.float32).view(np.uint32)
                assert not (bits & 0xFFFF).any(), name  # nothing that bfloat16 would cut off


def test_every_bug_is_far_from_the_right_answer(make, check):
    named = {bug["name"] for row in ROWS for bug in row["bugs"]}
    assert named == set(sys.modules["bugs"].BUGS)
    for row in ROWS:
        for bug in row["bugs"]:
            assert bug["moves"] is None or bug["moves"] >= 10 * check.TOLERANCE["bfloat16"]


def test_the_checker_needs_numpy_only_and_is_short():
    text = (FOLDER / "check.py").read_text(encoding="utf-8")
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"numpy"}
    assert len(text.splitlines()) < 150


# Verdicts


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_definition_is_right(check, definition, tmp_path, dtype):
    records, code = run(check, definition, tmp_path, "--dtype", dtype)
    assert code == 0 and len(records) == len(ROWS)
    assert {record["verdict"] for record in records.values()} == {"right"}


def planted(make, check, name):
    """A function with one bug: the definition's code with the bug in place of its last step."""
    bugs = sys.modules["bugs"].BUGS

    def attention(q, k, v, **arguments):
        wide = {name: x.astype(float) for name, x in (("q", q), ("k", k), ("v", v))}
        call = make.call({**wide, **arguments})
        with np.errstate(all="ignore"):
            out, lse = bugs[name](call)
        out = out.astype(q.dtype)
        return (out, lse) if arguments.get("return_lse") else out

    return attention


@pytest.mark.parametrize("name", sorted({bug["name"] for row in ROWS for bug in row["bugs"]}))
def test_a_planted_bug_is_found_in_every_type_and_named(make, check, tmp_path, name):
    rows = [row["name"] for row in ROWS if name in [bug["name"] for bug in row["bugs"]]]
    for dtype in ("float64", "float32", "float16"):
        options = ("--dtype", dtype, "--rows", *rows)
        records, code = run(check, planted(make, check, name), tmp_path, *options)
        assert code == 1 and {r["verdict"] for r in records.values()} == {"wrong"}
        if dtype == "float32":
            assert {r["note"] for r in records.values()} == {f"looks like: {name}"}


# Rows that find a bug although they do not name it.
ALSO = [
    ("bias added twice", "lse"),
    ("first query at the first key", "part-of-the-keys"),
    ("bias after softmax", "causal"),
    ("bias of the key's position", "symmetric"),
]


@pytest.mark.parametrize(("name", "row"), ALSO)
def test_other_rows_find_a_planted_bug_too(make, check, tmp_path, name, row):
    records, code = run(check, planted(make, check, name), tmp_path, "--rows", row)
    assert (code, records[row]["verdict"]) == (1, "wrong")


def test_no_two_bugs_of_a_row_give_the_same(check):
    with np.load(FOLDER / "vectors.npz", allow_pickle=False) as file:
        for row in ROWS:
            parts = [part for part in ("out", "lse") if f"{row['name']}/{part}" in file.files]
            bugs = {part: file[f"{row['name']}/bugs-{part}"] for part in parts}
            v, compared = file[f"{row['name']}/v"], row.get("compared")
            for pair in itertools.combinations(range(len(row["bugs"])), 2):
                one, other = ({part: bugs[part][n] for part in parts} for n in pair)
                apart = check.distance(one, other, v, compared)
                assert apart > 2 * check.TOLERANCE["bfloat16"]


# Functions that misbehave


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda out: out[..., :-1], "TypeError: out is (1, 8, 7, 3), not an array (1, 8, 7, 4)"),
        (lambda out: out.astype(np.float64), "TypeError: out is float64, not float32"),
        (lambda out: out.tolist(), "TypeError: out is list, not an array (1, 8, 7, 4)"),
        (lambda out: None, "TypeError: out is NoneType, not an array (1, 8, 7, 4)"),
        (lambda out: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda out: np.full_like(out, np.nan), "NaN"),
    ],
)
def test_what_is_no_answer_is_named_and_the_run_goes_on(check, definition, tmp_path, change, note):
    def attention(q, k, v, **arguments):
        out = definition(q, k, v, **arguments)
        if arguments.get("return_lse"):
            return out[0], None
        return change(out) if q.shape == (1, 8, 7, 4) else out

    records, code = run(check, attention, tmp_path)
    assert code == 1 and len(records) == len(ROWS)
    verdict = "wrong" if note == "NaN" else "failed"
    assert (records["causal"]["verdict"], records["causal"]["note"]) == (verdict, note)
    assert records["lse"]["note"] == "TypeError: lse is NoneType, not an array (1, 8, 5)"
    assert records["far-keys"]["verdict"] == "right"


def test_rows_that_a_function_does_not_take_are_not_claimed(check, definition, tmp_path):
    def attention(q, k, v, *, slopes, causal, scale):
        if not causal:
            raise NotImplementedError("decoders only")
        return definition(q, k, v, slopes=slopes, causal=causal, scale=scale)

    records, code = run(check, attention, tmp_path)
    assert code == 0
    assert records["causal"]["verdict"] == "right"
    refused = {"verdict": "not claimed", "error": None, "note": "decoders only"}
    assert records["symmetric"] == {"row": "symmetric", **refused}
    assert records["packed"]["note"] == "takes no segments"


def test_bfloat16_numbers_come_in_float32(check, definition, tmp_path):
    def attention(q, k, v, *, dtype, **arguments):
        assert dtype == "bfloat16" and q.dtype == np.float32
        answer = definition(q, k, v, **arguments)
        out, *lse = answer if arguments.get("return_lse") else (answer,)
        bits = out.view(np.uint32)
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
        out = bits.astype(np.uint32).view(np.float32)
        return (out, *lse) if lse else out

    _, code = run(check, attention, tmp_path, "--dtype", "bfloat16")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--call", "no_such_module:f"],
            "no_such_module:f cannot be loaded:"
            " ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            ["--call", "math:no_such"],
            "math:no_such cannot be loaded: AttributeError:"
            " module 'math' has no attribute 'no_such'",
        ),
        (["--call", "math"], "say which function, --call module:function"),
        ([], "say which function, --call module:function"),
        (["--call", "math:sqrt", "--rows", "aside"], "there is no row aside; --list names them"),
        (
            ["--call", "adapters.linbias_numpy:attention", "--dtype", "bfloat16"],
            "adapters.linbias_numpy:attention takes no dtype, so it cannot be asked for bfloat16",
        ),
    ],
)
def test_bad_usage_is_one_line(check, capsys, arguments, line):
    with pytest.raises(SystemExit) as stopped:
        check.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip().endswith(f"error: {line}")


def test_the_list_names_every_row_and_bug(check, capsys):
    assert check.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(row["name"] in text and row["meaning"] in text for row in ROWS)


def test_it_runs_as_a_program_without_linbias(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "def attention(q, k, v, *, slopes, causal, scale):\n"
        "    assert 'linbias' not in sys.modules\n"
        "    return q\n"
    )
    done = subprocess.run(
        [sys.executable, str(FOLDER / "check.py"), "--call", "mine:attention", "--rows", "causal"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0 right, 1 wrong, 0 failed, 0 not claimed"


# The records


def test_records_cover_every_adapter_and_the_rows_that_are_there():
    path = ROOT / "evidence" / "records" / "conformance.jsonl"
    assert path.stat().st_size < 100_000
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {r["adapter"] for r in records if "runs" in r} == set(module("run").ADAPTERS)
    for about in (r for r in records if "runs" in r):
        rows = [row["row"] for row in about["rows"]]
        rows += [row for names in about["not_claimed"].values() for row in names]
        assert sorted(rows) == sorted(row["name"] for row in ROWS)
    ours = [r for x in records if x.get("adapter", "").startswith("linbias") for r in x["rows"]]
    assert len(ours) > 100 and {r["verdict"] for r in ours} == {"right"}
