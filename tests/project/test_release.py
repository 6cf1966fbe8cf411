"""What release/wheels.py builds and checks is what the project says that it supports."""

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROMISED = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module("wheels")


def test_there_is_a_wheel_for_every_python(wheels):
    assert [user for _, users in wheels.BUILDS.values() for user in users] == PROMISED
    assert PROJECT["project"]["requires-python"] == ">=3.11"  # and no upper bound


def test_workflows_call_targets_of_the_makefile_on_the_oldest_and_the_newest_python():
    makefile = (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    calls = [step["run"] for step in steps if step.get("run", "").startswith("make ")]
    targets = re.findall(r" ([a-z][\w-]*)(?= |$)", "\n".join(calls), re.MULTILINE)
    assert {"check", "neon", "macos", "wheels"} <= set(targets)
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
    oldest, newest = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    assert oldest == PROMISED[0] and newest in PROMISED[-2:]  # the last may lack packages still
    (pythons,) = (step["with"]["python-version"] for step in steps if "3.12" in str(step))
    assert set(pythons.split()) == set(PROMISED)  # which the wheels are checked on


def test_wheels_hold_every_target_that_is_compiled(wheels):
    text = (ROOT / "CMakeLists.txt").read_text()
    compiled = ["baseline", *re.search(r"APPEND targets (avx2 .+)\)", text)[1].split()]
    assert list(wheels.TARGETS) == compiled


def test_the_sdist_leaves_out_what_a_build_does_not_need(wheels):
    listing = ["git", "ls-tree", "--name-only", "HEAD"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    left_out = {name.strip("/") for name in PROJECT["tool"]["scikit-build"]["sdist"]["exclude"]}
    kept = {name for name in listed.stdout.split() if not name.startswith(".")} - left_out
    assert kept == wheels.SDIST - {"PKG-INFO"}
