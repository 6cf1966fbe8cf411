"""Tile sizes by head size, and the shared memory that they take.

Chosen by what the compiler makes of them (tests/support/triton_compile.py), not by tuning at run
time: results do not depend on what else runs. Products in float32 go without tensor cores.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

LARGEST_HEAD = 256
FEWEST_ROWS = 16  # of a forward tile
# Said outright, because Triton's default is about to change.
FUSION = {"enable_fp_fusion": True}


def padded(size: int) -> int:
    """The next power of two that a tensor core takes."""
    return max(16, 1 << (size - 1).bit_length())


class Tile(NamedTuple):
    """Sizes of one kernel's tile, and how it runs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Sizes(NamedTuple):
    """The tiles of one call; those of dq and dkv are cut from forward's: rows and (dq) keys divide
    forward's.
    """

    forward: Tile
    dq: Tile
    dkv: Tile
    decode: Tile


# By the largest head size that they serve.
_NARROW = {
    64: Sizes(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
    128: Sizes(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
    256: Sizes(Tile(128, 32, 8, 2), Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 64, 4, 2)),
}
# For devices with less shared memory (sm_86, sm_89: 99 KiB) at head sizes above 64.
_SMALL = {
    64: _NARROW[64],
    128: Sizes(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(16, 64, 4, 2)),
    256: Sizes(Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
}
_WIDE = {
    64: Sizes(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
    256: Sizes(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
_forced: Sizes | None = None


def choose(D: int, E: int, itemsize: int, shared_memory: int) -> Sizes | None:
    """The sizes for so many bytes of shared memory per block; None if nothing fits."""
    if _forced is not None:
        return _forced
    tables = (_NARROW, _SMALL) if itemsize == 2 else (_WIDE,)
    for table in tables:
        sizes = next(sizes for limit, sizes in table.items() if max(D, E) <= limit)
        if shared_bytes(sizes, D, E, itemsize) <= shared_memory:
            return sizes
    return None


def shared_bytes(sizes: Sizes, D: int, E: int, itemsize: int) -> int:
    """What the largest kernel keeps in shared memory: operands and scores."""
    both = (padded(D) + padded(E)) * itemsize

    def taken(fixed: int, moving: int, tile: Tile) -> int:
        return (fixed + moving * tile.num_stages) * both + tile.rows * tile.keys * itemsize

    return max(
        taken(sizes.forward.rows // 2, sizes.forward.keys, sizes.forward),
        taken(sizes.dq.rows, sizes.dq.keys, sizes.dq),
        taken(sizes.dkv.keys, sizes.dkv.rows, sizes.dkv),
    )


@contextmanager
def forced(sizes: Sizes) -> Iterator[None]:
    """Use these sizes whatever the call, for tests and measurements."""
    global _forced  # noqa: PLW0603
    before, _forced = _forced, sizes
    try:
        yield
    finally:
        _forced = before
