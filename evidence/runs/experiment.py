"""What the scripts share that train and test many small models."""

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import torch

from linbias import _machine
from linbias._run.files import JsonLog
from markers import Record


def measure(
    kind: str, calls: Iterable[tuple[Record, tuple[Any, ...]]], log: JsonLog, jobs: int
) -> Iterator[tuple[Record, Any]]:
    """Yields each key that the log lacks with what its (function, arguments...) gave, as they
    come.

    Each runs in a process with one thread, which small models make better use of than of many
    threads.
    """
    start, spawn = time.monotonic(), get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _start, max_tasks_per_child=1) as pool:
        missing = ((key, call) for key, call in calls if log.find(kind=kind, **key) is None)
        keys = {pool.submit(*call): key for key, call in missing}
        try:
            for number, future in enumerate(as_completed(keys), 1):
                yield keys[future], future.result()
                words = " ".join(map(str, keys[future].values()))
                minutes = (time.monotonic() - start) / 60
                print(f"{kind} {number}/{len(keys)}: {words}, {minutes:.1f} min", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _start() -> None:
    """One thread, and an end where the main process ends, however that does."""
    torch.set_num_threads(1)
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def made_here() -> Record:
    """Where and when something is measured."""
    machine = f"{_machine.processor()}, {_machine.num_cores()} cores"
    versions = {name: version for name, version in _machine.versions().items() if version}
    return {"machine": machine, "versions": versions, "date": _machine.now()}


def add_plan_options(parser: argparse.ArgumentParser, plan: type, *names: str) -> None:
    """An option for each of these fields of a plan, with its default."""
    for name in names:
        default = getattr(plan, name)
        many = isinstance(default, tuple)
        kind, nargs = type(default[0] if many else default), "+" if many else None
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, nargs=nargs, default=default, help=f"{default}")


def plan_of(options: argparse.Namespace, plan: Any) -> Any:
    """The plan with what the options say."""
    asked = {f.name: getattr(options, f.name) for f in fields(plan) if hasattr(options, f.name)}
    return replace(plan, **{k: tuple(v) if isinstance(v, list) else v for k, v in asked.items()})
