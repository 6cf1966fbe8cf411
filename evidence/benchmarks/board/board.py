"""The board: engines that people deploy on CPUs, side by side on ALiBi models.

    python evidence/benchmarks/board/board.py      # everything: `make board`
    python evidence/benchmarks/board/board.py --models bloom-560m --lengths 512 --engines onnx
    python evidence/benchmarks/board/report.py     # docs/results/board.md

For each model, type and length there is a process per engine, in that engine's own environment, on
the same cores with the same number of threads. Processes take turns; those that wait sleep. Up to
2,048 tokens they stay loaded, and a first turn does not count; above, where they would not fit in
memory together, every turn has a process of its own, which has read 512 tokens before. A turn
during which anything else used more than a twentieth of the cores is repeated, and kept after some
tries with what others used. A turn has a limit of time, and a process one of memory. What fails is
a row that says how, and the others go on. An engine is not asked at the next length when it
failed, needed more than ten times the time of the best, or so long that even time proportional to
the length would pass the limit. Every machine has a file of records (report.py). Rows that it has
are measured again with --again alone, and replaced.

To add an engine: engines/NAME.py with what worker.py asks of it, environments/NAME.txt if it needs
packages of its own, its name in `NAMES` of report.py. Try it on --models tiny-bloom --lengths 64
first: its error there must be that of its type.
"""

import argparse
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import environments  # noqa: E402
import models  # noqa: E402
import record  # noqa: E402
from linbias._run.files import write_whole  # noqa: E402
from report import NAMES  # noqa: E402

ROOT = HERE.parents[2]
MOST_LOAD = 0.05
STAYS = 2048  # tokens up to which processes stay loaded
WARM = 512  # tokens that a process reads first where it does not
LOADING_S = 600  # for loading a model, or writing it in an engine's own form
DTYPES = ("float32", "bfloat16")
Row = dict[str, Any]
Case = tuple[str, str, int]  # model, type, length


class Failed(Exception):
    """How an engine failed, in words."""


