"""The first hour (first_hour.py) in environments that hold what pyproject.toml declares, as links to what is installed here."""

import os
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
    """The names of the distributions that an install with an extra brings, by the metadata of those that are here."""
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
                (folder / top).symlink_to(
                    Path(str(file.locate())).parents[len(file.parts) - 1] / top
                )
    (folder / "linbias").mkdir()
    for path in Path(linbias.__file__).parent.iterdir():
        (folder / "linbias" / path.name).symlink_to(path)
    for binding in ("_cpu", "_xla"):
        spec = find_spec(f"linbias.{binding}")
        if (
            spec is not None
            and spec.origin
            and not (folder / "linbias" / Path(spec.origin).name).exists()
        ):
            (folder / "linbias" / Path(spec.origin).name).symlink_to(spec.origin)
    return request.param, folder


@pytest.mark.processes
@pytest.mark.parametrize("environment", WORKING, indirect=True, ids=lambda extra: extra or "core")
def test_the_first_hour(environment, tmp_path):
    extra, packages = environment
    code = f"import sys; sys.path[:0] = [{str(packages)!r}, {str(ROOT / 'tests')!r}]; import first_hour; first_hour.walk({extra!r})"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # no site-packages
        cwd=tmp_path, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
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


@pytest.mark.skipif(os.name != "posix", reason="make")
def test_make_says_which_python_is_needed(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$1" in -V) echo Python 3.9.1;; *) exit 1;; esac\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", f"PYTHON={old}", f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/python"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "linbias needs Python 3.11 to 3.13" in done.stderr
    assert "Python 3.9.1" in done.stderr
