"""Compile what a call would launch for a GPU that is not here: python -m triton_compile 90 64 128
(capability, head sizes).

The launching functions run as they are, arguments specialised as on a device; only the driver is a
stand-in, and nothing is launched. Prints for each kernel registers, bytes of stack (what did not
fit them) and of shared memory, and how many instructions a warp spends on 32 scores in each
innermost loop, with the share of those that touch the stack.
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
from linbias.kernels.triton.launch import Call

FEATURES = {
    "plain": {"full": False},
    "ranges": {"full": False, "ranged": True},
    "all features": {"full": True, "ranged": True},
    "positions, too": {"full": True, "ranged": True, "placed": True},
    "float32": {"full": False, "dtype": torch.float32},
}
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}


class Compiled(NamedTuple):
    kernel: str
    shared: int  # bytes
    registers: int
    stack: int  # bytes
    loops: list[tuple[int, int]]  # instructions of an innermost loop, and those on the stack


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
        commands = ([tool, kind, file.name] for kind in ("-res-usage", "-sass"))
        usage, code = (subprocess.check_output(command, text=True) for command in commands)
    numbers = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Compiled(
        kernel=name,
        shared=kernel.metadata.shared,
        registers=numbers["REG"],
        stack=numbers["STACK"],
        loops=innermost_loops(code),
    )


def innermost_loops(code: str) -> list[tuple[int, int]]:
    """Instructions of each innermost loop with products, and how many touch the stack."""
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    instructions = [text for _, text in found]
    index_of = {int(address, 16): index for index, (address, _) in enumerate(found)}
    loops = []
    for index, text in enumerate(instructions):
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if target and (first := index_of[int(target[1], 16)]) <= index:
            loops.append((first, index))
    bodies = []
    for first, last in loops:
        inner = [(a, b) for a, b in loops if first <= a and b <= last]
        body = instructions[first : last + 1]
        if len(inner) == 1 and any("MMA" in text for text in body):
            bodies.append((len(body), sum("LDL" in text or "STL" in text for text in body)))
    return bodies


def launch_everything(
    D: int,
    shared: int,
    full: bool,
    dtype: torch.dtype = torch.bfloat16,
    H: int = 4,
    G: int = 2,
    placed: bool = False,
    ranged: bool = False,
) -> None:
    """Forward, backward and decode, with every feature or none; placed: at positions; ranged: with
    a range of keys for each query.
    """
    B, T, S = 1, 1024, 4096
    q, k, v, dout = (
        torch.zeros(B, n, m, D, dtype=dtype) for n, m in ((H, T), (G, S), (G, S), (H, T))
    )
    results = {name: torch.empty(B, H, T) for name in ("row_max", "log_sum")}
    results["out"] = torch.empty_like(q)
    visited = torch.zeros(B, H, 99, 2, dtype=torch.int32)
    call = Call(
        q=q,
        k=k,
        v=v,
        left=torch.ones(H),
        right=torch.ones(B, H) if full else None,
        key_range=torch.tensor([[0, S]] * B)[:, None].expand(B, G, 2) if full else None,
        query_start=torch.tensor([S - T] * B) if full else None,
        query_range=torch.tensor([0, S]).expand(B, T, 2) if ranged else None,
        key_bound=None,
        seed=torch.zeros((), dtype=torch.int64) if full else None,
        positions=torch.zeros(B, H, S, dtype=torch.float64) if placed else None,
        query_positions=torch.zeros(B, H, T, dtype=torch.float64) if placed else None,
        scale=0.1,
        dropout=0.1 if full else 0.0,
        tolerance=2.0**-24,
        sizes=sizes.choose(D, D, dtype.itemsize, shared),
    )
    forward(call, **results, visited=visited)
    gradients = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
    dslopes = (torch.empty(B, H) if full else None for _ in "lr")
    gradients |= dict(zip(("dleft", "dright"), dslopes, strict=True))
    if placed:
        gradients |= {"dpositions": torch.empty(B, H, S), "dquery_positions": torch.empty(B, H, T)}
    dlse = torch.empty(B, H, T)
    backward(call, dout, dlse, **results, visited=visited, **gradients)
    bound = torch.ones(B, G) if full else None
    few = {name: x[:, :, :1].contiguous() for name, x in results.items()}
    last = call.query_positions[:, :, :1] if placed else None
    ranges = call.query_range[:, :1] if ranged else None
    few_queries = call._replace(
        q=q[:, :, :1], key_bound=bound, query_positions=last, query_range=ranges
    )
    decode(few_queries, 132, **few)


def main() -> None:
    capability, *head_sizes = (int(argument) for argument in sys.argv[1:])
    shared = SHARED_KIB[capability] * 1024
    for D in head_sizes:
        for what, features in FEATURES.items():
            dtype = features.get("dtype", torch.bfloat16)
            chosen = sizes.choose(D, D, dtype.itemsize, shared)
            tiles = {f"{name}_kernel": tile for name, tile in chosen._asdict().items()}
            call = partial(launch_everything, D, shared, **features)
            for done in launched(call, capability):
                assert done.shared <= shared, done
                tile = tiles.get(done.kernel, sizes.Tile(32, 1, 1, 1))
                per_score = 32 * tile.num_warps / (tile.rows * tile.keys)
                loops = "  ".join(
                    f"{n * per_score:.1f} ({spilt / n:.0%})" for n, spilt in done.loops
                )
                case = f"sm_{capability} {D:3} {what:14} {done.kernel:14}"
                print(
                    f"{case} {done.registers:3} {done.stack:4} {done.shared:6}  {loops}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