class Worker:
    """The process of an engine with a model; `memory_gb` is its limit, for the words of errors."""

    def __init__(self, command: Sequence[str], log: Path, threads: int, memory_gb: float) -> None:
        self.log, self.memory_gb = log, memory_gb
        log.parent.mkdir(parents=True, exist_ok=True)
        theirs = ("OMP_", "GOMP_", "KMP_", "MKL_")  # the same number of threads for all libraries
        own = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        own |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        own |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, env=own, **pipes)

    def ask(self, request: Row, seconds: float) -> Row:
        """Send a line, and wait for the answer; `Failed` where it is an error or does not come."""
        with suppress(BrokenPipeError):  # what happened is said below
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise Failed(f"more than {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self.how_it_ended())
        answer: Row = json.loads(line)
        if "failed" in answer:
            raise Failed(self.in_words(answer["failed"]))
        return answer

    def how_it_ended(self) -> str:
        code = self.process.wait()
        said = self.log.read_text(errors="replace").strip()
        last = self.in_words(said.splitlines()[-1].strip()) if said else ""
        if last.startswith("asked for"):
            return last
        signalled = f"by signal {-code} ({signal.strsignal(-code)})"
        how = f"ended {signalled if code < 0 else f'with {code}'}"
        return f"{how}: {last}" if last else how

    def in_words(self, text: str) -> str:
        """An error, and for memory the size that was asked for."""
        if found := re.search(r"alloc\D.*?(\d{9,})", text):
            return f"asked for {int(found[1]) / 1e9:.0f} GB more, of {self.memory_gb:g} in all"
        if re.search(r"MemoryError|bad_alloc|out of memory|annot allocate memory", text):
            return f"asked for more than {self.memory_gb:g} GB"
        return text.replace(str(ROOT) + "/", "")[:200]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                stream.close()


class Referee:
    """Measures what the output does not have yet."""

    def __init__(self, options: argparse.Namespace, make: Callable[..., Path | None]) -> None:
        """make: (model, type, length) -> the reference; makes what is missing."""
        self.options, self.make = options, make
        text = options.output.read_text() if options.output.exists() else "{}"
        stored, *cases = map(json.loads, text.splitlines())
        self.about: Row = {"days": [], "commits": [], "versions": {}, "absent": [], **stored}
        self.cases: dict[Case, dict[str, Row]] = {
            (case["model"], case["dtype"], case["length"]): case["engines"] for case in cases
        }
        self.prepared: dict[tuple[str, str, str], str | None] = {}

    def save(self) -> None:
        names = ("model", "dtype", "length", "engines")
        cases = (zip(names, (*case, rows), strict=True) for case, rows in self.cases.items())
        lines = [json.dumps(line) + "\n" for line in (self.about, *map(dict, cases))]
        self.options.output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.options.output, "".join(lines).encode())

    def run(self) -> None:
        start, options = time.monotonic(), self.options
        self.pythons = self.install()
        for name, dtype in product(options.models, options.dtypes):
            for length in sorted(options.lengths or models.SHAPES[name].lengths):
                if time.monotonic() - start > options.minutes * 60:
                    say("the time is over; the same command goes on from here")
                    return
                self.measure((name, dtype, length))

    def install(self) -> dict[str, Path]:
        """The Python of each engine, but for those whose environment cannot be made."""
        found = {}
        for engine in self.options.engines:
            packages = self.options.package_lists / f"{engine}.txt"
            folder = self.options.board / "environments" / engine
            try:
                found[engine] = environments.interpreter(packages, folder)
            except environments.NotInstalled as error:
                absent = [engine, f"pip: {error}"]
                if absent not in self.about["absent"]:
                    self.about["absent"].append(absent)
                    self.save()
        return found

    def measure(self, case: Case) -> None:
        """All engines that have no row yet (with `again` those that have one too), on one text."""
        have = self.cases.get(case, {})
        engines = [engine for engine in self.pythons if self.options.again or engine not in have]
        if not engines:
            return
        reference, rows = self.make(*case), {}
        for engine in engines:
            why = self.not_asked(engine, *case) or self.prepare(engine, *case[:2])
            rows[engine] = {"failed": why} if why else {"read_s": []}
        Turns(self, case, rows).run(reference)
        self.cases[case] = have | rows
        self.save()

    def not_asked(self, engine: str, name: str, dtype: str, length: int) -> str | None:
        """Why an engine is not asked, from what it did at the shorter lengths."""
        known = {n: of for (*kind, n), of in self.cases.items() if kind == [name, dtype]}
        last = max((n for n, of in known.items() if n < length and engine in of), default=None)
        if last is None:
            return None
        own = known[last][engine]
        if "failed" in own:
            is_final = own["failed"].startswith(("refused", "not asked"))
            return str(own["failed"]) if is_final else f"not asked: failed at {last:,}"
        took = statistics.median(own["read_s"])
        beside = known[last].values()
        best = min(statistics.median(row["read_s"]) for row in beside if "read_s" in row)
        if took > 10 * best:
            return f"not asked: {took / best:.0f} times the best at {last:,}"
        if took * length / last > self.options.timeout:
            return f"not asked: {took:.0f} s at {last:,}"
        return None

    def prepare(self, engine: str, name: str, dtype: str) -> str | None:
        """Let an engine write its own form of the model; why it cannot run it, if so."""
        key = (engine, name, dtype)
        if key not in self.prepared:
            say(f"{name} {dtype}: {engine} makes its own form, if it has one")
            worker, self.prepared[key] = self.worker(engine, name, dtype, "prepare"), None
            try:
                worker.ask({}, LOADING_S)
            except Failed as error:
                why = str(error)
                self.prepared[key] = why if why.startswith("refused") else f"not converted: {why}"
            finally:
                worker.end()
        return self.prepared[key]

    def worker(self, engine: str, name: str, dtype: str, todo: str) -> Worker:
        given = self.options
        command = [self.pythons[engine], HERE / "worker.py", given.engine_files, engine, todo]
        command += [name, dtype, given.threads, given.memory_gb, given.board]
        log = given.board / "logs" / f"{engine}-{name}-{dtype}-{todo}.txt"
        return Worker(list(map(str, command)), log, given.threads, given.memory_gb)


