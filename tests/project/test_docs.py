"""Examples run, public docstrings have the agreed form, and documents say what is so."""

import doctest
import functools
import importlib
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

import linbias
import linbias.jax
from documents import (
    DOCUMENTS,
    ROOT,
    blocks,
    extras_needed,
    run_python,
    write_existing_models,
    write_paper_model,
)
from linbias import cli

MODULES = sorted(
    name
    for _, name, is_package in pkgutil.walk_packages(linbias.__path__, "linbias.")
    if not is_package
    and not name.endswith("__main__")
    and (find_spec("vllm") or not name.startswith("linbias.vllm."))  # parts of that engine
)


# Their examples take seconds each.
THOROUGH = (
    "docs/coming-from.md",
    "docs/guides/endless-texts.md",
    "docs/guides/existing-models.md",
    "docs/guides/many-machines.md",
    "docs/guides/train-short.md",
    "docs/jax.md",
    "linbias.jax.context_parallel",
    "linbias.jax.flax",
    "linbias.lm.extrapolation",
)


def quick(values, name):
    """Rows of a test, of which `make test` leaves those of `THOROUGH` out."""
    marks = {True: [pytest.mark.thorough], False: []}
    return [pytest.param(x, id=name(x), marks=marks[name(x) in THOROUGH]) for x in values]


@pytest.mark.parametrize("name", quick(MODULES, str))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_docstring_examples_run(name, tmp_path):
    module = importlib.import_module(name)
    names = {"np": np, "torch": torch, "tempfile": tempfile, "json": json, "Path": Path}
    names = {**vars(module), **names, "tmp_path": tmp_path}
    result = doctest.testmod(module, extraglobs=names)
    assert result.failed == 0


PUBLIC = [
    *("linbias", "linbias.near_to_far", "linbias.torch", "linbias.jax"),
    *("linbias.jax.context_parallel", "linbias.explore"),
    *(f"linbias.compat.{name}" for name in dir(linbias.compat) if name[0] != "_"),
]
EXAMPLES = [(of, name) for of in PUBLIC for name in importlib.import_module(of).__all__]
if find_spec("flax"):  # which has no release for every Python
    EXAMPLES += [("linbias.jax.flax", name) for name in ("attention_fn", "mha_alibi")]
EXAMPLES.remove(("linbias", "near_to_far"))  # a module


@pytest.mark.parametrize(("module", "name"), EXAMPLES)
def test_public_docstrings_have_the_agreed_parts(module, name):
    thing = getattr(importlib.import_module(module), name)
    text = thing.__doc__ or ""
    assert text[0].isupper() and "." in text.split("\n")[0]
    is_returned = name in ("Explanation", "Visited")
    for part in ("Attributes:",) if is_returned else ("Args:", "Raises:", "Example:", ">>> "):
        assert part in text, f"{name} lacks {part}"


def name(document):
    return document.relative_to(ROOT).as_posix()


WITH_PYTHON = [document for document in DOCUMENTS if blocks(document, "python")]


