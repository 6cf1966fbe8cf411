"""Compile what a call would launch for a GPU that is not here: python -m triton_compile 90 64 128 (capability, head sizes).

The launching functions run as they are, arguments specialised as on a device; only the driver is a stand-in, and nothing is
launched. Prints for each kernel registers, bytes of stack (what did not fit them) and of shared memory, and how many
instructions a warp spends on 32 scores in each innermost loop, with the share of those that touch the stack.
"""

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from linbias.kernels.triton import sizes
from linbias.kernels.triton.backward import backward
from linbias.kernels.triton.decode import decode
from linbias.kernels.triton.forward import forward

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}


class Compiled(NamedTuple):
    kernel: str
    shared: int  # bytes
    registers: int
    stack: int  # bytes
    loops: list[
        tuple[int, int]
    ]  # instructions of an innermost loop with products, and those on the stack


def launched(call, capability: int, only: str = "") -> list[Compiled]:
    """What `call` launches, compiled; or of these the kernels whose name begins with `only`."""
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
    )
    found = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        if self.fn.__name__.startswith(only):
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
            subprocess.run(
                [tool, kind, file.name], capture_output=True, text=True, check=True
            ).stdout
            for kind in ("-res-usage", "-sass")
        )
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return Compiled(
        name,
        kernel.metadata.shared,
        int(numbers["REG"]),
        int(numbers["STACK"]),
        innermost_loops(code),
    )


def innermost_loops(code: str) -> list[tuple[int, int]]:
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    instructions = [text for _, text in found]
    places = {int(address, 16): place for place, (address, _) in enumerate(found)}
    loops = []
    for place, text in enumerate(instructions):
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if target and (first := places[int(target[1], 16)]) <= place:
            loops.append((first, place))
    bodies = []
    for first, last in loops:
        inner = [(a, b) for a, b in loops if first <= a and b <= last]
        body = instructions[first : last + 1]
        if len(inner) == 1 and any("MMA" in text for text in body):
            bodies.append((len(body), sum("LDL" in text or "STL" in text for text in body)))
    return bodies


def launch_everything(
    D: int, dtype: torch.dtype, shared: int, full: bool, H: int = 4, G: int = 2
) -> None:
    """Forward, backward and decode; with every feature, or with none but the certificate."""
    B, T, S = 1, 1024, 4096
    q, k, v, dout = (
        torch.zeros(B, n, m, D, dtype=dtype) for n, m in ((H, T), (G, S), (G, S), (H, T))
    )
    left = torch.ones(H)
    right = torch.ones(B, H) if full else None
    key_range = torch.tensor([[0, S]] * B, dtype=torch.int32) if full else None
    chosen = sizes.choose(D, D, dtype.itemsize, shared)
    results = (
        torch.empty_like(q),
        *torch.empty(2, B, H, T),
        torch.zeros(B, H, 99, 2, dtype=torch.int32),
    )
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
    capability, *head_sizes = (int(argument) for argument in sys.argv[1:])
    shared = SHARED_KIB[capability] * 1024
    for D in head_sizes:
        chosen = sizes.choose(D, D, 2, shared)
        tiles = {f"{name}_kernel": tile for name, tile in chosen._asdict().items()}
        for full in (False, True):
            call = partial(launch_everything, D, torch.bfloat16, shared, full)
            for done in launched(call, capability):
                assert done.shared <= shared, done
                tile = tiles.get(done.kernel, sizes.Tile(32, 1, 1, 1))
                per_score = 32 * tile.num_warps / (tile.rows * tile.keys)
                loops = "  ".join(
                    f"{n * per_score:.1f} ({spilt / n:.0%})" for n, spilt in done.loops
                )
                case = f"sm_{capability} {D:3} {'all features' if full else 'plain':12} {done.kernel:14}"
                print(
                    f"{case} {done.registers:3} {done.stack:4} {done.shared:6}  {loops}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
