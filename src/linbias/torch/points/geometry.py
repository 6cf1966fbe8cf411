"""Points, their distances, an order that keeps neighbours together, and what an implementation is
given of a call.

Coordinates are float64, so that differences of large ones (pixels of a slide) keep their digits;
float32 where a device has no float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 20  # of each coordinate on the curve: a cell is a millionth of the points' extent


class PointInputs(NamedTuple):
    """What an implementation of `attention_points` is given, checked: arrays, then numbers."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, N, D]
    v: Tensor  # [B, G, N, E]
    slopes: Tensor  # [B, H], wide: float64 for float64 inputs and float32 otherwise
    points: Tensor  # [B or 1, N - global_tokens, A]: of the keys that stand somewhere
    query_points: Tensor | None  # [B or 1, T, A]; None: queries and keys are the same tokens
    num_points: Tensor | None  # [B], int64: how many tokens of a row are no padding
    seed: Tensor | None  # [], int64; None: no dropout
    manhattan: bool
    global_tokens: int
    scale: float
    dropout: float
    tolerance: float


NUM_ARRAYS = PointInputs._fields.index("manhattan")


def parts(inputs: PointInputs) -> list[tuple[slice, int]]:
    """Batch rows that see as many keys, and how many; those that see none are left out."""
    B, N = inputs.q.shape[0], inputs.k.shape[2]
    if not inputs.q.numel():
        return []
    counts = [N] * B if inputs.num_points is None else inputs.num_points.tolist()
    # Those that a compiler passes come unchecked.
    counts = [min(max(n, 0), N) for n in counts]
    alike = len(set(counts)) == 1
    runs = [slice(0, B)] if alike else [slice(b, b + 1) for b in range(B)]
    return [(rows, counts[rows.start]) for rows in runs if counts[rows.start]]


def distances(rows: Tensor, columns: Tensor, manhattan: bool) -> Tensor:
    """[..., rows, columns]: from each point of [..., rows, A] to each of [..., columns, A]."""
    return _length(rows[..., :, None, :] - columns[..., None, :, :], manhattan)


def further(rows: Tensor, columns: Tensor, nearest: Tensor, manhattan: bool) -> Tensor:
    """[..., rows, columns]: by how much `distances` exceed those to nearest [..., rows, A].

    Of |a| - |b| = (a - b) (a + b) / (|a| + |b|) only what a and b differ by is rounded.
    """
    far, near = rows[..., :, None, :] - columns[..., None, :, :], (rows - nearest)[..., :, None, :]
    between = nearest[..., :, None, :] - columns[..., None, :, :]
    lengths = [x.abs() if manhattan else _length(x, manhattan)[..., None] for x in (far, near)]
    total = lengths[0] + lengths[1]
    return (between * ((far + near) / total.masked_fill(total == 0, 1.0))).sum(-1)


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


def _length(vectors: Tensor, manhattan: bool) -> Tensor:
    """[..., A] -> [...]: their lengths."""
    apart = vectors.unbind(-1)
    if manhattan or len(apart) == 1:
        return torch.stack([x.abs() for x in apart]).sum(0) if len(apart) > 1 else apart[0].abs()
    total = apart[0].square()
    for x in apart[1:]:
        total = total.addcmul(x, x)
    return total.sqrt()
