"""Compile what a call would launch for a GPU that is not here: python -m triton_compile 90 64 (compute capability, head size).

The launching functions run as they are, arguments specialised as on a device; only the driver is a stand-in, and
nothing is launched. Prints for each kernel what ptxas made of it.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from linbias.triton import sizes
from linbias.triton.backward import backward
from linbias.triton.decode import decode
from linbias.triton.forward import forward

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}


class Compiled(NamedTuple):
    kernel: str
    shared: int  # bytes
    registers: int
    stack: int  # bytes: what did not fit the registers
    code: str


def launched(call, capability: int) -> list[Compiled]:
    """What `call` launches, compiled."""
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    found = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        done = run(self, *arguments, grid=grid, warmup=True, **options)
        found.append(describe(self.fn.__name__, done))

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            call()
    finally:
        triton.runtime.driver._active = before
    return found


def describe(name: str, kernel) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return Compiled(name, kernel.metadata.shared, int(numbers["REG"]), int(numbers["STACK"]), code)


def launch_everything(D: int, dtype: torch.dtype, shared: int, full: bool, H: int = 4, G: int = 2) -> None:
    """Forward, backward and decode; with every feature, or with none but the certificate."""
    B, T, S = 1, 1024, 4096
    q, k, v, dout = (torch.zeros(B, n, m, D, dtype=dtype) for n, m in ((H, T), (G, S), (G, S), (H, T)))
    left = torch.ones(H)
    right = torch.ones(B, H) if full else None
    key_range = torch.tensor([[0, S]] * B, dtype=torch.int32) if full else None
    chosen = sizes.choose(D, D, dtype.itemsize, shared)
    results = (torch.empty_like(q), *torch.empty(2, B, H, T), torch.zeros(B, H, 99, 2, dtype=torch.int32))
    seed = torch.zeros((), dtype=torch.int64)
    dropout, tolerance = (0.1 if full else 0.0), 2.0**-24
    forward(q, k, v, left, right, key_range, seed, 0.1, dropout, tolerance, chosen, results)
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    dslopes = tuple(torch.empty(2, B, H)) if full else None
    backward(
        q, k, v, left, right, key_range, seed, 0.1, dropout, chosen, dout, results[1], results, gradients, dslopes
    )  # fmt: skip
    few = q[:, :, :1], k, v, left, right, key_range, torch.ones(B, G) if full else None
    decode(*few, 0.1, tolerance, chosen, 132, tuple(x[:, :, :1].contiguous() for x in results[:3]))


def main() -> None:
    capability, D = (int(argument) for argument in sys.argv[1:3])
    dtype = getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "bfloat16")
    shared = SHARED_KIB[capability] * 1024
    for full in (False, True):
        for done in launched(lambda: launch_everything(D, dtype, shared, full), capability):
            assert done.shared <= shared, done
            print(f"{done.kernel:16} {'everything' if full else 'plain':10} registers {done.registers:3} stack {done.stack:4} shared {done.shared:6}")
            if "-s" in sys.argv: Path(f"/tmp/sass/{done.kernel}-{full}-{D}-{capability}.sass").write_text(done.code)


if __name__ == "__main__":
    main()
