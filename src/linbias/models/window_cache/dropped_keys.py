"""The keys that heads dropped, in host memory or in files, for rows that must read them again."""

import os
import shutil
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_CHUNK = 4096  # keys of a file, at least


class Owned:
    """A file or folder that is deleted once nobody holds it; copies hold the same one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, _delete, path, os.getpid())

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "WindowCache: folder must be None for a cache that is pickled, got dropped keys in "
            f"{self.path}"
        )


def _delete(path: Path, process: int) -> None:
    if os.getpid() != process:  # a fork, whose parent still reads it
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class DroppedKeys:
    """The keys and values that one head dropped, oldest first, as far back as `reach`."""

    def __init__(self, reach: float, folder: Path | None, name: str) -> None:
        self.reach, self.folder, self.name = reach, folder, name
        self.num_keys = 0
        self.lost_infinite = False  # whether a key that was forgotten was not finite
        self._chunks: list[_Chunk] = []

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take over keys [B, n, D] and values [B, n, E]; what cannot be written stays here."""
        keys, values = keys.detach().cpu(), values.detach().cpu()
        chunks = list(self._chunks)
        if chunks and chunks[-1].file is None and chunks[-1].num_keys < _CHUNK:
            old = chunks.pop().read()
            keys, values = (torch.cat(pair, 1) for pair in zip(old, (keys, values), strict=True))
        chunk = _Chunk.of(keys, values)
        if self.folder is not None and chunk.num_keys >= _CHUNK:
            try:
                # A name that no copy and no fork takes as well.
                chunk = chunk.written(self.folder / f"{self.name}-{uuid4().hex}.safetensors")
            except (OSError, SafetensorError) as error:
                warnings.warn(
                    f"WindowCache: folder must have room for dropped keys, got {self.folder} "
                    f"({error}): those of head {self.name} stay in host memory from here on",
                    stacklevel=2,
                )
                self.folder = None
        self._chunks = [*chunks, chunk]
        self.num_keys = sum(chunk.num_keys for chunk in self._chunks)
        while self.num_keys - self._chunks[0].num_keys >= self.reach:
            gone = self._chunks.pop(0)
            self.num_keys -= gone.num_keys
            self.lost_infinite |= not gone.is_finite

    def clear(self) -> None:
        self._chunks, self.num_keys, self.lost_infinite = [], 0, False

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys [B, n, D] and values [B, n, E]; some must be there."""
        parts = [chunk.read() for chunk in self._chunks]
        keys, values = (torch.cat(part, 1).to(device) for part in zip(*parts, strict=True))
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Keep some batch rows, in a new order, and perhaps repeated."""
        self._chunks = [chunk.select(rows.cpu()) for chunk in self._chunks]


@dataclass(frozen=True)
class _Chunk:
    """Some of the keys: here, or in a file that is never changed."""

    keys: Tensor | None
    values: Tensor | None
    num_keys: int
    is_finite: bool
    file: Owned | None = None
    rows: Tensor | None = None  # of the file

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "_Chunk":
        is_finite = bool(keys.isfinite().all() and values.isfinite().all())
        return cls(keys=keys, values=values, num_keys=keys.shape[1], is_finite=is_finite)

    def written(self, path: Path) -> "_Chunk":
        """The same in a file, under its name once it is whole."""
        assert self.keys is not None and self.values is not None
        part = path.with_suffix(".part")
        try:
            save_file({"keys": self.keys.contiguous(), "values": self.values.contiguous()}, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return replace(self, keys=None, values=None, file=Owned(path))

    def read(self) -> tuple[Tensor, Tensor]:
        if self.file is None:
            assert self.keys is not None and self.values is not None
            return self.keys, self.values
        stored = load_file(self.file.path)
        rows = slice(None) if self.rows is None else self.rows
        return stored["keys"][rows], stored["values"][rows]

    def select(self, rows: Tensor) -> "_Chunk":
        if self.file is not None:
            return replace(self, rows=rows if self.rows is None else self.rows[rows])
        assert self.keys is not None and self.values is not None
        return replace(self, keys=self.keys[rows], values=self.values[rows])
