"""Check the proof, and print the axioms that it rests on: `make proof`.

    python proof/prove.py                  # every file of this folder, two at a time
    python proof/prove.py --if-installed   # a line and no error where there is no Coq

It needs Coq (`coqc`, or Rocq's `rocq`) and Flocq, and no package of Python. All that is written
goes to build/proof. What did not change is not checked again.
"""

import argparse
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
BUILD = FOLDER.parent / "build" / "proof"
TRIED = ("8.16.1", "8.20.1", "9.2")
INSTALL = "Debian: apt-get install coq libcoq-flocq"
THEOREM = re.compile(r"^ *(?:Theorem|Corollary|Lemma|Example|Fact|Remark) +([\w']+)", re.MULTILINE)
REQUIRED = re.compile(r"From linbias Require(?: Import| Export)?((?:\s+\w+)+)\.")


class NotInstalled(Exception):
    """What is missing, and how to get it."""


class Refused(Exception):
    """What the compiler says."""


class Coq(NamedTuple):
    compile: tuple[str, ...]
    version: str


@cache
def find_coq() -> Coq:
    """The compiler of proofs on the path; raises NotInstalled."""
    for words in (("coqc",), ("rocq", "compile")):
        if shutil.which(words[0]):
            break
    else:
        raise NotInstalled(f"there is neither coqc nor rocq on the path ({INSTALL})")
    library = Path(_output([*words, "-where"]).strip())
    if not any((library / places / "Flocq").is_dir() for places in ("user-contrib", "")):
        raise NotInstalled(f"Coq has no library Flocq in {library}/user-contrib ({INSTALL})")
    return Coq(words, _output([*words, "--print-version"]).split()[0])


def theorems() -> dict[str, list[str]]:
    """The names of what each file proves, by file."""
    return {name: THEOREM.findall(text) for name, text in _texts().items()}


def check(jobs: int = 2) -> str:
    """Check all files that changed or need one that did; return what Coq says of axioms."""
    with _alone():
        return _check(jobs)


def axioms(printed: str) -> list[str]:
    """The names in what `check` returns."""
    return re.findall(r"^(\w[\w.']*)(?= *:| *$)", printed.partition("Axioms:")[2], re.MULTILINE)


def build_program() -> Path:
    """Compile what Extract.v writes with run.ml, where that may have changed; return its path."""
    with _alone():
        _check(jobs=2)
        if not shutil.which("ocamlopt"):
            raise NotInstalled("there is no ocamlopt (Debian: apt-get install ocaml-nox)")
        program, proved, driver = BUILD / "run", BUILD / "proved.ml", FOLDER / "run.ml"
        if not _is_newer(program, [proved, driver]):
            proved.with_suffix(".mli").unlink(missing_ok=True)  # which hides that R is float
            shutil.copy(driver, BUILD)
            _output(["ocamlopt", "-w", "-a", proved.name, driver.name, "-o", program.name])
        return program


def _check(jobs: int) -> str:
    coq, texts = find_coq(), _texts()
    needed = {
        name: {x for found in REQUIRED.findall(text) for x in found.split() if x in texts}
        for name, text in texts.items()
    }
    # All theorems together, so that none is forgotten.
    named = [f"@{file}.{name}" for file, names in theorems().items() for name in names]
    texts["Everything"] = (
        f"From linbias Require {' '.join(needed)}.\n"
        f"Definition all_theorems := ({', '.join(named)}).\n"
        "Print Assumptions all_theorems.\n"
    )
    needed["Everything"] = set(needed)
    for path in BUILD.glob("*.vo"):  # of files that were there once
        if path.stem not in texts:
            path.unlink()
    sorter, running = TopologicalSorter(needed), dict[Future[None], str]()
    sorter.prepare()
    with ThreadPoolExecutor(jobs) as pool:
        while sorter.is_active():
            for name in sorter.get_ready():
                future = pool.submit(_check_file, coq, name, texts[name], needed[name])
                running[future] = name
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                sorter.done(running.pop(future))
    return (BUILD / "Everything.said").read_text(encoding="utf-8")


def _check_file(coq: Coq, name: str, text: str, needed: set[str]) -> None:
    """Write NAME.vo, what Coq printed meanwhile, and a sum of what was checked."""
    compiled, said, checked = (BUILD / f"{name}.{x}" for x in ("vo", "said", "checked"))
    total = hashlib.sha256("\0".join((coq.version, text, *sorted(needed))).encode()).hexdigest()
    others = [BUILD / f"{other}.vo" for other in needed]
    if checked.exists() and checked.read_text() == total and _is_newer(compiled, others):
        return
    source = FOLDER / f"{name}.v"
    if not source.exists():
        source = BUILD / f"{name}.v"
        source.write_text(text, encoding="utf-8")
    checked.unlink(missing_ok=True)
    words = [*coq.compile, "-q", "-Q", str(BUILD), "linbias", "-o", compiled.name, str(source)]
    said.write_text(_output(words), encoding="utf-8")
    checked.write_text(total)


def _texts() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.v"))}


def _is_newer(path: Path, others: list[Path]) -> bool:
    made = [x.stat().st_mtime_ns if x.exists() else 0 for x in (path, *others)]
    return 0 < made[0] >= max(made)


def _output(words: list[str]) -> str:
    """What a command prints; what it says against a proof is Refused."""
    BUILD.mkdir(parents=True, exist_ok=True)
    # Here it keeps what its tactics found, too.
    done = subprocess.run(words, cwd=BUILD, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused((done.stderr + done.stdout).strip())
    return done.stdout


@contextmanager
def _alone() -> Iterator[None]:
    """Tests may ask for the proof from several processes."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--jobs", type=int, default=2, help="files at a time (default 2)")
    parser.add_argument("--if-installed", action="store_true", help="no error without Coq")
    options = parser.parse_args()
    try:
        version = find_coq().version
        if version not in TRIED:
            print(f"proof: Coq {version} is none of those tried: {', '.join(TRIED)}", flush=True)
        printed = check(options.jobs)
    except NotInstalled as missing:
        print(f"proof: not checked: {missing}")
        sys.exit(0 if options.if_installed else 2)
    except Refused as refused:
        where = re.search(r'(\w+\.v)", line (\d+)', str(refused))
        place = f"{where[1]}, line {where[2]}" if where else "what Coq was called with"
        print(f"{refused}\nproof: refused in {place} (Coq {version})")
        sys.exit(1)
    named = theorems()
    count = sum(map(len, named.values()))
    print(
        f"{printed.strip()}\nproof: {count} statements in {len(named)} files hold (Coq {version})"
    )


if __name__ == "__main__":
    main()
