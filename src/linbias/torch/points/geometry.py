"""Points, their distances, an order that keeps neighbours together, and boxes around parts of it.

Coordinates are float64, so that differences of large ones (pixels of a slide) keep their digits;
float32 where a device has no float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 20  # of each coordinate on the curve: a cell is a millionth of the points' extent


class PointInputs(NamedTuple):
    """What an implementation of `attention_points` is given, checked: arrays, then numbers."""

    q: Tensor  # [B, H, N, D]
    k: Tensor  # [B, G, N, D]
    v: Tensor  # [B, G, N, E]
    slopes: Tensor  # [B, H], wide: float64 for float64 inputs and float32 otherwise
    points: Tensor  # [B or 1, N - global_tokens, A]: of the tokens that stand somewhere
    manhattan: bool
    global_tokens: int
    scale: float
    tolerance: float


def distances(rows: Tensor, columns: Tensor, manhattan: bool) -> Tensor:
    """[..., rows, columns]: from each point of [..., rows, A] to each of [..., columns, A]."""
    apart = rows[..., :, None, :] - columns[..., None, :, :]
    return _length(tuple(apart.unbind(-1)), manhattan)


def box_distances(
    low: Tensor, high: Tensor, lows: Tensor, highs: Tensor, manhattan: bool
) -> Tensor:
    """[boxes]: the least distance between points of one box [A] and of each of [boxes, A]."""
    apart = torch.maximum(lows - high, low - highs).clamp(min=0)
    return _length(tuple(apart.unbind(-1)), manhattan)


def along_a_curve(points: Tensor) -> Tensor:
    """[N], int64: points [N, A] as a Hilbert curve passes them; on a line from left to right.

    Neighbours in it lie together in space (Skilling, "Programming the Hilbert curve", 2004).
    """
    axes = points.shape[1]
    if axes == 1 or not len(points):
        return torch.argsort(points[:, 0], stable=True)
    low = points.amin(0)
    extent = (points.amax(0) - low).amax()
    cells = (points - low) / extent.masked_fill(extent == 0, 1.0) * (2**_BITS - 1)
    x = list(cells.long().unbind(1))
    for bit in reversed(range(1, _BITS)):
        lower = (1 << bit) - 1
        for axis in range(axes):
            set_here = (x[axis] >> bit) & 1 == 1
            exchanged = torch.where(set_here, 0, (x[0] ^ x[axis]) & lower)
            x[0] = x[0] ^ torch.where(set_here, lower, exchanged)
            if axis:
                x[axis] = x[axis] ^ exchanged
    for axis in range(1, axes):
        x[axis] = x[axis] ^ x[axis - 1]
    turned = torch.zeros_like(x[0])
    for bit in range(1, _BITS):
        turned = turned ^ torch.where((x[-1] >> bit) & 1 == 1, (1 << bit) - 1, 0)
    place = torch.zeros_like(turned)
    for bit in reversed(range(_BITS)):
        for cell in x:
            place = (place << 1) | (((cell ^ turned) >> bit) & 1)
    return torch.argsort(place, stable=True)


def _length(apart: tuple[Tensor, ...], manhattan: bool) -> Tensor:
    """The length of vectors whose entries come one axis each."""
    if manhattan or len(apart) == 1:
        return torch.stack([x.abs() for x in apart]).sum(0) if len(apart) > 1 else apart[0].abs()
    total = apart[0].square()
    for x in apart[1:]:
        total = total.addcmul(x, x)
    return total.sqrt()
