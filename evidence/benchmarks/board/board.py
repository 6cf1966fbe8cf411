"""The board: engines that people deploy on CPUs, side by side on ALiBi models.

    python evidence/benchmarks/board/board.py  # everything: `make board`
    python evidence/benchmarks/board/board.py --models bloom-560m --lengths 512 --engines linbias
    onnx python evidence/benchmarks/board/report.py # docs/results/board.md

For each model, type and length there is a process per engine, in that engine's own environment, on
the same cores with the same number of threads. Processes take turns; those that wait sleep. Up to
2,048 tokens they stay loaded, and a first turn does not count; above, where they would not fit in
memory together, every turn has a process of its own, which has read 512 tokens before. A turn
during which anything else used more than a twentieth of the cores is repeated, and kept after some
tries with what others used. A turn has a limit of time, and a process one of memory. What fails is
a row that says how, and the others go on. An engine is not asked at the next length when it
failed, needed more than ten times the time of the best, or so long that even time proportional to
the length would pass the limit. Every machine has a file of records. Rows that it has are measured
again with --again alone, and replaced.

To add an engine: engines/NAME.py with what worker.py asks of it, environments/NAME.txt if it needs
packages of its own, its name in `ENGINES` here and in `NAMES` of report.py. Try it on
--models tiny-bloom --lengths 64 first: its error there must be that of its type.
"""

import argparse
import contextlib
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import environments  # noqa: E402
import models  # noqa: E402
from load import Load  # noqa: E402

ROOT = HERE.parents[2]
MOST_LOAD = 0.05
STAYS = 2048  # tokens up to which processes stay loaded
WARM = 512  # tokens that a process reads first where it does not
LOADING_S = 600  # for loading a model, or writing it in an engine's own form
ENGINES = (
    *("linbias", "eager", "sdpa", "plain_sdpa", "flex", "ctranslate2", "onnx", "openvino"),
    *("llama_cpp", "sentence_transformers", "fastembed", "vllm"),
)
DTYPES = ("float32", "bfloat16")
Row = dict[str, Any]


@dataclass
class Settings:
    """How the board is run; the options of the command line say what each is."""

    output: Path
    board: Path
    engines: Sequence[str] = ENGINES
    engine_files: Path = HERE / "engines"
    package_lists: Path = HERE / "environments"
    threads: int = 2
    tokens: int = 16
    rounds: int | None = None
    timeout: float = 240.0
    memory_gb: float = 20.0
    tries: int = 3
    minutes: float = float("inf")
    again: bool = False
    pause: float = 0.5  # before each turn, until threads of the one before sleep


class Failed(Exception):
    """How an engine failed, in words."""


