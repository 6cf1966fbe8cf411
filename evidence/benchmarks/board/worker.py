"""One engine's process, in that engine's environment: it answers requests, a line of JSON each.

    {"load": true}                                   -> {"load_s", "versions": {package: version}}
    {"length": 512, "tokens": 16, "reference": path} -> {"read_s", "token_ms", "error", "peak_mb"}

An engine is a file of its name, or a name that engines/pytorch.py knows, with a class
`Engine(job)`. It may have `PACKAGES`, whose versions count; `refuse(job)`, why it cannot run a
model, or None; and `prepare(job)`, which writes the engine's own form of the model to
`job.converted`, once, in a process of its own.

    Engine.generate(ids, count, tell)  calls `tell` after each of `count` greedy tokens, returns
                                       the logits at the last of `ids`, or None if it has none;
                                       then Engine.logits(ids) is asked
    Engine.embed(ids)                  returns the mean of the vectors of all tokens

read_s is the time until the first token, or the vector; token_ms the median of the times between
the others; peak_mb the most that the process has ever had in memory (VmHWM), loading included;
error the largest absolute difference from the reference, in a pass of its own where `logits` must
be asked, which counts nowhere else.
"""

import importlib.util
import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import models


@dataclass(frozen=True)
class Job:
    """What an engine is to run, and where it finds and keeps things."""

    engine: str
    name: str
    dtype: str
    threads: int
    board: Path

    @property
    def shape(self) -> models.Shape:
        return models.SHAPES[self.name]

    @property
    def folder(self) -> Path:
        return models.model_folder(self.board, self.name, self.dtype)

    @property
    def converted(self) -> Path:
        return self.board / "converted" / self.engine / f"{self.name}-{self.dtype}"


def greedy(
    step: Callable[[list[int]], Any], ids: Sequence[int], count: int, tell: Callable[[], None]
) -> Any:
    """Generate in a loop for `Engine.generate`; step: new ids -> the logits [V] at the last."""
    logits = first = step(list(ids))
    for number in range(count):
        token = int(logits.argmax())
        tell()
        if number < count - 1:
            logits = step([token])
    return first


def main() -> None:
    files, engine, todo, name, dtype, threads, memory_gb, board = sys.argv[1:]
    limit(int(threads), int(float(memory_gb) * 1e9))
    job = Job(engine, name, dtype, int(threads), Path(board).resolve())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        for answer in (prepare if todo == "prepare" else serve)(Path(files), job):
            print(json.dumps(answer), file=answers, flush=True)
    except BaseException as error:
        traceback.print_exc()
        print(json.dumps({"failed": said(error)}), file=answers, flush=True)
    os._exit(0)  # since threads of a library may not end


def limit(threads: int, memory_bytes: int) -> None:
    """Stay on the first cores, be refused more memory, and be the first to be ended for it."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/oom_score_adj").write_text("1000")


def engine_of(files: Path, job: Job) -> Any:
    path = files / f"{job.engine}.py"
    path = path if path.exists() else files / "pytorch.py"
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine"] = module
    spec.loader.exec_module(module)
    return module


def prepare(files: Path, job: Job) -> Iterator[dict[str, Any]]:
    module, done = engine_of(files, job), job.converted / "done"
    refuse = getattr(module, "refuse", None)
    if refuse and (why := refuse(job)):
        yield {"failed": f"refused: {why}"}
        return
    if hasattr(module, "prepare") and not done.exists():
        job.converted.mkdir(parents=True, exist_ok=True)
        module.prepare(job)
        done.touch()
    yield {}


def serve(files: Path, job: Job) -> Iterator[dict[str, Any]]:
    sys.stdin.readline()
    start = time.perf_counter()
    module = engine_of(files, job)
    engine = module.Engine(job)
    load_s, packages = round(time.perf_counter() - start, 1), getattr(module, "PACKAGES", ())
    yield {"load_s": load_s, "versions": {name: version_of(name) for name in packages}}
    for line in sys.stdin:
        yield run(engine, job.shape.task, **json.loads(line))


def run(engine: Any, task: str, length: int, tokens: int, reference: str | None) -> dict[str, Any]:
    ids, times = models.text(length), [time.perf_counter()]
    if task == "embed":
        found = engine.embed(ids)
        times.append(time.perf_counter())
    else:
        found = engine.generate(ids, tokens + 1, lambda: times.append(time.perf_counter()))
        assert len(times) == tokens + 2, f"{len(times) - 1} tokens, and not {tokens + 1}"
    answer: dict[str, Any] = {"read_s": times[1] - times[0], "peak_mb": peak_mb()}
    if steps := [after - before for before, after in pairwise(times[1:])]:
        answer["token_ms"] = statistics.median(steps) * 1e3
    if reference:
        answer["error"] = error(engine.logits(ids) if found is None else found, reference)
    return answer


def error(found: Any, reference: str) -> float:
    import numpy as np

    expected, found = np.load(reference), np.asarray(found, dtype=np.float64)
    assert found.shape == expected.shape, f"{found.shape} numbers, and not {expected.shape}"
    return float(np.abs(found - expected).max())


def peak_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def said(error: BaseException) -> str:
    """The last line that says something, with the kind of error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = next((line for line in lines if "alloc" in line), lines[-1] if lines else "")
    return f"{type(error).__name__}: {chosen}"[:300]


if __name__ == "__main__":
    main()
