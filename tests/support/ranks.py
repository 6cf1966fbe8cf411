"""Processes of torch.distributed on this machine, kept for many calls.

A function is named as module:function of a module in this folder.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Ranks:
    """`size` processes that have met over gloo.

    Example:
        with Ranks(2) as ranks:
            first, second = ranks.run("some_module:function", [(of_rank_0,), (of_rank_1,)])
    """

    def __init__(self, size: int, seconds: float = 60.0) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(size), store, str(seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **own, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(size)
        ]

    def start(self, function: str, arguments: list[tuple[Any, ...]]) -> None:
        for rank, (process, given) in enumerate(zip(self._processes, arguments, strict=True)):
            assert process.poll() is None, f"rank {rank} ended with {process.poll()}"
            pickle.dump((function, given), process.stdin)
            process.stdin.flush()

    def wait(self) -> list[Any]:
        """What each returned, or the exception that it raised; None for a process that is gone."""
        found = []
        for process in self._processes:
            try:
                found.append(pickle.load(process.stdout))
            except EOFError:
                found.append(None)
        return found

    def run(self, function: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """What each process returned; an exception is raised here."""
        self.start(function, arguments)
        found = self.wait()
        for rank, result in enumerate(found):
            if result is None or isinstance(result, Exception):
                raise AssertionError(f"rank {rank}: {result!r}") from result
        return found

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            process.wait()
            process.stdout.close()
        self._folder.cleanup()


def _main(rank: int, size: int, store: str, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE))
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not get between answers
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        module, name = function.split(":")
        try:
            answer = getattr(import_module(module), name)(*arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
    os._exit(0)  # not destroy_process_group, which waits for processes that may be gone


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