class Turns:
    """The engines of one case take turns; one that fails leaves, and its row says how."""

    def __init__(self, referee: Referee, case: Case, rows: dict[str, Row]) -> None:
        self.referee, self.options = referee, referee.options
        self.case, self.rows, self.workers = case, rows, dict[str, Worker]()
        self.stay = case[2] <= STAYS

    def run(self, reference: Path | None) -> None:
        rounds = self.options.rounds or (3 if self.case[2] <= 512 else 2 if self.stay else 1)
        turns = [partial(self.turn, reference=None)] * (rounds - 1)
        turns.append(partial(self.turn, reference=reference))
        try:
            for do in [self.load, *turns] if self.stay else turns:
                for engine in [engine for engine, row in self.rows.items() if "failed" not in row]:
                    self.attempt(engine, do)
        finally:
            for worker in self.workers.values():
                worker.end()

    def attempt(self, engine: str, do: Callable[[str], None]) -> None:
        try:
            do(engine)
        except Failed as error:
            self.rows[engine] = {"failed": str(error)}
            self.workers.pop(engine).end()
            self.say(engine)

    def say(self, engine: str) -> None:
        name, dtype, length = self.case
        say(f"{name} {dtype} {length:,} {engine}: {self.rows[engine]}")

    def load(self, engine: str) -> None:
        """Start the process of an engine, and let it do once what does not count."""
        worker = self.workers[engine] = self.referee.worker(engine, *self.case[:2], "serve")
        answer = worker.ask({"load": True}, LOADING_S)
        self.rows[engine]["load_s"] = answer["load_s"]
        self.referee.about["versions"] |= answer["versions"]
        self.work(worker, self.case[2] if self.stay else min(self.case[2], WARM), None)

    def work(self, worker: Worker, length: int, reference: Path | None) -> Row:
        request = {"length": length, "tokens": self.options.tokens}
        request["reference"] = str(reference) if reference else None
        return worker.ask(request, self.options.timeout)

    def turn(self, engine: str, reference: Path | None) -> None:
        """One measurement, repeated if others disturb it."""
        for left in reversed(range(self.options.tries)):
            if not self.stay:
                self.load(engine)
            worker = self.workers[engine]
            time.sleep(self.options.pause)
            start, before = time.perf_counter(), used_by_others([worker.process.pid])
            answer = self.work(worker, self.case[2], reference)
            used = used_by_others([worker.process.pid]) - before
            share = max(0.0, used / (time.perf_counter() - start) / (os.cpu_count() or 1))
            if not self.stay:
                self.workers.pop(engine).end()
            if share <= MOST_LOAD or left == 0:
                self.keep(engine, answer, share)
                return

    def keep(self, engine: str, answer: Row, share: float) -> None:
        row = self.rows[engine]
        row["read_s"].append(round(answer["read_s"], 4))
        if "token_ms" in answer:
            row.setdefault("token_ms", []).append(round(answer["token_ms"], 2))
        if "error" in answer:
            row["error"] = float(f"{answer['error']:.2e}")
        row["peak_mb"] = max(row.get("peak_mb", 0), answer["peak_mb"])
        row["others"] = round(max(row.get("others", 0.0), share), 2)
        self.say(engine)


def used_by_others(own: Iterable[int]) -> float:
    """Seconds of all cores together that others than this process and `own` have used.

    Linux counts in hundredths of a second, so that differences below half a second tell little.
    """
    all_time = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    used = sum(getattr(all_time, name) for name in names)
    for process in (os.getpid(), *own):
        with suppress(psutil.NoSuchProcess):
            used -= sum(psutil.Process(process).cpu_times()[:4])  # with children that have ended
    return used


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def make_with_linbias(board: Path, name: str, dtype: str, length: int) -> Path:
    """Make a model and its reference: `models.py`, in a process of its own."""
    reference = models.reference_path(board, name, dtype, length)
    if not reference.exists() or not models.model_folder(board, name, dtype).exists():
        say(f"{name} {dtype} {length:,}: the answer in float64")
        command = [sys.executable, HERE / "models.py", board, name, "--dtypes", dtype]
        command += ["--lengths", str(length)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return reference


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    known = [name for name in models.SHAPES if not name.startswith("tiny")]
    parser.add_argument("--engines", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--models", nargs="+", default=known, choices=models.SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--lengths", nargs="+", type=int, help="default: 512 and more tokens")
    parser.add_argument("--rounds", type=int, help="default: 3 up to 512, 2 to 2,048, then 1")
    never = float("inf")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a turn")
    parser.add_argument("--memory-gb", type=float, default=20.0, help="for a process")
    parser.add_argument("--minutes", type=float, default=never, help="begin nothing after these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tries", type=int, default=3, help="before a disturbed turn is kept")
    parser.add_argument("--again", action="store_true", help="replace what the output has")
    where = ROOT / "build" / "board"
    parser.add_argument("--board", type=Path, default=where, help="for environments and models")
    parser.add_argument("--output", type=Path, help="default: MACHINE.jsonl of the records")
    # The pause before each turn lasts until threads of the one before sleep.
    folders = {"engine_files": HERE / "engines", "package_lists": HERE / "environments"}
    parser.set_defaults(tokens=16, pause=0.5, **folders)
    return parser.parse_args(words)


def main() -> None:
    options, host = parse(), record.here()
    options.board = options.board.resolve()
    path = record.RECORDS / "board" / f"{record.slug(host['machine'])}.jsonl"
    options.output = options.output or path
    referee = Referee(options, partial(make_with_linbias, options.board))
    referee.about |= {"machine": host["machine"], "threads": options.threads}
    for name, value in (("days", host["date"]), ("commits", host["commit"])):
        referee.about[name] = list(dict.fromkeys([*referee.about[name], value]))
    referee.run()


if __name__ == "__main__":
    main()
