"""A call of attention, and as kernels take it: in records, whose absent arrays are None."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias.kernels.triton.sequences import NO_SEQUENCES, Offsets, Sequences
from linbias.kernels.triton.sizes import FUSION, Sizes, Tile, padded
from linbias.kernels.triton.tile import LOG2E


class Call(NamedTuple):
    """One call of attention: arrays on one device, with any strides, then numbers.

    With `sequences` B is 1 for q, which holds all of them, and for k and v unless these are pages,
    [num_pages, G, page_keys, size]; for all that is said of batch rows it is their number.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, E]
    left: Tensor  # [H] or [B, H], float32
    right: Tensor | None  # likewise; None: causal
    key_range: Tensor | None  # [B, G, 2], integers of any size; None: all keys
    query_start: Tensor | None  # [B], likewise; None: S - T
    query_range: Tensor | None  # [B, T, 2], integers of 0 .. S; None: all keys
    key_bound: Tensor | None  # [B, G], float32, contiguous: at least |k| of every key in the range
    seed: Tensor | None  # [] or [3], int64, as of linbias/torch/dropout.py; None: no dropout
    positions: Tensor | None  # [B, H, S], float64: where keys stand; None: key s at s
    query_positions: Tensor | None  # [B, H, T], likewise
    sequences: Sequences | None  # without positions
    scale: float
    dropout: float
    tolerance: float
    sizes: Sizes

    @property
    def lengths(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        (B, H, T, D), (G, S), E = self.q.shape, self.k.shape[1:3], self.v.shape[3]
        return B, H, G, T, S if self.sequences is None else self.sequences.num_keys, D, E

    @property
    def num_sequences(self) -> int:
        """How many batch rows or sequences there are."""
        given = self.sequences
        return len(self.q) if given is None else len(given.query_offsets) - 1

    def places(self, total: int, size: int) -> int:
        """How many tiles of `size` of `total` rows or keys a batch row has, or places for them."""
        if self.sequences is None:
            return -(-total // size)
        return total // size + self.num_sequences


class Array(NamedTuple):
    """An array for a kernel, in which `at` is a pointer."""

    at: Tensor
    strides: tuple[int, ...]


class Dropout(NamedTuple):
    """The seed [3], the threshold of the hash, and what remaining weights are multiplied by."""

    seed: Tensor
    threshold: int
    factor: float


class Arguments(NamedTuple):
    """What every kernel takes: the arrays of a `Call`, slopes as [B, H], and scale in bits."""

    q: Array
    k: Array
    v: Array
    left: Array
    right: Array | None
    key_range: Array | None
    query_start: Array | None
    query_range: Array | None
    x: Array | None
    xq: Array | None
    dropout: Dropout | None
    sequences: Offsets
    B: int
    H: int
    G: int
    T: int
    S: int
    scale: float


class Shape(NamedTuple):
    """What a kernel is compiled for: head sizes, also as tensor cores take them, and a tile's."""

    D: int
    E: int
    padded_D: int
    padded_E: int
    rows: int
    keys: int
    stages: int


def arguments(call: Call) -> Arguments:
    B, H, G, T, S, *_ = call.lengths
    arrays = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "left": call.left.expand(call.num_sequences, H),
        "right": None if call.right is None else call.right.expand(call.num_sequences, H),
        "key_range": call.key_range,
        "query_start": call.query_start,
        "query_range": call.query_range,
        "x": call.positions,
        "xq": call.query_positions,
    }
    given = {name: array(x) for name, x in arrays.items()}
    numbers = {"B": B, "H": H, "G": G, "T": T, "S": S, "scale": call.scale * LOG2E.value}
    return Arguments(**given, dropout=dropout(call), sequences=offsets(call.sequences), **numbers)


def array(x: Tensor | None) -> Any:
    return None if x is None else Array(x, x.stride())


def offsets(given: Sequences | None) -> Offsets:
    if given is None:
        return NO_SEQUENCES
    count, table = len(given.query_offsets) - 1, array(given.table)
    ends = given.query_offsets, given.key_offsets
    return Offsets(count, *ends, table, given.page_norms, given.page_keys)


def dropout(call: Call) -> Dropout | None:
    if call.seed is None:
        return None
    seed = call.seed if call.seed.dim() else torch.nn.functional.pad(call.seed[None], (0, 2))
    threshold = min(round(call.dropout * 2**32), 2**32 - 1)
    return Dropout(seed, threshold, 1 / (1 - call.dropout))


def options(call: Call, tile: Tile) -> dict[str, Any]:
    """The keywords of a launch: its `Shape`, and how it runs."""
    *_, D, E = call.lengths
    shape = Shape(D, E, padded(D), padded(E), tile.rows, tile.keys, tile.num_stages)
    return {"SHAPE": shape, "num_warps": tile.num_warps, **FUSION}
