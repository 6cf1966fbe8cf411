"""Trainings side by side: a process with one thread for each, which small models make better use of than of many threads."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

import torch


def in_processes(
    stage: str, work: dict[tuple[Any, ...], tuple[Any, ...]], jobs: int
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields each key of `work` with what its (function, arguments...) gave, as they come."""
    start, spawn = time.monotonic(), get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _start, max_tasks_per_child=1) as pool:
        futures: dict[Future[Any], tuple[Any, ...]] = {
            pool.submit(*call): key for key, call in work.items()
        }
        try:
            for number, future in enumerate(as_completed(futures), 1):
                yield futures[future], future.result()
                minutes = (time.monotonic() - start) / 60
                key = " ".join(
                    str(part[-1]) if isinstance(part, tuple) else str(part)
                    for part in futures[future]
                )
                print(f"{stage} {number}/{len(futures)}: {key}, {minutes:.1f} min", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _start() -> None:
    """One thread, and an end where the main process ends, however that does."""
    torch.set_num_threads(1)
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
