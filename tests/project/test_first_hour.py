"""The first hour in environments that hold what pyproject.toml declares, as links."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import linbias
from first_hour import ROOT, WORKING
from linbias.kernels import core


def declared(extra: str) -> set[str]:
    """The distributions that an install with an extra brings, by the metadata that is here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = project["optional-dependencies"]
    wanted = [(word, "") for word in (*project["dependencies"], *of_extras.get(extra, ()))]
    found: set[str] = set()
    for words, asked in wanted:  # grows
        requirement = Requirement(words)
        if requirement.marker and not requirement.marker.evaluate({"extra": asked}):
            continue
        if requirement.name == "linbias":
            wanted += [(word, "") for inner in requirement.extras for word in of_extras[inner]]
            continue
        for inner in ("", *requirement.extras):
            if f"{requirement.name}[{inner}]" not in found:
                found.add(f"{requirement.name}[{inner}]")
                wanted += [(word, inner) for word in metadata.requires(requirement.name) or ()]
    return {name.partition("[")[0] for name in found}


@pytest.fixture(scope="module")
def environment(request, tmp_path_factory):
    """A folder of packages: those declared for an extra, and linbias."""
    folder = tmp_path_factory.mktemp(f"packages-{request.param}")
    for name in declared(request.param):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                packages = Path(str(file.locate())).parents[len(file.parts) - 1]
                (folder / top).symlink_to(packages / top)
    (folder / "linbias").mkdir()
    bindings = filter(None, (find_spec(f"linbias.{name}") for name in ("_cpu", "_xla")))
    for path in {*Path(linbias.__file__).parent.iterdir(), *(Path(x.origin) for x in bindings)}:
        (folder / "linbias" / path.name).symlink_to(path)
    return request.param, folder


@pytest.mark.processes
@pytest.mark.parametrize("environment", WORKING, indirect=True, ids=lambda extra: extra or "core")
def test_the_first_hour(environment, tmp_path):
    extra, packages = environment
    paths = [str(packages), str(ROOT / "tests/project")]
    code = f"import sys; sys.path[:0] = {paths}; import first_hour; first_hour.walk({extra!r})"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # no site-packages
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert core.WHY_MISSING or "Warning" not in done.stderr


def test_a_build_needs_no_framework_and_leaves_nothing_in_the_checkout():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {Requirement(words).name for words in settings["build-system"]["requires"]}
    assert needed == {"scikit-build-core", "nanobind"}
    build = settings["tool"]["scikit-build"]
    assert "build-dir" not in build
    kept = [override for override in build["overrides"] if "build-dir" in override]
    assert [override["if"] for override in kept] == [{"state": "editable"}]


# A Python that does as it is told, and notes what it was asked.
TOLD = """#!/bin/sh
echo "$*" >> "$0.log"
case "$*" in
  -V) echo Python 3.9.1;;
  "-c import sys"*) exit {status};;
  "-m venv"*) {venv};;
  "-m pip"*) {pip};;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Run make with such a Python; returns what it said, and what Python was asked."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    python, venv = tmp_path / "python3", tmp_path / "venv"
    log = tmp_path / "python3.log"

    def run(goal, status=0, pip="true", venv_ends="true"):
        link = (
            f"mkdir -p {venv}/bin && touch {venv}/pyvenv.cfg && ln -sf {python} {venv}/bin/python"
        )
        made = f"{link} && {venv_ends} && touch {venv}/bin/activate"
        python.write_text(TOLD.format(status=status, venv=made, pip=pip))
        python.chmod(0o755)
        for asked in (log, venv / "bin/python.log"):
            asked.unlink(missing_ok=True)
        words = ["make", "-s", f"PYTHON={python}", f"VENV={venv}", f"{venv}/{goal}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        logs = [path for path in (log, venv / "bin/python.log") if path.exists()]
        return done.returncode == 0, done.stderr, "".join(path.read_text() for path in logs)

    return run


def test_make_says_which_python_is_needed(make):
    went, words, asked = make(".run", status=1)
    assert not went and "venv" not in asked
    assert "linbias needs Python 3.11 or later, and " in words
    assert "is Python 3.9.1: make PYTHON=" in words


def test_make_begins_a_half_made_environment_anew(make, tmp_path):
    went, _, asked = make(".run", venv_ends="false")
    assert not went and "--clear" not in asked
    assert (tmp_path / "venv/bin/python").exists()
    went, words, asked = make(".run")
    assert went, words
    assert f"-m venv --clear {tmp_path}/venv" in asked


def test_make_clears_no_folder_but_an_environment(make, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/letter.txt").touch()
    _, _, asked = make("bin/activate")
    assert f"-m venv {tmp_path}/venv" in asked


@pytest.mark.parametrize(
    ("done", "goal", "fails"), [("bin/activate", ".run", "--editable"), (".run", ".dev", "dev")]
)
def test_make_goes_on_with_an_install_that_stopped(make, tmp_path, done, goal, fails):
    assert make(done)[0]
    full = f'case "$*" in *{fails}*) echo "[Errno 28] No space left on device" >&2; exit 1;; esac'
    went, words, _ = make(goal, pip=full)
    assert not went and not (tmp_path / "venv" / goal).exists()
    assert "No space left on device\nThe install into " in words
    assert "make goes on" in words
    went, words, asked = make(goal)
    assert went, words
    assert fails in asked and "-m venv" not in asked
    assert make(goal)[2] == ""  # nothing is left to do
