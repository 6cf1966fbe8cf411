"""Ways to interrupt a training run, and to run one in two processes."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, modeling_utils


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_processes(
    target: Callable[..., None], deaths: Iterable[tuple[Any, ...]], *arguments: Any
) -> None:
    """Runs `target(*death, *arguments)` in a process of its own, of which it has to die."""
    context = multiprocessing.get_context("forkserver")  # imports once, dies often
    context.set_forkserver_preload(["linbias.lm.extrapolation", "linbias.paper.pipeline"])
    for death in deaths:
        process = context.Process(target=target, args=(*death, *arguments))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, death


def fill_the_disk(patch: pytest.MonkeyPatch, is_full: Callable[[str], bool]) -> None:
    """Lets checkpoints fail at the files that `is_full` chooses, with half of them written."""
    torch_save, tensors_save = torch.save, modeling_utils.safe_save_file

    def check(path: object) -> None:
        if is_full(str(path)):
            Path(str(path)).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    def save(content: object, path: object) -> None:
        check(path)
        torch_save(content, path)

    def save_tensors(content: object, path: object, **options: object) -> None:
        check(path)
        tensors_save(content, path, **options)

    patch.setattr(torch, "save", save)
    patch.setattr(modeling_utils, "safe_save_file", save_tensors)


class SignalAt(TrainerCallback):
    """Sends its process a signal at the beginning of one step, once or more often."""

    def __init__(self, step: int, number: signal.Signals, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(self.number)


class Stop(Exception):
    pass


class StopAt(TrainerCallback):
    """Raises `Stop` before one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.step:
            raise Stop


def torchrun(*arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs a script in several processes that talk over the loopback device."""
    options = f"--nproc-per-node={processes} --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*command, "--local-addr=127.0.0.1", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
