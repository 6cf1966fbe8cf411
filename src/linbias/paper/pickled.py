"""Reads a .pt file of the original without running anything in it."""

import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


class _Unread:
    """Replaces an object that does not matter for the model; its content is ignored."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _Dtype(_Unread):
    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name if isinstance(name, str) else ""


def _scalar(dtype: object = None, raw: object = None, *_: object) -> object:
    """A number of NumPy as a plain one."""
    if isinstance(dtype, _Dtype) and re.fullmatch("f[248]|[iu][1248]|b1", dtype.name):
        number = np.dtype(dtype.name)
        if isinstance(raw, bytes) and len(raw) == number.itemsize:
            return np.frombuffer(raw, number)[0].item()
    return _Unread()


def _dict(*_: object) -> dict[Any, Any]:
    return {}


# What the original saves besides tensors and plain values: its options, and metrics of NumPy. Numbers
# are read, and nothing is called.
_HARMLESS: list[Any] = [
    Namespace,
    (_dict, "collections.defaultdict"),
    *((_Unread, f"builtins.{name}") for name in ("dict", "float", "int", "list")),
    (_Dtype, "numpy.dtype"),
    (_Unread, "numpy.ndarray"),
    *(
        (stand_in, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")  # until NumPy 2, and since
        for name, stand_in in (("_reconstruct", _Unread), ("scalar", _scalar))
    ),
]


def read_original(path: Path) -> Mapping[str, Any]:
    """The file's content, a record of tensors and plain values; or why it cannot be read."""
    if not path.is_file():
        raise ValueError(f"load_original: path must be a file, got {str(path)!r}")
    try:
        damaged = _damaged_entry(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_HARMLESS):
            warnings.simplefilter("ignore")  # about the pickle's protocol
            record = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        raise _no_checkpoint(
            path,
            f"it asks for {code[1]}, which was not run" if code else "it is damaged or foreign",
        ) from error
    if damaged:
        raise _no_checkpoint(path, f"its entry {damaged} is damaged")
    if not isinstance(record, Mapping) or not isinstance(record.get("model"), Mapping):
        raise ValueError(
            f"load_original: path must be a checkpoint with an entry 'model', got {str(path)!r}"
        )
    return record


def _damaged_entry(path: Path) -> str | None:
    """The first entry of a zip file whose checksum is wrong; torch does not check them.

    The format before zip files has no checksums.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":
            return None
    with zipfile.ZipFile(path) as entries:
        return entries.testzip()


def _no_checkpoint(path: Path, reason: str) -> ValueError:
    return ValueError(
        "load_original: path must be a checkpoint of tensors and plain values, "
        f"got {str(path)!r} ({reason})"
    )
