"""What a `WindowCache` knows of the keys that its heads dropped: a ledger of constant size, and, where asked for, the keys.

`Ledger` is `linbias.streams.Dropped`, where the idea is explained, for all rows and heads of a layer at once.
`DroppedKeys` keeps the keys themselves, in host memory or in a file, so that rows for which the ledger cannot vouch
read them again.
"""

import math
import os
import shutil
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from linbias.streams import GRID, SLACK

_PIECE = 4096  # keys of a file, at least


class Ledger:
    """A bound on what the dropped keys of a layer weigh in a row.

    Args:
        slopes: [H].
        scale: Factor on q . k.
        center: [B, G, D].
    """

    def __init__(self, slopes: Tensor, scale: float, center: Tensor) -> None:
        B, G, _ = center.shape
        self.sharing = len(slopes) // G
        self.slopes, self.scale = slopes.double(), scale
        self.center = center.double()
        self.grid = torch.from_numpy(GRID).to(center.device)
        self.sums = self.center.new_full((B, len(slopes), len(GRID)), -math.inf)
        self.largest = self.center.new_zeros(B, G)
        self.at = [0] * G  # the position after the last key that was dropped
        self.count = [0] * G

    def radius(self, keys: Tensor, heads: Tensor) -> Tensor:
        """[B, n]: at least |k - center| of keys [B, n, D] of heads [n]; inf for a key that is not finite."""
        radius = (keys.double() - self.center[:, heads]).norm(dim=-1) * (1 + SLACK)
        return radius.nan_to_num_(math.inf, math.inf)

    def growth(self, radius: Tensor, behind: Tensor, heads: Tensor, columns: slice) -> Tensor:
        """[B, sharing, J, n]: the logarithms of what keys add to the sums of some columns of the grid.

        Args:
            radius: [B, n], as of `radius`; -inf for keys that weigh nothing.
            behind: [n], how far they lie behind the position that the sums are of.
            heads: [n], the key/value head of each.
            columns: Of the grid.
        """
        slopes = self.slopes.view(-1, self.sharing)[heads].T  # [sharing, n]
        grid = self.grid[columns, None]
        grown = grid * radius[:, None, None] - (slopes * behind)[:, None]
        if radius.isinf().any():  # 0 times inf: what is not finite weighs infinitely much for every query, and padding nothing
            grown = torch.where(radius.isinf()[:, None, None], radius[:, None, None], grown)
        return grown

    def add(
        self, keys: Tensor, counts: Sequence[int], oldest: Sequence[int], first: Tensor | None
    ) -> None:
        """Take over keys.

        Args:
            keys: [B, sum(counts), D]: counts[g] keys of each head g, one head after the other.
            counts: [G].
            oldest: [G], the position of the first of them; the others follow.
            first: [B] or None: keys before it are padding.
        """
        device, G = keys.device, len(counts)
        heads = torch.arange(G, device=device).repeat_interleave(
            torch.tensor(counts, device=device)
        )
        positions = torch.cat([torch.arange(o, o + n, device=device) for o, n in zip(oldest, counts, strict=True)])  # fmt: skip
        at = [o + n if n else old for o, n, old in zip(oldest, counts, self.at, strict=True)]
        ends = torch.tensor(at, device=device)
        radius = self.radius(keys, heads)
        if first is not None:
            radius = radius.masked_fill(positions < first[:, None], -math.inf)
        grown = self.growth(radius, ends[heads] - positions, heads, slice(None))
        parts = [part.logsumexp(-1) for part in grown.split(list(counts), -1)]
        since = (ends - torch.tensor(self.at, device=device)).repeat_interleave(self.sharing)
        decayed = self.sums - (self.slopes * since)[:, None]
        self.sums = torch.logaddexp(decayed, torch.cat(parts, 1))
        largest = [part.amax(-1) if part.shape[-1] else part.new_zeros(len(part)) for part in radius.split(list(counts), -1)]  # fmt: skip
        self.largest = torch.maximum(self.largest, torch.stack(largest, -1))
        self.at, self.count = at, [old + n for old, n in zip(self.count, counts, strict=True)]

    def lengths(self, q: Tensor) -> Tensor:
        """[..., T]: at least |scale q|, of q [..., T, D] in float64."""
        return abs(self.scale) * q.norm(dim=-1) * (1 + SLACK)

    def bound(self, q: Tensor, lse: Tensor, positions: Tensor) -> Tensor:
        """[B, H, T]: log(weight of the dropped keys / weight of those that were read) at most; -inf where none was dropped."""
        q, device = q.double(), q.device
        center = self.center.repeat_interleave(self.sharing, 1)
        at, dropped = (
            torch.tensor(x, device=device).repeat_interleave(self.sharing)[:, None]
            for x in (self.at, self.count)
        )
        most = chord(self.grid, self.sums[..., None], self.lengths(q), self.largest.repeat_interleave(self.sharing, 1))[..., 0]  # fmt: skip
        found = self.scale * (q @ center[..., None])[..., 0] + most - self.slopes[:, None] * (positions - at) - lse.double()  # fmt: skip
        return torch.where(dropped > 0, found, -math.inf)

    def select(self, rows: Tensor) -> None:
        """Keep some batch rows, in a new order, and perhaps repeated."""
        self.sums, self.largest, self.center = (
            x[rows] for x in (self.sums, self.largest, self.center)
        )

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.sums, self.largest, self.center))


