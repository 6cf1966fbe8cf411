"""Every example in a docstring and in the README runs, and every public name has a docstring in the agreed form."""

import ast
import doctest
import importlib
import json
import pkgutil
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import linbias
import linbias.jax.flax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

MODULES = sorted(
    name
    for _, name, is_package in pkgutil.walk_packages(linbias.__path__, "linbias.")
    if not is_package and not name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_docstring_examples_run(name, tmp_path):
    module = importlib.import_module(name)
    names = {
        "np": np,
        "torch": torch,
        "tmp_path": tmp_path,
        "tempfile": tempfile,
        "json": json,
        "Path": Path,
    }
    result = doctest.testmod(module, extraglobs={**vars(module), **names})
    assert result.failed == 0


PUBLIC = [(linbias, name) for name in linbias.__all__]
PUBLIC += [
    (importlib.import_module("linbias.torch"), n)
    for n in ("attention", "attention_varlen", "MultiheadAttention")
]
PUBLIC += [(linbias.jax, "attention")]
PUBLIC += [(linbias.jax.flax, name) for name in ("attention_fn", "mha_alibi")]


@pytest.mark.parametrize(
    ("module", "name"), PUBLIC, ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_public_docstrings_have_the_agreed_parts(module, name):
    thing = getattr(module, name)
    text = thing.__doc__ or ""
    assert text[0].isupper() and "." in text.split("\n")[0]
    if name == "Explanation":
        assert "Attributes:" in text
        return
    for part in ("Args:", "Raises:", "Example:", ">>> "):
        assert part in text, f"{name} lacks {part}"


def test_readme_python_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(ast.parse(block), "README.md", "exec"), names)


def test_readme_names_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    sources = sorted((ROOT / "src/linbias/cli").glob("*.py"))
    commands = "".join(path.read_text() for path in sources)
    for command in re.findall(
        r"\blinbias ([a-z]+)\b", " ".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    ):
        assert f"def {command}(" in commands, command


def test_files_that_documents_point_to_exist():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{document.name}: {target}"


def test_no_file_in_the_tree_is_over_200_kb():
    import subprocess

    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    sizes = {
        name: (ROOT / name).stat().st_size
        for name in listed.stdout.split("\0")
        if (ROOT / name).is_file()
    }
    assert {name: size for name, size in sizes.items() if size > 200 * 1024} == {}
