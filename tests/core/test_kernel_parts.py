"""Each part of the core's kernel includes what it uses: an editor opens it without errors."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
PARTS = sorted(str(part.relative_to(CSRC)) for part in CSRC.glob("kernel/**/*-inl.h"))
COMPILER = shutil.which("c++")
# C++20 would take a name that nobody declared for that of a template which comes later.
FLAGS = ("-std=c++17", "-fsyntax-only", "-Iinclude", "-I.", "-mavx2", "-mfma", "-x", "c++")


@pytest.mark.thorough
@pytest.mark.skipif(
    COMPILER is None or platform.machine() != "x86_64", reason="needs a C++ compiler for x86_64"
)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_compiles_alone(part):
    command = [COMPILER, *FLAGS, part]
    run = subprocess.run(command, cwd=CSRC, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