def chord(grid: Tensor, sums: Tensor, lengths: Tensor, largest: Tensor) -> Tensor:
    """At least the convex function that `sums` are values of: between two columns of the grid the chord.

    Args:
        grid: [J].
        sums: [B, H, J, C], for each of C sets of keys.
        lengths: [B, H, T].
        largest: [B, H], the steepest that the function becomes beyond the grid; inf for keys that are not finite.

    Returns:
        [B, H, T, C].
    """
    right = torch.searchsorted(grid, lengths).clamp_(1, len(grid) - 1)
    low = grid[right - 1]
    share = ((lengths - low) / (grid[right] - low)).clamp_(max=1.0)[..., None]
    C = sums.shape[-1]
    below, above = (
        sums.gather(2, at[..., None].expand(-1, -1, -1, C)) for at in (right - 1, right)
    )
    most = torch.where(below.isneginf(), below, below + share * (above - below))
    largest = largest[..., None, None]
    beyond = (lengths - grid[-1]).clamp_(min=0)[..., None]
    most = most + torch.where(beyond > 0, beyond * largest, 0.0)
    return torch.where(largest.isinf(), math.inf, most)


class Owned:
    """A file or folder that is deleted once nobody holds it: copies hold the same one, since no file in it is ever changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, _delete, path, os.getpid())

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"WindowCache: folder must be None for a cache that is pickled, got dropped keys in {self.path}"
        )


def _delete(path: Path, process: int) -> None:
    if os.getpid() != process:  # a fork, whose parent still reads it
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class DroppedKeys:
    """The keys and values that one head dropped, oldest first, as far back as any query can need them.

    Args:
        reach: Keys that are needed at most; older ones are forgotten. inf keeps all.
        folder: Where they are written, in files of thousands of keys; None keeps them in host memory.
        name: With which the names of the files begin.
    """

    def __init__(self, reach: float, folder: Path | None, name: str) -> None:
        self.reach, self.folder, self.name = reach, folder, name
        self.num_keys = 0
        self.lost_infinite = False  # whether a key that was forgotten was not finite
        self._pieces: list[_Piece] = []

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take over keys [B, n, D] and values [B, n, E]. Where they cannot be written, they stay in memory, with a warning."""
        keys, values = keys.detach().cpu(), values.detach().cpu()
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.file is None and last.num_keys < _PIECE:
            old = last.read()
            keys, values = torch.cat([old[0], keys], 1), torch.cat([old[1], values], 1)
            pieces = self._pieces[:-1]
        else:
            pieces = list(self._pieces)
        piece = _Piece.of(keys, values)
        if self.folder is not None and piece.num_keys >= _PIECE:
            try:
                # A name that no copy and no fork takes as well.
                piece = piece.written(self.folder / f"{self.name}-{uuid4().hex}.safetensors")
            except (OSError, SafetensorError) as error:
                warnings.warn(
                    f"WindowCache: folder must have room for dropped keys, got {self.folder} ({error}): those of head {self.name} "
                    "stay in host memory from here on",
                    stacklevel=2,
                )
                self.folder = None
        self._pieces = [*pieces, piece]
        self.num_keys = sum(piece.num_keys for piece in self._pieces)
        while self.num_keys - self._pieces[0].num_keys >= self.reach:
            gone = self._pieces.pop(0)
            self.num_keys -= gone.num_keys
            self.lost_infinite |= not gone.is_finite

    def clear(self) -> None:
        """Forget all."""
        self._pieces, self.num_keys, self.lost_infinite = [], 0, False

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys [B, n, D] and values [B, n, E]; some must be there."""
        parts = [piece.read() for piece in self._pieces]
        keys, values = (torch.cat(part, 1).to(device) for part in zip(*parts, strict=True))
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Keep some batch rows, in a new order, and perhaps repeated."""
        self._pieces = [piece.select(rows.cpu()) for piece in self._pieces]


@dataclass(frozen=True)
class _Piece:
    """Some of the keys: here, or in a file that is never changed."""

    keys: Tensor | None
    values: Tensor | None
    num_keys: int
    is_finite: bool
    file: Owned | None = None
    rows: Tensor | None = None  # of the file

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "_Piece":
        return cls(
            keys, values, keys.shape[1], bool(keys.isfinite().all() and values.isfinite().all())
        )

    def written(self, path: Path) -> "_Piece":
        """The same in a file, under its name once it is whole."""
        assert self.keys is not None and self.values is not None
        part = path.with_suffix(".part")
        try:
            save_file({"keys": self.keys.contiguous(), "values": self.values.contiguous()}, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return _Piece(None, None, self.num_keys, self.is_finite, Owned(path))

    def read(self) -> tuple[Tensor, Tensor]:
        if self.file is None:
            assert self.keys is not None and self.values is not None
            return self.keys, self.values
        found = load_file(self.file.path)
        pair = found["keys"], found["values"]
        return pair if self.rows is None else (pair[0][self.rows], pair[1][self.rows])

    def select(self, rows: Tensor) -> "_Piece":
        if self.file is not None:
            return replace(self, rows=rows if self.rows is None else self.rows[rows])
        assert self.keys is not None and self.values is not None
        return replace(self, keys=self.keys[rows], values=self.values[rows])
