"""Lines of ids on disk, in the format of fairseq's memory-mapped data sets, little-endian.

name.bin has the ids of all lines. name.idx has a header, how many ids each line has (int32), and
the byte in name.bin at which each begins (int64).
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from linbias._run.files import new_file
from linbias.paper.dictionary import Dictionary

_MAGIC, _OLDER_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQ")  # magic, version, code of the dtype, number of lines
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}


def ids_dtype(dictionary_size: int) -> np.dtype[Any]:
    """How ids of a dictionary are stored: uint16 below 65,500 words, else uint32."""
    return np.dtype("<u2" if dictionary_size < 65_500 else "<u4")


def write_ids(
    prefix: str | Path, lines: Iterable[Sequence[int]], dtype: DTypeLike = np.uint16
) -> NDArray[np.int32]:
    """Writes prefix.bin and prefix.idx, whole or not; returns how many ids each line has."""
    stored = np.dtype(dtype).newbyteorder("<")
    code = next((code for code, name in _DTYPES.items() if np.dtype(f"<{name}") == stored), None)
    if code is None:
        raise ValueError(
            f"write_ids: dtype must be one of {sorted(_DTYPES.values())}, got {dtype}"
        )
    counts = array("i")
    with new_file(Path(f"{prefix}.idx")) as index, new_file(Path(f"{prefix}.bin")) as data:
        for line in lines:
            data.write(np.asarray(line, stored).tobytes())
            counts.append(len(line))
        sizes = np.array(counts, "<i4")
        starts = (np.cumsum(sizes, dtype="<i8") - sizes) * stored.itemsize
        index.write(_HEADER.pack(_MAGIC, 1, code, len(sizes)))
        index.write(sizes.tobytes())
        index.write(starts.tobytes())
    return sizes


def read_ids(prefix: str | Path) -> NDArray[Any]:
    """The ids of all lines, [N], mapped from prefix.bin; a `ValueError` says which of prefix.bin
    and prefix.idx is missing or damaged.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise ValueError(f"read_ids: {path.name} must be in {path.parent}, got no such file")
    dtype, num_lines = _read_header(index)
    _check_bytes(index, _HEADER.size + 12 * num_lines, f"{num_lines} lines")
    sizes = np.fromfile(index, "<i4", num_lines, offset=_HEADER.size)
    starts = np.fromfile(index, "<i8", num_lines, offset=_HEADER.size + 4 * num_lines)
    ends = np.cumsum(sizes, dtype=np.int64)
    if (sizes < 0).any() or not np.array_equal(starts, (ends - sizes) * dtype.itemsize):
        raise ValueError(f"read_ids: {index} must list lines one after another, got other offsets")
    num_ids = int(ends[-1]) if num_lines else 0
    _check_bytes(data, num_ids * dtype.itemsize, f"the {num_ids} ids of {index.name}")
    return np.memmap(data, dtype, "r") if num_ids else np.empty(0, dtype)


def read_data(folder: str | Path, split: str) -> tuple[Dictionary, NDArray[Any]]:
    """The words and the ids [N] of a split in a folder that `prepare`, or the original, made."""
    if not Path(folder, "dict.txt").is_file():
        raise ValueError(f"read_data: folder must hold dict.txt, got {str(folder)!r}")
    if not Path(folder, f"{split}.idx").is_file():
        there = ", ".join(sorted(path.stem for path in Path(folder).glob("*.idx"))) or "none"
        raise ValueError(f"read_data: split must be one of {folder} ({there}), got {split!r}")
    dictionary, ids = Dictionary.read(Path(folder, "dict.txt")), read_ids(Path(folder, split))
    check_ids(ids, len(dictionary), str(Path(folder, f"{split}.bin")))
    return dictionary, ids


def check_ids(ids: NDArray[Any], dictionary_size: int, name: str) -> None:
    """Refuses ids [N] outside a dictionary, under a name such as that of their file."""
    if len(ids) and (ids.min() < 0 or ids.max() >= dictionary_size):
        index = int(np.argmax((ids < 0) | (ids >= dictionary_size)))
        raise ValueError(
            f"check_ids: {name} must hold ids in [0, {dictionary_size}), the dictionary; "
            f"got {ids[index]} at index {index}"
        )


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if header.startswith(_OLDER_MAGIC):
        raise NotImplementedError(
            f"read_ids: {path} must be memory-mapped data, got fairseq's older TNTIDX format"
        )
    if not header.startswith(_MAGIC):
        raise ValueError(f"read_ids: {path} must begin with MMIDIDX, got {header[:9]!r}")
    if len(header) < _HEADER.size:
        raise ValueError(f"read_ids: {path} is truncated: {len(header)} bytes")
    _, version, code, num_lines = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"read_ids: {path} must have version 1 and integer ids, "
            f"got version {version} and dtype code {code}"
        )
    return np.dtype(f"<{_DTYPES[code]}"), num_lines


def _check_bytes(path: Path, expected: int, content: str) -> None:
    size = path.stat().st_size
    if size != expected:
        fault = "is truncated" if size < expected else "is too long"
        raise ValueError(
            f"read_ids: {path} {fault}: {content} need {expected} bytes, got {size} bytes"
        )
