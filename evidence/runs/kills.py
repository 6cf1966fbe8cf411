"""Interrupt runs at random moments, continue them, and compare what they end with: `python evidence/runs/kills.py`.

    python evidence/runs/kills.py                       # all of it, in 20 minutes at most
    python evidence/runs/kills.py --only extrapolate    # extrapolate, train, paper, full, locks or torchrun
    python evidence/runs/kills.py --kills 40 --seed 3   # more and other moments

A tiny run of `linbias extrapolate`, `linbias train` and `linbias paper run` is done once undisturbed. Then the same
command is stopped by SIGKILL, SIGTERM or SIGINT at random moments of its work and started again until it ends; weights,
records and scores must be those of the undisturbed run, bit for bit, and nothing half-done may be left. "full" lets
no file grow beyond a random size (RLIMIT_FSIZE: the write fails as on a full disk), then continues without. "locks"
starts a second run in the folder of a running one; "torchrun" does the same with two processes each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PYTHON = sys.executable
KINDS = ("extrapolate", "train", "paper")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TINY = "hidden_size=32 num_hidden_layers=2 num_attention_heads=2".split()
WORDS = "the cat sat on mat dog ran to and from".split()
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# What differs between runs that do the same: times and memory.
MEASURED = ("date", "seconds", "tokens_per_second", "peak_memory_bytes", "made")


class Commands:
    """The command of each kind of run, with its texts in a folder."""

    def __init__(self, home: Path) -> None:
        draw = random.Random(1)
        self.texts = {}
        for name, words in {"text": 20_000, "train": 6000, "valid": 600, "test": 600}.items():
            lines = (" ".join(draw.choices(WORDS, k=12)) + "\n" for _ in range(words // 12))
            self.texts[name] = home / f"{name}.txt"
            self.texts[name].write_text("".join(lines))

    def extrapolate(self, output: Path, steps: int = 40) -> list[str]:
        numbers = "--methods alibi,learned --train-lengths 32 --batch-size 4 --save-steps 5"
        more = f"{numbers} --steps {steps} --limit-tokens 2000 -q --threads 1".split()
        return self._linbias("extrapolate", *self._corpus(), *more, "-o", output)

    def train(self, output: Path, steps: int = 60) -> list[str]:
        numbers = (
            f"--length 32 --batch-size 4 --steps {steps} --save-steps 6 -q --threads 1".split()
        )
        return self._linbias("train", *self._corpus(), *numbers, "-o", output)

    def paper(self, output: Path, steps: int = 30) -> list[str]:
        texts = (self.texts[name] for name in ("train", "valid", "test"))
        fields = _fields([*TINY, "intermediate_size=48", "cutoffs=[]"])
        more = f"--preset tiny --steps {steps} --workers 2 --batch-tokens 2048 -q".split()
        return self._linbias("paper", "run", *texts, *fields, *more, "-o", output)

    def _corpus(self) -> list[object]:
        dropout = ["hidden_dropout=0.1", "attention_dropout=0.1"]
        return ["--corpus", self.texts["text"], *_fields([*TINY, *dropout])]

    @staticmethod
    def _linbias(*arguments: object) -> list[str]:
        return [PYTHON, "-m", "linbias", *map(str, arguments)]


def _fields(pairs: list[str]) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=600,
        **options,
    )


def content(folder: Path) -> dict[str, Any]:
    """All that a run leaves and that must not depend on how often it was interrupted."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in (".json", ".jsonl"):
            lines = (
                path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            )
            found[name] = [_without_measured(json.loads(line)) for line in lines]
        elif path.is_dir() or path.suffix in (
            ".safetensors",
            ".npz",
            ".bin",
            ".idx",
            ".txt",
            ".model",
        ):
            found[name] = path.is_dir() or hashlib.sha256(path.read_bytes()).hexdigest()
        else:  # the report and its figure hold times
            found[name] = "there"
    return found


def _without_measured(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_measured(v) for k, v in value.items() if k not in MEASURED}
    return [_without_measured(v) for v in value] if isinstance(value, list) else value


def differences(folder: Path, whole: dict[str, Any]) -> list[str]:
    found = content(folder)
    return sorted(
        name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)
    )


