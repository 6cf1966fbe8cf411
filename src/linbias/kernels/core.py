"""The compiled CPU core (csrc, bindings/python.cpp): only this module knows how it is called.

A front end describes its arrays by address, as a `Call` whose fields csrc/include/linbias has, and
keeps them alive; 0 stands for None, and strides count elements. Where the core is not compiled,
`WHY_MISSING` says so, and these names do not exist.
"""

from linbias import _machine
from linbias._dispatch import Abilities
from linbias._request import Problem

_machine.most()  # which csrc/dispatch.cpp reads, too; a kind that does not exist is refused here

WHY_MISSING: str | None = None
try:
    from linbias import _cpu
    from linbias._cpu import Array as Array
    from linbias._cpu import Backward as Backward
    from linbias._cpu import Call as Call
    from linbias._cpu import Forward as Forward
    from linbias._cpu import NewTokens as NewTokens
    from linbias._cpu import Points as Points
    from linbias._cpu import Sequences as Sequences
    from linbias._cpu import backward as backward
    from linbias._cpu import forward as forward
    from linbias._cpu import forward_layer as forward_layer
    from linbias._cpu import write as write

    DTYPES = {dtype.name: dtype for dtype in _cpu.DType}
    TILE_ROWS, BLOCK_KEYS = _cpu.TILE_ROWS, _cpu.BLOCK_KEYS
except ImportError as error:  # not compiled here, or for another Python
    WHY_MISSING = (
        f"the compiled core cannot be imported ({error}); reinstall with a C++20 compiler"
    )
    TILE_ROWS, BLOCK_KEYS = 48, 64

NAME = "cpu"
ABILITIES = Abilities(
    runs_on="the CPU",
    how="near to far in compiled code",
    memory="linear in length",
    devices=("cpu",),
    largest_head=256,
    has=("positions", "any_order", "dropout", "transformed"),
)
# Below so many multiply-adds per thread, a second one that sleeps gains less than waking it costs.
# One that is awake, because it is PyTorch's and spins after each operation, gains a quarter at
# 2^21 in all (2 cores).
_WORK_PER_THREAD, _WORK_PER_AWAKE_THREAD = 1 << 26, 1 << 20
# Few queries wait for memory: each multiply-add takes a number that no other does, and 16 times as
# long or more.
FEW_QUERIES, _FEWER = 4, 16


def why_not(problem: Problem) -> str | None:
    """Say why the core cannot run a call, or None if it can."""
    return WHY_MISSING or ABILITIES.lacks(problem)


def num_threads(
    sizes: tuple[int, int, int, int, int, int, int], available: int, awake: bool = False
) -> int:
    """Threads that a call of these sizes (B H G T S D E) is worth, of those available."""
    B, H, _, T, S, D, E = sizes
    enough = _WORK_PER_AWAKE_THREAD if awake else _WORK_PER_THREAD
    if T <= FEW_QUERIES:
        enough //= _FEWER
    return max(1, min(available, 1 + B * H * T * S * (D + E) // max(1, enough)))


def num_tiles(T: int) -> int:
    """Tiles that T queries are cut into: the third axis of `visited`."""
    return -(-T // TILE_ROWS)


def target() -> str | None:
    """The CPU target that the core runs on here, such as "avx2"; None where it is not compiled."""
    return None if WHY_MISSING else _cpu.target()


def targets() -> list[str]:
    """The CPU targets that were compiled and run on this machine, best first."""
    return [] if WHY_MISSING else _cpu.targets().split(",")


def force_target(name: str | None) -> None:
    """Run on one of `targets()` instead of the best, for tests; None goes back."""
    if WHY_MISSING or not _cpu.force_target(name or ""):
        raise ValueError(f"force_target: name must be one of {targets()}, got {name!r}")