@dataclass
class Worker:
    """The process of an engine with a model."""

    engine: str
    settings: Settings
    command: Sequence[str | Path]
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self.log.open("wb") as log:
            own = environment(self.settings.threads)
            self.process = subprocess.Popen(self.command, stderr=log, env=own, **pipes)

    def ask(self, request: Row, seconds: float) -> Row:
        """Send a line, and wait for the answer; `Failed` where it is an error or does not come."""
        with contextlib.suppress(BrokenPipeError):  # what happened is said below
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.end()
            raise Failed(f"more than {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self.how_it_ended())
        answer: Row = json.loads(line)
        if "failed" in answer:
            self.end()
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
        found = re.search(r"alloc\D.*?(\d{9,})", text)
        limit = f"{self.settings.memory_gb:g}"
        if found:
            return f"asked for {int(found[1]) / 1e9:.0f} GB more, of {limit} in all"
        if re.search(r"MemoryError|bad_alloc|out of memory|annot allocate memory", text):
            return f"asked for more than {limit} GB"
        return text.replace(str(ROOT) + "/", "")[:200]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def environment(threads: int) -> dict[str, str]:
    """Every engine's libraries are told the same number of threads, and nothing else."""
    theirs = ("OMP_", "GOMP_", "KMP_", "MKL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    more = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return kept | quiet | more


class Referee:
    """Measures what the output does not have yet."""

    def __init__(self, settings: Settings, make: Callable[[str, str, int], Path | None]) -> None:
        """make: (model, type, length) -> the reference; makes what is missing."""
        self.settings, self.make = settings, make
        self.rows: list[Row] = []
        if settings.output.exists():
            self.rows = [json.loads(line) for line in settings.output.read_text().splitlines()]
        self.prepared: dict[tuple[str, str, str], str | None] = {}

    def run(
        self, names: Iterable[str], dtypes: Sequence[str], lengths: Sequence[int] | None
    ) -> None:
        start = time.monotonic()
        self.absent = self.install()
        for name in names:
            for dtype in dtypes:
                for length in sorted(lengths or models.SHAPES[name].lengths):
                    if time.monotonic() - start > self.settings.minutes * 60:
                        say("the time is over; the same command goes on from here")
                        return
                    self.case(name, dtype, length)

    def install(self) -> set[str]:
        """The engines whose environment cannot be made; a row says why."""
        self.pythons: dict[str, Path] = {}
        for engine in self.settings.engines:
            packages = self.settings.package_lists / f"{engine}.txt"
            folder = self.settings.board / "environments" / engine
            if packages.exists() and not folder.exists():
                say(f"installing {engine}")
            try:
                self.pythons[engine] = environments.interpreter(packages, folder)
            except environments.NotInstalled as error:
                row = {"engine": engine, "absent": f"pip: {error}"}
                if row not in self.rows:
                    self.write(row)
        return set(self.settings.engines) - set(self.pythons)

    def case(self, name: str, dtype: str, length: int) -> None:
        """All engines that have no row yet (with `again` those that have one too), on one text."""
        case = {"model": name, "dtype": dtype, "length": length}
        before = [row for row in self.rows if case.items() <= row.items()]
        done = set() if self.settings.again else {row["engine"] for row in before}
        engines = [e for e in self.settings.engines if e not in done and e not in self.absent]
        if not engines:
            return
        reference = self.make(name, dtype, length)
        failed: dict[str, str] = {}
        for engine in engines:
            why = self.not_asked(engine, name, dtype, length) or self.prepare(engine, name, dtype)
            if why is not None:
                failed[engine] = why
        turns = Turns(self, name, dtype, length, [e for e in engines if e not in failed], failed)
        turns.run(reference)
        if self.settings.again:
            self.forget([row for row in before if row["engine"] in engines])
        for engine in engines:
            row = {"engine": engine, **case}
            row |= {"failed": failed[engine]} if engine in failed else turns.found[engine]
            self.write(row)

    def not_asked(self, engine: str, name: str, dtype: str, length: int) -> str | None:
        """Why an engine is not asked, from what it did at the shorter lengths."""
        case = {"model": name, "dtype": dtype}.items()
        same = [row for row in self.rows if case <= row.items() and row["length"] < length]
        own = [row for row in same if row["engine"] == engine]
        if not own:
            return None
        last = max(own, key=lambda row: row["length"])
        if "failed" in last:
            if last["failed"].startswith(("refused", "not asked")):
                return str(last["failed"])
            return f"not asked: failed at {last['length']:,}"
        took = statistics.median(last["read_s"])
        beside = [r for r in same if r["length"] == last["length"] and "read_s" in r]
        best = min(statistics.median(row["read_s"]) for row in beside)
        if took > 10 * best:
            return f"not asked: {took / best:.0f} times the best at {last['length']:,}"
        if took * length / last["length"] > self.settings.timeout:
            return f"not asked: {took:.0f} s at {last['length']:,}"
        return None

    def prepare(self, engine: str, name: str, dtype: str) -> str | None:
        """Let an engine write its own form of the model; why it cannot run it, if so."""
        key = (engine, name, dtype)
        if key not in self.prepared:
            say(f"{name} {dtype}: {engine} makes its own form, if it has one")
            worker = self.worker(engine, name, dtype, "prepare")
            try:
                worker.ask({}, LOADING_S)
                self.prepared[key] = None
            except Failed as error:
                why = str(error)
                self.prepared[key] = why if why.startswith("refused") else f"not converted: {why}"
            finally:
                worker.end()
        return self.prepared[key]

    def worker(self, engine: str, name: str, dtype: str, todo: str) -> Worker:
        given, file = self.settings, self.settings.engine_files / f"{engine}.py"
        command = [self.pythons[engine], HERE / "worker.py", file, todo, name, dtype]
        command += [given.threads, given.memory_gb, given.board]
        log = given.board / "logs" / f"{engine}-{name}-{dtype}-{todo}.txt"
        return Worker(engine, given, list(map(str, command)), log)

    def forget(self, old: Sequence[Row]) -> None:
        self.rows = [row for row in self.rows if row not in old]
        self.settings.output.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def write(self, row: Row) -> None:
        self.rows.append(row)
        self.settings.output.parent.mkdir(parents=True, exist_ok=True)
        with self.settings.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Turns:
    """The engines of one case take turns; those that fail leave, and `failed` says how."""

    def __init__(
        self, referee: Referee, name: str, dtype: str, length: int, engines: list[str],
        failed: dict[str, str],
    ) -> None:  # fmt: skip
        self.referee, self.settings, self.failed = referee, referee.settings, failed
        self.name, self.dtype, self.length = name, dtype, length
        self.engines, self.workers = engines, dict[str, Worker]()
        self.found: dict[str, Row] = {engine: {"read_s": []} for engine in engines}
        self.stay = length <= STAYS

    def run(self, reference: Path | None) -> None:
        rounds = self.settings.rounds or (3 if self.length <= 512 else 2 if self.stay else 1)
        try:
            if self.stay:
                for engine in self.engines:
                    self.attempt(engine, self.load)
            for number in range(rounds):
                last = number == rounds - 1
                turn = partial(self.turn, reference=reference if last else None)
                for engine in self.engines:
                    self.attempt(engine, turn)
        finally:
            for worker in self.workers.values():
                worker.end()

    def attempt(self, engine: str, do: Callable[[str], None]) -> None:
        if engine in self.failed:
            return
        try:
            do(engine)
        except Failed as error:
            self.failed[engine] = str(error)
            say(f"{self.where(engine)}: {error}")
            if engine in self.workers:
                self.workers.pop(engine).end()

    def where(self, engine: str) -> str:
        return f"{self.name} {self.dtype} {self.length:,} {engine}"

    def load(self, engine: str) -> None:
        """Start the process of an engine, and let it do once what does not count."""
        worker = self.referee.worker(engine, self.name, self.dtype, "serve")
        self.workers[engine] = worker
        answer = worker.ask({"load": True}, LOADING_S)
        self.found[engine]["load_s"] = answer["load_s"]
        note = {"engine": engine, "versions": answer["versions"]}
        if note not in self.referee.rows:
            self.referee.write(note)
        self.work(worker, self.length if self.stay else min(self.length, WARM), None)

    def work(self, worker: Worker, length: int, reference: Path | None) -> Row:
        request = {"length": length, "tokens": self.settings.tokens}
        request["reference"] = str(reference) if reference else None
        return worker.ask(request, self.settings.timeout)

    def turn(self, engine: str, reference: Path | None) -> None:
        """One measurement, repeated if others disturb it."""
        for left in reversed(range(self.settings.tries)):
            if not self.stay:
                self.load(engine)
            worker = self.workers[engine]
            time.sleep(self.settings.pause)
            with Load([worker.process.pid]) as load:
                answer = self.work(worker, self.length, reference)
            if not self.stay:
                self.workers.pop(engine).end()
            if load.share <= MOST_LOAD or left == 0:
                self.keep(engine, answer, load.share)
                return

    def keep(self, engine: str, answer: Row, share: float) -> None:
        row = self.found[engine]
        row["read_s"].append(round(answer["read_s"], 4))
        if "token_ms" in answer:
            row.setdefault("token_ms", []).append(round(answer["token_ms"], 2))
        if "error" in answer:
            row["error"] = float(f"{answer['error']:.2e}")
        row["peak_mb"] = max(row.get("peak_mb", 0), answer["peak_mb"])
        row["others"] = round(max(row.get("others", 0.0), share), 2)
        say(f"{self.where(engine)}: {row}")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def make_with_linbias(board: Path) -> Callable[[str, str, int], Path]:
    """What makes models and references: `models.py`, in a process of its own."""

    def make(name: str, dtype: str, length: int) -> Path:
        reference = models.reference_path(board, name, dtype, length)
        if not reference.exists() or not models.model_folder(board, name, dtype).exists():
            say(f"{name} {dtype} {length:,}: the answer in float64")
            command = [sys.executable, HERE / "models.py", board, name, "--dtypes", dtype]
            command += ["--lengths", str(length)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return reference

    return make


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    known = [name for name in models.SHAPES if not name.startswith("tiny")]
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--models", nargs="+", default=known, choices=models.SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--lengths", nargs="+", type=int, help="default: 512 and more tokens")
    parser.add_argument("--rounds", type=int, help="default: 3 up to 512, 2 to 2,048, then 1")
    never = float("inf")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a turn")
    parser.add_argument("--memory", type=float, default=20.0, help="GB for a process")
    parser.add_argument("--minutes", type=float, default=never, help="begin nothing after these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tries", type=int, default=3, help="before a disturbed turn is kept")
    parser.add_argument("--again", action="store_true", help="replace what the output has")
    where = ROOT / "build" / "board"
    parser.add_argument("--board", type=Path, default=where, help="for environments and models")
    parser.add_argument("--output", type=Path, help="default: MACHINE.jsonl of the records")
    return parser.parse_args()


def main() -> None:
    options = parse()
    from record import RECORDS, here, slug

    host = here()
    board = options.board.resolve()
    output = options.output or RECORDS / "board" / f"{slug(host['machine'])}.jsonl"
    same = ("engines", "threads", "rounds", "timeout", "tries", "minutes", "again")
    given = {name: getattr(options, name) for name in same}
    settings = Settings(output=output, board=board, memory_gb=options.memory, **given)
    referee = Referee(settings, make_with_linbias(board))
    made = {"made": host["date"], "machine": host["machine"]}
    made |= {"threads": options.threads, "commit": host["commit"]}
    if made not in referee.rows:
        referee.write(made)
    referee.run(options.models, options.dtypes, options.lengths)


if __name__ == "__main__":
    main()