class Trials:
    """Counts what went well, and prints what did not."""

    def __init__(self, home: Path, options: argparse.Namespace) -> None:
        self.home, self.options = home, options
        self.commands, self.draw = Commands(home), random.Random(options.seed)
        self.stop = time.monotonic() + options.minutes * 60
        self.counts: dict[str, int] = {}
        self.faults: list[str] = []

    def undisturbed(self, kind: str) -> tuple[Callable[[Path], list[str]], dict[str, Any], float]:
        """The command of a kind, what it leaves, and the seconds that it takes."""
        command: Callable[[Path], list[str]] = getattr(self.commands, kind)
        began = time.monotonic()
        done = run(command(self.home / f"{kind}-whole"))
        assert done.returncode == 0, done.stderr
        return command, content(self.home / f"{kind}-whole"), time.monotonic() - began

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT {text}", flush=True)

    def time_left(self) -> bool:
        return time.monotonic() < self.stop

    def judge(self, kind: str, output: Path, whole: dict[str, Any], story: str) -> None:
        if different := differences(output, whole):
            self.fault(f"{kind}, {story}: other than undisturbed: {', '.join(different)}")
        self.count(f"{kind}: ended as undisturbed" if not different else f"{kind}: DIFFERENT")
        shutil.rmtree(output)

    def kills(self, kind: str) -> None:
        """Stop runs at random moments."""
        command, whole, seconds = self.undisturbed(kind)
        done = number = 0
        while done < self.options.kills and self.time_left():
            output, story, number = self.home / f"{kind}-{number}", [], number + 1
            while True:
                how = self.draw.choice(SIGNALS)
                # Most of the time goes into imports: the work is the last part.
                wait = seconds * self.draw.uniform(0.4, 1.05) if done < self.options.kills else 600
                process = subprocess.Popen(
                    command(output),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=ENVIRONMENT,
                )
                try:
                    _, errors = process.communicate(timeout=wait)
                    break
                except subprocess.TimeoutExpired:
                    process.send_signal(how)
                    _, errors = process.communicate(timeout=120)
                    done += 1
                    story.append(f"{how.name} after {wait:.1f} s")
                    self.count(f"{kind}: {how.name}")
                    if "Traceback" in errors:
                        self.fault(f"{kind}, {how.name}: traceback: {errors[-600:]}")
            if process.returncode:
                self.fault(
                    f"{kind}, {'; '.join(story)}: exit {process.returncode}: {errors[-600:]}"
                )
                continue
            if story:
                self.judge(kind, output, whole, "; ".join(story))

    def full(self, kind: str) -> None:
        """Let no file grow beyond a limit, then go on without it."""
        command, whole, _ = self.undisturbed(kind)
        sizes = sorted(
            p.stat().st_size for p in (self.home / f"{kind}-whole").rglob("*") if p.is_file()
        )
        limits = [0, 20, 100, *(size // 2 for size in sizes if size), sizes[-1] - 1]
        for limit in self.draw.sample(limits, min(len(limits), self.options.limits)):
            if not self.time_left():
                return
            output = self.home / f"{kind}-full"
            failed = run(
                command(output),
                preexec_fn=lambda limit=limit: resource.setrlimit(
                    resource.RLIMIT_FSIZE, (limit, limit)
                ),
            )
            self.count(f"{kind}: full at {'little' if limit < 1000 else 'much'}")
            if failed.returncode == 0 or "Traceback" in failed.stderr:
                self.fault(
                    f"{kind}, {limit} bytes: exit {failed.returncode}: {failed.stderr[-800:]}"
                )
            done = run(command(output))
            if done.returncode:
                self.fault(
                    f"{kind}, after {limit} bytes: exit {done.returncode}: {done.stderr[-600:]}"
                )
                shutil.rmtree(output)
                continue
            self.judge(kind, output, whole, f"{limit} bytes ({failed.stderr.strip()[-200:]})")

    def locks(self, prefix: tuple[str, ...] = (), kinds: tuple[str, ...] = KINDS) -> None:
        """A second run in the folder of a running one is told who holds it."""
        for kind in kinds:
            output = self.home / f"{kind}-held"
            command = [
                *prefix,
                *getattr(self.commands, kind)(output, steps=100_000)[len(prefix) > 0 :],
            ]
            first = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
            )
            while not (output / ".lock").exists() and first.poll() is None:
                time.sleep(0.1)
            second = run(command)
            running = first.poll() is None
            first.send_signal(signal.SIGINT)
            _, errors = first.communicate(timeout=120)
            told = second.returncode and "held by process" in second.stderr
            if not (running and told):
                self.fault(
                    f"{kind}, running {running}: {errors[-500:]} second: {second.stderr[-800:]}"
                )
            self.count(f"{kind}: second run refused{' under torchrun' if prefix else ''}")
            shutil.rmtree(output)

    def torchrun(self) -> None:
        """Two processes each; and what must run as one says so."""
        options = "--nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1"
        prefix = (PYTHON, "-m", "torch.distributed.run", *options.split())
        self.locks(prefix, ("train",))
        for kind in ("extrapolate", "paper"):
            refused = run([*prefix, *getattr(self.commands, kind)(self.home / "two")[1:]])
            if not refused.returncode or "must run as one process" not in refused.stderr:
                self.fault(
                    f"{kind} under torchrun: exit {refused.returncode}: {refused.stderr[-800:]}"
                )
            self.count(f"{kind}: refused under torchrun")


def trials(everything: Trials) -> Iterator[tuple[str, Callable[[], None]]]:
    for kind in ("extrapolate", "paper", "train"):
        yield kind, lambda kind=kind: everything.kills(kind)
    for kind in ("extrapolate", "paper"):
        yield f"full {kind}", lambda kind=kind: everything.full(kind)
    yield "locks", everything.locks
    yield "torchrun", everything.torchrun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=10, help="of each kind of run")
    parser.add_argument(
        "--limits", type=int, default=6, help="sizes at which the disk is full, for each kind"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="linbias-kills-") as folder:
        all_trials = Trials(Path(folder), options)
        for name, trial in trials(all_trials):
            if options.only in name and all_trials.time_left():
                trial()
                shutil.rmtree(all_trials.home / f"{name.split()[-1]}-whole", ignore_errors=True)
                print(f"{name}: {json.dumps(all_trials.counts)}", flush=True)
    sys.exit(1 if all_trials.faults else 0)


if __name__ == "__main__":
    main()
