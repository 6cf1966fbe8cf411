"""What the launching functions share: a call of attention, and what it means for a kernel's
arguments.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias.kernels.triton.sizes import Sizes, padded
from linbias.kernels.triton.tile import LOG2E


class Call(NamedTuple):
    """One call of attention: arrays on one device, with any strides, then numbers."""

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
    scale: float
    dropout: float
    tolerance: float
    sizes: Sizes

    @property
    def lengths(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, G, T, S, D, E."""
        (B, H, T, D), (G, S), E = self.q.shape, self.k.shape[1:3], self.v.shape[3]
        return B, H, G, T, S, D, E


def arguments(call: Call) -> dict[str, Any]:
    """What every kernel takes that scores keys, by name. An array's strides are one tuple."""
    _, H, G, T, S, D, E = call.lengths
    return {
        "Q": call.q, "K": call.k, "V": call.v,
        "q_strides": call.q.stride(), "k_strides": call.k.stride(), "v_strides": call.v.stride(),
        **slope_arguments(call), **position_arguments(call), **row_range_arguments(call),
        "X": call.positions, "x_strides": strides(call.positions), "XQ": call.query_positions,
        "xq_strides": strides(call.query_positions), "H": H, "G": G, "T": T, "S": S,
        "scale": call.scale * LOG2E.value, "D": D, "E": E, "PADDED_D": padded(D),
        "PADDED_E": padded(E),
    }  # fmt: skip


def slope_arguments(call: Call) -> dict[str, Any]:
    return {
        "LEFT_SLOPES": call.left, "left_strides": slope_strides(call.left),
        "RIGHT_SLOPES": call.right, "right_strides": slope_strides(call.right),
    }  # fmt: skip


def position_arguments(call: Call) -> dict[str, Any]:
    return {
        "KEY_RANGE": call.key_range, "range_strides": strides(call.key_range),
        "QUERY_START": call.query_start, "start_strides": strides(call.query_start),
    }  # fmt: skip


def row_range_arguments(call: Call) -> dict[str, Any]:
    return {"QUERY_RANGE": call.query_range, "query_range_strides": strides(call.query_range)}


def dropout_arguments(call: Call) -> dict[str, Any]:
    """The seed, the threshold of the hash, and what remaining weights are multiplied by."""
    threshold = min(round(call.dropout * 2**32), 2**32 - 1)
    seed = call.seed
    if seed is not None and seed.dim() == 0:
        seed = torch.nn.functional.pad(seed[None], (0, 2))
    return {"SEED": seed, "threshold": threshold, "factor": 1 / (1 - call.dropout)}


def strides(array: Tensor | None) -> tuple[int, ...] | None:
    return None if array is None else array.stride()


def slope_strides(slopes: Tensor | None) -> tuple[int, ...] | None:
    """Of [B, H], as which [H] counts too."""
    if slopes is None or slopes.dim() == 2:
        return strides(slopes)
    return (0, *slopes.stride())
