"""Break the source on purpose, one change at a time, and see which test notices: `make mutants`.

The changes (mutants) are listed by area and file in evidence/mutants/*.toml. Each says what it
breaks, a text that occurs once in the file, and what replaces it; then, where they differ from
those of the file or the list, the tests that should notice.

Each is made in a temporary copy of the tree. It is killed when a test fails that passes on the
unchanged copy, crashes, or runs out of time, or when Coq refuses it; to survive is an error.
Results are kept in build/mutants.jsonl with a hash of the file, the change and the tests: later
runs repeat only what may differ.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from linbias._run.files import JsonLog

ROOT = Path(__file__).parents[2]
LISTS = Path(__file__).parent
RECORDS = ROOT / "build" / "mutants.jsonl"
CORE_TEST = tuple(f"csrc/test/{path.name}" for path in sorted((ROOT / "csrc/test").iterdir()))
PROOF = tuple(f"proof/{path.name}" for path in sorted((ROOT / "proof").glob("*.v")))
SURVIVES = "no test notices it"
NOT_COPIED = (".git", ".venv", "build", "dist", "output", "__pycache__", ".*_cache", ".hypothesis")

# Put first on the path of the copy: an editable install would lead back to the tree.
SITE_CUSTOMIZE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
"""


@dataclass(frozen=True)
class Mutant:
    area: str
    file: str
    # Arguments of pytest; "core" and a target, the core's own test; or "proof", which Coq checks.
    tests: tuple[str, ...]
    breaks: str  # also its name
    old: str
    new: str

    @property
    def key(self) -> str:
        """Changes with whatever the result depends on directly."""
        parts = [self.file, self.old, self.new, *self.tests, _content(self.file)]
        parts += [_content(name) for name in sorted(set(test_files(self.tests)))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@cache
def _content(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_files(tests: tuple[str, ...]) -> Iterator[str]:
    """The files that hold these tests."""
    for command in tests:
        first, *_ = shlex.split(command)
        special = {"core": CORE_TEST, "proof": ("proof/prove.py", *PROOF)}
        yield from special.get(first, (first.split("::")[0],))


def read_mutants() -> list[Mutant]:
    """All mutants in the order of their lists."""
    mutants = []
    for path in sorted(LISTS.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        area, usual = content.pop("area"), content.pop("tests")
        for file, of_file in content.items():
            for breaks, old, new, *more in of_file["mutants"]:
                own = {"tests": of_file.get("tests", usual), **(more[0] if more else {})}
                tests = tuple(own.pop("tests"))
                mutants.append(Mutant(area, file, tests, breaks, old, new, **own))
    return mutants


def mistakes(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the lists: impossible changes, names taken twice, missing tests."""
    found = []
    names = Counter(mutant.breaks for mutant in mutants)
    for mutant in mutants:
        count = _content(mutant.file).count(mutant.old)
        if count != 1:
            found.append(f"{mutant.breaks}: old must occur once in {mutant.file}, got {count}")
        if mutant.old == mutant.new:
            found.append(f"{mutant.breaks}: new must differ from old")
        if names[mutant.breaks] > 1:
            found.append(f"{mutant.breaks}: {names[mutant.breaks]} mutants have this name")
        missing = [name for name in test_files(mutant.tests) if not (ROOT / name).exists()]
        found += [f"{mutant.breaks}: tests must exist, got {name}" for name in missing]
    return found


class NoResult(Exception):
    """A mutant could not be tried."""


class Workspace:
    """A copy of the tree in which mutants are made, one at a time."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.root, self.seconds = folder / "tree", seconds
        self.failing: dict[str, str | None] = {}  # by command, what fails without a mutant
        self.pytest: subprocess.Popen[str] | None = None
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED, "*.so"))
        (folder / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
        for name in ("_cpu", "_xla"):  # the compiled modules of the environment
            spec = importlib.util.find_spec(f"linbias.{name}")
            if spec is not None and spec.origin is not None:
                shutil.copy(spec.origin, self.root / "src" / "linbias")
        paths = [str(folder), str(self.root / "src")]
        # Bytecode is not kept: a change within a second and of the same size would go unseen.
        own = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | own | {"PYTHONPATH": os.pathsep.join(paths)}

    def try_out(self, mutant: Mutant) -> str | None:
        """Return what killed a mutant, or None if it survived."""
        file = self.root / mutant.file
        before = file.read_text(encoding="utf-8")
        file.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            for command in mutant.tests:
                killer = self.run(command)
                if killer:
                    break
            else:
                return None
        finally:
            file.write_text(before, encoding="utf-8")
        self.check_unchanged(command)
        return killer

    def check_unchanged(self, command: str) -> None:
        if command not in self.failing:
            self.failing[command] = self.run(command)
        if self.failing[command]:
            raise NoResult(f"{self.failing[command]} fails without any change")

    def run(self, command: str) -> str | None:
        """Run tests; return the first that fails, or None."""
        words = shlex.split(command)
        program, pattern = None, r"FAILED (.*)"
        if words[0] == "core":
            program = [str(self.build(words[1])), words[1]]
        elif words[0] == "proof":
            program = [sys.executable, str(self.root / "proof/prove.py"), "--jobs", "1"]
            pattern = r"proof: (refused in .*)"
        if program:
            code, output = self.run_program(program)
            if code == 2:
                raise NoResult(f"this machine cannot run {command}: {output.strip()}")
        else:
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider"]
            code, output = self.run_pytest([*options, *words])
            pattern = r"(?:FAILED|ERROR) (\S+?::\w+(?:\[.*?\](?= - |$))?)"
        if code == 0:
            return None
        if code is None:
            return f"the time limit of {command}"
        if code < 0:
            return f"{signal.Signals(-code).name} in {command}"
        found = re.search(f"^{pattern}", output, re.MULTILINE)
        if code == 1 and found:
            return found[1]
        raise NoResult(f"{command} ended with {code}:\n{output[-2000:]}")

    def run_pytest(self, arguments: list[str]) -> tuple[int | None, str]:
        """Exit status and output; by a process that has loaded what takes long to load."""
        if self.pytest is None:
            server = [sys.executable, str(Path(__file__).with_name("forking.py"))]
            own = {"cwd": self.root, "env": self.environment, "start_new_session": True}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.pytest = subprocess.Popen(server, **own, **pipes)
        output = self.root.with_name("output")
        assert self.pytest.stdin is not None and self.pytest.stdout is not None
        self.pytest.stdin.write(json.dumps([arguments, str(output), self.seconds]) + "\n")
        self.pytest.stdin.flush()
        answer = self.pytest.stdout.readline()
        if not answer:
            raise NoResult("the process that runs pytest has died")
        return json.loads(answer), output.read_text(encoding="utf-8", errors="replace")

    def run_program(self, command: list[str]) -> tuple[int | None, str]:
        how = {"capture_output": True, "text": True, "start_new_session": True}
        try:
            done = subprocess.run(command, check=False, timeout=self.seconds, **how)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout

    def build(self, target: str) -> Path:
        """Build the core's own test for one target; a compiler's complaint is no result."""
        build = self.root / "build" / target
        beside = str(Path(sys.executable).parent)
        cmake = shutil.which("cmake", path=os.pathsep.join((beside, os.environ["PATH"])))
        if cmake is None:
            raise NoResult("there is no cmake")
        options = ["-DLINBIAS_TEST=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
        options += [f"-DLINBIAS_TARGETS={target}", "-S", str(self.root), "-B", str(build)]
        steps = [["--build", str(build), "--target", "attention_test"]]
        if not build.exists():
            steps.insert(0, options)
        for step in steps:
            done = subprocess.run(
                [cmake, *step], check=False, capture_output=True, text=True, start_new_session=True
            )
            if done.returncode:
                raise NoResult(f"cmake failed: {(done.stdout + done.stderr)[-2000:]}")
        return build / "attention_test"

    def close(self) -> None:
        if self.pytest is not None:
            self.pytest.kill()
            self.pytest.wait()


def try_all(todo: list[Mutant], jobs: int, seconds: float, log: JsonLog) -> list[str]:
    """Try out what is to do and keep each result at once; return what went wrong."""
    problems: list[str] = []
    lock, numbers = threading.Lock(), itertools.count(1)
    free: queue.SimpleQueue[Workspace] = queue.SimpleQueue()

    def try_one(mutant: Mutant) -> None:
        workspace, begin = free.get(), time.perf_counter()
        result, problem = None, None
        try:
            killed_by = workspace.try_out(mutant)
            result = {"breaks": mutant.breaks, "key": mutant.key, "killed_by": killed_by}
            outcome = killed_by or SURVIVES
            problem = None if killed_by else SURVIVES
        except NoResult as error:
            problem = outcome = str(error)
        finally:
            free.put(workspace)
        with lock:
            if result is not None:
                log.append(result)
            if problem:
                problems.append(f"{mutant.area}: {mutant.breaks}: {problem.splitlines()[0]}")
            place = f"[{next(numbers)}/{len(todo)}]"
            took = time.perf_counter() - begin
            print(f"{place} {mutant.breaks}: {outcome} ({took:.0f} s)", flush=True)

    with contextlib.ExitStack() as stack:
        for _ in range(min(jobs, len(todo))):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
            workspace = contextlib.closing(Workspace(Path(folder), seconds))
            free.put(stack.enter_context(workspace))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        tried = [pool.submit(try_one, mutant) for mutant in todo]
        try:
            for future in tried:
                future.result()
        except BaseException:
            print("stopping after what is being tried now")
            pool.shutdown(cancel_futures=True)
            raise
    return problems


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", metavar="TEXT", help="mutants whose name, file or area holds it")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default 1)")
    parser.add_argument("--again", action="store_true", help="repeat what is known already")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a test command")
    options = parser.parse_args()
    mutants = read_mutants()
    if wrong := mistakes(mutants):
        print(*wrong, sep="\n")
        return 1
    wanted = (options.only or "").lower()
    chosen = [m for m in mutants if wanted in f"{m.breaks} {m.file} {m.area}".lower()]
    RECORDS.parent.mkdir(exist_ok=True)
    log = JsonLog(RECORDS)
    known = {result["breaks"]: result for result in log.records}  # the last of each
    # By keys of the tree as it is now, before it is copied.
    same = {m.breaks for m in chosen if known.get(m.breaks, {}).get("key") == m.key}
    todo = [m for m in chosen if options.again or m.breaks not in same]
    print(f"{len(mutants)} mutants, {len(chosen)} chosen, {len(todo)} to try")
    problems = try_all(todo, options.jobs, options.seconds, log)
    survived = (m for m in chosen if m not in todo and known[m.breaks]["killed_by"] is None)
    problems += [f"{mutant.area}: {mutant.breaks}: {SURVIVES}" for mutant in survived]
    print(*problems, f"{len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