@pytest.mark.parametrize("document", quick(WITH_PYTHON, name))
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # x-transformers
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_python_examples_of_a_document_run(document, tmp_path, monkeypatch):
    if document.name == "jax.md":
        pytest.importorskip("flax")
    write_paper_model(tmp_path)
    if document.name == "existing-models.md":
        write_existing_models(tmp_path)
    if document.name == "many-machines.md":  # as torchrun says it to one process
        for variable, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
            monkeypatch.setenv(variable, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    from linbias.models import LinbiasConfig, LinbiasForCausalLM

    for family in (LinbiasConfig, LinbiasForCausalLM):  # which a document registers
        monkeypatch.setattr(family, "_auto_class", None)
    assert run_python(document) == len(blocks(document, "python"))


OF_THE_SITE = [document for document in WITH_PYTHON if ROOT / "docs" in document.parents]


@pytest.mark.parametrize("document", OF_THE_SITE, ids=name)
def test_a_page_says_what_its_code_needs(document):
    needed = extras_needed(document)
    line = f"The code of this page needs `pip install '.[{','.join(needed)}]'` in a checkout."
    assert (line in document.read_text(encoding="utf-8")) == bool(needed), line


def test_there_are_examples_in_every_guide():
    guides = {"README.md", "docs/torch.md", "docs/coming-from.md", "docs/jax.md", "docs/models.md"}
    guides |= {name(path) for path in (ROOT / "docs/guides").glob("*.md")} | {"docs/paper.md"}
    assert guides <= {name(document) for document in WITH_PYTHON}


# A block of another language would be code that nothing runs; in braces stand directives of the
# site.
LANGUAGES = {"python", "sh", "text", "{include}", "{toctree}", "{eval-rst}", "{commands}"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_no_code_hides_in_another_language(document):
    text = document.read_text(encoding="utf-8")
    opened = re.findall(r"^[`:]{3,}[ \t]*(\S*)", text, re.MULTILINE)
    assert set(opened[::2]) <= LANGUAGES


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_code_fits_the_width_of_a_page(document):
    code = "\n".join(code for kind in ("python", "sh") for code in blocks(document, kind))
    assert [line for line in code.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_prose_is_wrapped(document):
    """At 120 columns, but for tables, links, and what scripts write."""
    written = r"^```.*?^```|<!-- ([\w ]+): python .*?<!-- /\1 -->"
    text = re.sub(written, "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    long = [line for line in text.splitlines() if len(line) > 120 and line[0] not in "| "]
    assert [line for line in long if "](" not in line and "<" not in line] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_commands_that_a_document_names_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    indented = "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))
    for block in (*blocks(document, "sh"), indented):
        for script in re.findall(r"^python (\S+\.py)", block, re.MULTILINE):
            assert (ROOT / script).exists(), script
        for line in re.findall(r"^(?:.*-m )?linbias .*", block.replace("\\\n", ""), re.MULTILINE):
            check_command(line[line.index("linbias ") :])


def check_command(line):
    """The command exists, and has the options."""
    command = typer.main.get_command(cli.app)
    for word in shlex.split(line, comments=True)[1:]:
        if word in getattr(command, "commands", ()):
            command = command.commands[word]
        elif word.startswith("-") and word != "-":
            assert not hasattr(command, "commands") or word in ("--help", "--version"), line
            options = {option for parameter in command.params for option in parameter.opts}
            assert word.partition("=")[0] in options | {"--help"}, f"{word}: {line}"
        elif hasattr(command, "commands"):
            assert word in ("COMMAND", "...", "|"), f"no command {word}: {line}"


def test_commands_are_checked_to_the_option():
    check_command("linbias train --steps 5 -o out  # -x")
    for line in ("linbias tran", "linbias train --step 5", "linbias paper evaluate --stride 2"):
        with pytest.raises(AssertionError):
            check_command(line)


def run_script(name):
    """A module of evidence/runs, or the report of the board."""
    before = list(sys.path)
    sys.path[:0] = [str(ROOT / "evidence" / x) for x in ("runs", "benchmarks/board")]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before


def written_parts():
    """By document and part, what scripts write from records and from the code."""
    report, encoders, board = map(run_script, ("paper_report", "encoders_report", "report"))
    read, support = run_script("markers").read, run_script("support")
    for document, implementations in support.DOCUMENTS.items():
        yield (document, "support"), support.table(implementations)
    for part, text in report.parts(report.read_kept()).items():
        yield ("docs/paper.md", part), text
    for part, text in encoders.parts(encoders.Found(read(encoders.RECORDS))).items():
        yield ("docs/results/encoders.md", part), text
    for part, text in board.parts(board.RECORDS).items():
        yield ("docs/results/board.md", part), text
    for part, text in run_script("conformance_page").written_parts().items():
        yield ("docs/conformance.md", part), text
    yield ("docs/guides/endless-texts.md", "measured"), run_script("streams").measured()
    yield ("docs/numerics.md", "attack"), run_script("attack").table()
    yield from run_script("design").written_parts().items()
    yield from run_script("update_readme").written_parts().items()


def test_documents_say_what_records_and_code_say():
    """Each part is written by the command that it names."""
    minus = run_script("markers").minus
    for (document, part), text in written_parts():
        written = (ROOT / document).read_text(encoding="utf-8")
        shown = re.search(rf"<!-- {part}: .*? -->\n(.*?)\n<!-- /{part} -->", written, re.DOTALL)
        assert shown and shown[1] == minus(text), f"{document}: {part}"


def test_every_part_that_a_script_writes_names_the_command():
    """The script is there, takes the options, and knows the document and the part."""
    script = r"evidence/(?:runs|benchmarks/board)/\w+\.py"
    opened = rf"<!-- ([\w ]+): python ({script})([^\n]*?) -->\n.*?<!-- /\1 -->"
    runs, helpers = ROOT / "evidence" / "runs", r"^(?:from|import) (\w+_report)"
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        found = re.findall(opened, text, re.DOTALL)
        assert len(found) == text.count("<!-- /"), f"{document.name}: a part without its command"
        for part, script, options in found:
            source = (ROOT / script).read_text(encoding="utf-8")
            for helper in re.findall(helpers, source, re.MULTILINE):
                source += (runs / f"{helper}.py").read_text(encoding="utf-8")
            assert f'"{part}"' in source and document.name in source, f"{document.name}: {part}"
            assert all(f'"{word}"' in source for word in re.findall(r"--[a-z0-9-]+", options))


def test_files_that_documents_point_to_exist():
    for document in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def exists(name):
    """Import it; a name that moved answers with an ImportError, too."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
            return functools.reduce(getattr, parts[end:], module)
        except (ImportError, AttributeError):
            continue
    return None


def test_names_of_ours_that_prose_mentions_exist():
    sources = [*DOCUMENTS, ROOT / "DESIGN.md", *(ROOT / "src").rglob("*.py")]
    mentioned = {
        (path.name, name)
        for path in sources
        for name in re.findall(r"`(linbias(?:\.\w+)+)", path.read_text(encoding="utf-8"))
        if path.name != "LOG.md" and not name.endswith(".py")
    }
    assert len(mentioned) > 50
    assert {found for found in mentioned if exists(found[1]) is None} == set()


def test_no_file_in_the_tree_is_over_200_kb():
    listing = ["git", "ls-files", "-z"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [(name, ROOT / name) for name in listed.stdout.split("\0")]
    sizes = {name: path.stat().st_size for name, path in paths if path.is_file()}
    assert {name: size for name, size in sizes.items() if size > 200 * 1024} == {}
