"""Run pytest again and again without loading torch, transformers and jax each time: `mutants.py`
asks for it.

A process that has them loaded, and nothing of ours, reads commands as lines of JSON: arguments of
pytest, a file for the output, a time limit in seconds. For each it forks, and answers with the
exit status in a line: negative for a signal, null beyond the time limit.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

LOADED = (
    *("numpy", "torch", "torch._dynamo", "pytest", "transformers"),
    *("transformers.trainer", "transformers.models.auto.modeling_auto", "jax", "jax.numpy"),
)


def run(arguments: list[str], output: str) -> None:
    """In the child: pytest, its output in a file, and the end of the process."""
    import pytest

    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(child: int, seconds: float) -> int | None:
    """The exit status, or None for a child that had to be killed with all that it started."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)


def main() -> None:
    if not Path("/dev/nvidiactl").exists():  # as conftest.py says, before triton loads
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()  # what stays untouched need not be copied
    for line in sys.stdin:
        arguments, output, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            run(arguments, output)
        print(json.dumps(wait(child, seconds)), flush=True)


if __name__ == "__main__":
    main()
