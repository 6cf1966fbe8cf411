"""What release/wheels.py builds and checks is what the project says that it supports."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def wheels():
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "release/wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_wheel_for_every_python():
    users = [user for _, users in wheels().BUILDS.values() for user in users]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert users == promised
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"


def test_wheels_hold_every_target_that_is_compiled():
    text = (ROOT / "CMakeLists.txt").read_text()
    compiled = ["baseline", *re.search(r"APPEND targets (avx2 .+)\)", text)[1].split()]
    assert list(wheels().TARGETS) == compiled


def test_the_sdist_leaves_out_what_a_build_does_not_need():
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    left_out = {name.strip("/") for name in PROJECT["tool"]["scikit-build"]["sdist"]["exclude"]}
    kept = {name for name in listed.stdout.split() if not name.startswith(".")} - left_out
    assert kept == wheels().SDIST - {"PKG-INFO"}
