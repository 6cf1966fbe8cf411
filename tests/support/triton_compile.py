"""Compile what a call would launch for a GPU that is not here, by capability, head size, and of
`FEATURES` those that are not all: python -m triton_compile 90 64 plain gates.

The launching functions run as they are, arguments specialised as on a device; only the driver is a
stand-in, and nothing is launched. Prints for each kernel registers, bytes spilt (what did not fit
them) and of shared memory, and of each innermost loop its instructions, how many a warp spends on
32 scores, and its tensor-core products with the waits beside them; and says where the assembler
runs asynchronous products one at a time (its messages C7510 to C7519).
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
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from linbias.kernels.triton import sizes
from linbias.kernels.triton.backward import backward
from linbias.kernels.triton.decode import decode
from linbias.kernels.triton.forward import forward
from linbias.kernels.triton.launch import Call
from linbias.kernels.triton.sequences import Sequences

FEATURES = {
    "plain": {},
    "both sides": {"right": True},
    "ranges": {"ranged": True},
    "gates": {"placed": True},
    "packed": {"packed": True, "ranged": True},
    "pages": {"packed": True, "paged": True},
    "all features": {"full": True, "right": True, "ranged": True},
    "positions, too": {"full": True, "right": True, "ranged": True, "placed": True},
    "float32": {"dtype": torch.float32},
}
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}
MOST_SPILT = 512  # bytes
MAY_SPILL = ("float32", "positions, too")


class Loop(NamedTuple):
    """An innermost loop with products."""

    instructions: int
    products: int  # of a warp group
    waits: int  # for these


class Compiled(NamedTuple):
    kernel: str
    shared: int  # bytes
    registers: int
    spilt: int  # bytes
    serialised: list[str]  # the messages on products one at a time
    loops: list[Loop]


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
    arch = re.search(r"\.target sm_((\d+)\w*)", kernel.asm["ptx"])
    ptxas = get_ptxas(int(arch[2])).path
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.asm["ptx"])
        assemble = [ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name=sm_{arch[1]}", source]
        done = subprocess.run([*assemble, "-o", code], capture_output=True, text=True, check=True)
        said = done.stdout + done.stderr
        listing = subprocess.check_output(
            [Path(ptxas).parent / "cuobjdump", "-sass", code], text=True
        )
    return Compiled(
        kernel=name,
        shared=kernel.metadata.shared,
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spilt=sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        serialised=re.findall(r"C751\d", said),
        loops=innermost_loops(listing),
    )


def innermost_loops(code: str) -> list[Loop]:
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
            counts = (sum(word in text for text in body) for word in ("HGMMA", "WARPGROUP.DEPBAR"))
            bodies.append(Loop(len(body), *counts))
    return bodies


def launch_everything(
    D: int,
    shared: int,
    full: bool = False,
    right: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    H: int = 4,
    G: int = 2,
    placed: bool = False,
    ranged: bool = False,
    packed: bool = False,
    paged: bool = False,
) -> None:
    """Forward, backward and decode, with these features.

    Args:
        full: A key range, a start, dropout and gradients of slopes.
        right: Keys on both sides.
        placed: Positions of keys and queries.
        ranged: A range of keys for each query.
        packed: Two sequences by offsets; paged: with keys in pages, without backward.
    """
    B, T, S = 1, 1024, 4096
    q, k, v, dout = (
        torch.zeros(B, n, m, D, dtype=dtype) for n, m in ((H, T), (G, S), (G, S), (H, T))
    )
    results = {name: torch.empty(B, H, T) for name in ("row_max", "log_sum")}
    results["out"] = torch.empty_like(q)
    visited = torch.zeros(B, H, 99, 2, dtype=torch.int32)
    count = 2 if packed else B
    if paged:
        k, v = torch.zeros(2, S // 16, 16, G, D, dtype=dtype).transpose(2, 3)
    given = Sequences(
        query_offsets=torch.tensor([0, 1, T], dtype=torch.int32),
        key_offsets=torch.tensor([0, 1, S], dtype=torch.int32),
        longest=(T, S),
        num_keys=S,
        table=torch.zeros(2, S // 16, dtype=torch.int32) if paged else None,
        page_norms=torch.zeros(S // 16, G) if paged else None,
        page_keys=16,
    )
    call = Call(
        q=q,
        k=k,
        v=v,
        left=torch.ones(H),
        right=torch.ones(count, H) if right else None,
        key_range=torch.tensor([[0, S]] * B)[:, None].expand(B, G, 2) if full else None,
        query_start=torch.tensor([S - T] * B) if full else None,
        query_range=torch.tensor([0, S]).expand(B, T, 2) if ranged else None,
        key_bound=None,
        seed=torch.zeros((), dtype=torch.int64) if full else None,
        positions=torch.zeros(B, H, S, dtype=torch.float64) if placed else None,
        query_positions=torch.zeros(B, H, T, dtype=torch.float64) if placed else None,
        sequences=given if packed else None,
        scale=0.1,
        dropout=0.1 if full else 0.0,
        tolerance=2.0**-24,
        sizes=sizes.choose(D, D, dtype.itemsize, shared),
    )
    forward(call, **results, visited=visited)
    if not paged:
        gradients = {f"d{name}": torch.empty_like(x) for name, x in zip("qkv", call, strict=False)}
        slopes = [torch.empty(count, H) if full else None for _ in "lr"]
        gradients |= dict(zip(("dleft", "dright"), slopes, strict=True))
        if full and placed:
            gradients["dpositions"] = torch.empty(B, H, S)
            gradients["dquery_positions"] = torch.empty(B, H, T)
        dlse = torch.empty(B, H, T)
        backward(call, dout, dlse, **results, visited=visited, **gradients)
    few = {name: x[:, :, :1].contiguous() for name, x in results.items()}
    few_queries = call._replace(
        q=q[:, :, :1],
        key_bound=torch.ones(count, G) if full or paged else None,
        query_positions=call.query_positions[:, :, :1] if placed else None,
        query_range=call.query_range[:, :1] if ranged else None,
        sequences=given._replace(longest=(1, S)) if packed else None,
    )
    decode(few_queries, 132, **few)


def main() -> None:
    capability, D = int(sys.argv[1]), int(sys.argv[2])
    shared = SHARED_KIB[capability] * 1024
    wrong = []
    for what in sys.argv[3:] or FEATURES:
        features = FEATURES[what]
        dtype = features.get("dtype", torch.bfloat16)
        chosen = sizes.choose(D, D, dtype.itemsize, shared)
        tiles = {f"{name}_kernel": tile for name, tile in chosen._asdict().items()}
        call = partial(launch_everything, D, shared, **features)
        for done in launched(call, capability):
            tile = tiles.get(done.kernel, sizes.Tile(32, 1, 1, 1))
            per_score = 32 * tile.num_warps / (tile.rows * tile.keys)
            loops = "  ".join(
                f"{n} ({n * per_score:.1f}; {products}/{waits})"
                for n, products, waits in done.loops
            )
            case = f"sm_{capability} {D:3} {what:14} {done.kernel:16}"
            numbers = f"{done.registers:3} {done.spilt:5} {done.shared:6}"
            print(case, numbers, *done.serialised, loops, flush=True)
            if done.shared > shared:
                wrong.append(f"{case}: does not fit shared memory")
            if done.serialised or any(0 < n <= waits for _, n, waits in done.loops):
                wrong.append(f"{case}: products one at a time")
            if done.spilt > MOST_SPILT and what not in MAY_SPILL:
                wrong.append(f"{case}: {done.spilt} bytes spilt")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
