"""Ways to interrupt a training run, and to run one in two processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from transformers import TrainerCallback


class Kill(TrainerCallback):
    """Kills its process, as `kill -9` would, at one event of one step."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self.kill_at_step)

    def kill_at_step(self, args, state, *_, **__) -> None:
        if state.global_step == self.step:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Stop(Exception):
    pass


class StopAt(TrainerCallback):
    """Raises `Stop` before one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.step:
            raise Stop


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in two processes that talk over the loopback device."""
    options = "--nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
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
