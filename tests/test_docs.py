"""Every example in a docstring and in the README runs, and every public name has a docstring in the agreed form."""

import doctest
import importlib
import json
import pkgutil
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import linbias
import linbias.jax.flax
from documents import (
    DOCUMENTS,
    ROOT,
    blocks,
    run_python,
    write_existing_models,
    write_paper_model,
)

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


PUBLIC = [(linbias, name) for name in linbias.__all__ if name != "near_to_far"]
PUBLIC += [(linbias.near_to_far, name) for name in ("attention", "share_outside", "window")]
PUBLIC += [
    (importlib.import_module("linbias.torch"), n)
    for n in (
        "attention",
        "attention_varlen",
        "attention_weights",
        "merge",
        "visited",
        "MultiheadAttention",
    )
]
PUBLIC += [(linbias.jax, name) for name in ("attention", "attention_weights", "merge")]
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


WITH_PYTHON = [document for document in DOCUMENTS if blocks(document, "python")]


@pytest.mark.parametrize("document", WITH_PYTHON, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # x-transformers
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_python_examples_of_a_document_run(document, tmp_path, monkeypatch):
    write_paper_model(tmp_path)
    if document.name == "existing-models.md":
        write_existing_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    from linbias.models import LinbiasConfig, LinbiasForCausalLM

    for family in (LinbiasConfig, LinbiasForCausalLM):  # which a document registers
        monkeypatch.setattr(family, "_auto_class", None)
    assert run_python(document) == len(blocks(document, "python"))


def test_there_are_examples_in_every_guide():
    assert {
        "README.md",
        "torch.md",
        "coming-from.md",
        "jax.md",
        "models.md",
        "paper.md",
        "existing-models.md",
    } <= {document.name for document in WITH_PYTHON}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_a_document_names_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    sources = sorted((ROOT / "src/linbias/cli").glob("*.py"))
    commands = "".join(path.read_text() for path in sources)
    indented = "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))
    for block in (*blocks(document, "sh"), indented):
        for command in re.findall(
            r"^(?:.*-m )?linbias (?:paper )?([a-z]+)\b", block, re.MULTILINE
        ):
            assert f"def {command}(" in commands, command


def test_tables_of_abilities_are_those_of_the_implementations():
    """`python runs/support.py` writes them."""
    sys.path.insert(0, str(ROOT / "runs"))
    try:
        support = importlib.import_module("support")
    finally:
        sys.path.pop(0)
    for document, implementations in support.DOCUMENTS.items():
        assert support.table(implementations) in (ROOT / document).read_text(encoding="utf-8")


def test_the_table_of_defects_is_that_of_its_record():
    """`python runs/existing_defects.py --table` writes it."""
    sys.path.insert(0, str(ROOT / "runs"))
    try:
        defects = importlib.import_module("existing_defects")
    finally:
        sys.path.pop(0)
    written = defects.table(json.loads(defects.RECORD.read_text()))
    assert written in defects.DOCUMENT.read_text(encoding="utf-8")


def test_files_that_documents_point_to_exist():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


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
