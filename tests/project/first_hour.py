"""The first hour of a new user, from install to a first own result: `make first-hour`.

Each environment is made anew and gets what `pip install` of a copy of this checkout brings: with
no extra, with `torch`, `jax`, and `lm`. Inside, as this same file with --inside, run the commands,
the messages about what is not installed, and the code of README and docs. test_first_hour.py does
the same, cheaply.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Of each environment: the parts of linbias that work there, and the documents whose code runs
# there.
WORKING = {
    "": (),
    "torch": ("linbias.torch",),
    "jax": ("linbias.jax", "linbias.jax.flax"),
    "lm": ("linbias.torch", "linbias.models", "linbias.lm"),
}
DOCUMENTS = {
    "": (),
    "torch": ("README.md", "docs/torch.md", "docs/coming-from.md"),
    "jax": ("docs/jax.md",),
    "lm": ("README.md", "docs/models.md", "docs/paper.md", "docs/guides/train-short.md"),
}
PARTS = tuple(dict.fromkeys(part for parts in WORKING.values() for part in parts))
FIRST_RUN = (
    "train --steps 20 --batch-size 4 -o output/train -q",
    "evaluate output/train --length 128,512 --limit-tokens 4096 -q",
    "generate output/train -n 20",
)


# Inside an environment: only the standard library and linbias are sure to be there.


def walk(extra: str) -> None:
    """The commands and messages of a first hour."""
    check_help()
    assert "slope 1/2" in linbias_says("explain")
    doctor = " ".join(linbias_says("doctor").split())
    for part in PARTS:
        check_part(part, works=part in WORKING[extra], doctor=doctor)
    if extra != "lm":
        message = linbias_says("train --steps 1 -o output/never", status=2)
        assert "pip install 'linbias[lm]'" in message, message
        assert message.count("\n") == 1, message


def check_help() -> None:
    """Every command explains itself within 80 columns."""
    import typer

    from linbias import cli

    paths = [[]]
    for path in paths:  # grows as groups are met
        shown = linbias_says(" ".join([*path, "--help"]))
        too_wide = [line for line in shown.splitlines() if len(line) > 80]
        assert not too_wide, too_wide
        command = typer.main.get_command(cli.app)
        for name in path:
            command = command.commands[name]
        paths += [[*path, name] for name in getattr(command, "commands", ())]
    assert len(paths) > 10


def check_part(part: str, works: bool, doctor: str) -> None:
    """A part that is not installed says so, and what installs it."""
    try:
        module = importlib.import_module(part)
        for name in getattr(module, "__all__", ()):
            getattr(module, name)
    except ImportError as error:
        needed = str(error)
        assert not works, needed
    else:
        assert works, f"{part} works without what it needs"
        return
    message = r"linbias\S* needs .+ not installed: pip install 'linbias\[\w+\]'"
    assert re.fullmatch(message, needed), needed
    assert needed in doctor or part == "linbias.models", needed


def linbias_says(words: str, status: int = 0) -> str:
    """What a command prints, in this process."""
    from linbias import cli

    os.environ.update(COLUMNS="80", TERM="dumb")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            cli.app(words.split(), prog_name="linbias")
        except SystemExit as end:
            assert (end.code or 0) == status, (words, end.code, shown.getvalue())
    return shown.getvalue()


def run_documents(extra: str) -> None:
    import documents

    if extra == "lm":
        documents.write_paper_model(Path())
    for name in DOCUMENTS[extra]:
        assert documents.run_python(ROOT / name), name
    if extra == "":
        import doctest

        for module in ("definition", "explain", "schedules", "near_to_far", "cpu"):
            named = importlib.import_module(f"linbias.{module}")
            names = {"np": importlib.import_module("numpy")}
            assert not doctest.testmod(named, extraglobs=names).failed


# Outside: making the environments.


def copy_of_checkout(folder: Path) -> Path:
    """The files that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extras", nargs="*", default=list(WORKING), choices=list(WORKING))
    parser.add_argument("--inside", choices=list(WORKING), help="walk in this environment")
    parser.add_argument("--documents", action="store_true", help="inside: run their code, too")
    arguments = parser.parse_args()
    if arguments.inside is None:
        for extra in arguments.extras:
            with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
                visit(extra, Path(folder))
        return
    walk(arguments.inside)
    if arguments.documents:
        run_documents(arguments.inside)


def visit(extra: str, folder: Path) -> None:
    """Install into a new environment and walk through the first hour there."""
    checkout = copy_of_checkout(folder / "linbias")
    before = sorted(checkout.rglob("*"))
    python = folder / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    wanted = f".[{extra}]" if extra else "."
    subprocess.run([python, "-m", "pip", "install", "--quiet", wanted], cwd=checkout, check=True)
    assert sorted(checkout.rglob("*")) == before, "the install left files in the checkout"
    work = folder / "work"
    work.mkdir()
    walk_inside = [python, "-W", "ignore", __file__, "--inside", extra, "--documents"]
    subprocess.run(walk_inside, cwd=work, check=True)
    for words in FIRST_RUN if extra == "lm" else ():
        command = [python.with_name("linbias"), *words.split()]
        subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
    print(f"pip install '{wanted}': the first hour went well", flush=True)


if __name__ == "__main__":
    main()
