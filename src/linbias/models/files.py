"""The files of a model, in a folder or on the Hugging Face Hub: read without running any code."""

import errno
import json
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from linbias._run.files import check_writable, move_into_place
from linbias._run.hub import answers
from linbias.models.fields import check_num_labels

Weights = dict[str, Tensor]  # by name; of a folder that is only looked at, on the device "meta"
_FILES = ("model.safetensors", "pytorch_model.bin")
_WEIGHTS = tuple(name + end for name in _FILES for end in ("", ".index.json"))


@dataclass(frozen=True)
class Files:
    """The files of a model, here or on the Hub; config.json is read once."""

    name: str
    settings: Mapping[str, Any]
    local_files_only: bool

    @classmethod
    def at(cls, caller: str, folder: "str | Path | Files", argument: str = "folder") -> "Files":
        """Find a folder, or ask the Hub for it, once. Errors name the caller and its argument."""
        if isinstance(folder, Files):
            return folder
        name, is_here = str(folder), Path(folder).exists()
        if name.endswith(".gguf") and not Path(folder).is_dir():
            raise ValueError(
                f"{caller}: {argument} must be a folder, got the GGUF file {name!r}: Transformers"
                " reads those of BLOOM (from_pretrained(folder, gguf_file=name), then fuse), and"
                " other families are loaded from their original folders"
            )
        may_be_id = not is_here and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
        if not may_be_id and not Path(folder, "config.json").is_file():
            raise ValueError(
                f"{caller}: {argument} must be a folder with a config.json, got {name!r}"
            )
        found = cls(name, {}, is_here or not answers())
        with one_error(caller, name):
            if is_here:
                _check_folder(Path(folder))
            path = found.file("config.json")
            if path is None:
                if not is_here and found.local_files_only:
                    raise ValueError("it does not answer, and no such model was downloaded before")
                raise ValueError("it has no config.json")
            try:
                settings = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"config.json must be JSON ({error})") from error
            if not isinstance(settings, dict):
                raise ValueError(f"config.json must hold a JSON object, got {settings!r:.40}")
            check_num_labels("config.json", settings)
        return replace(found, settings=settings)

    @property
    def model_type(self) -> object:
        return self.settings.get("model_type")

    @property
    def options(self) -> dict[str, Any]:
        local = self.local_files_only
        return {"local_files_only": local, "weights_only": True, "trust_remote_code": False}

    def file(self, *names: str) -> Path | None:
        """The first of these files that there is."""
        for name in names:
            if Path(self.name).is_dir():
                if (path := Path(self.name) / name).is_file():
                    _check_inside(Path(self.name), path)
                    return path
                continue
            found = cached_file(
                self.name,
                name,
                local_files_only=self.local_files_only,
                _raise_exceptions_for_missing_entries=False,
            )
            if found is not None:
                return Path(found)
        return None

    def look_at_weights(self) -> Weights:
        """The weights by name, without their numbers: on the device "meta"."""
        return self._read(_look_at, "meta")

    def read_weights(self) -> Weights:
        """The weights by name, on the CPU."""
        return self._read(load_file, "cpu")

    def _read(self, read_safetensors: Callable[[Path], Weights], device: str) -> Weights:
        weights: Weights = {}
        for part in self._parts():
            try:
                if part.suffix == ".safetensors":
                    found = read_safetensors(part)
                else:
                    found = torch.load(part, map_location=device, weights_only=True)
                twice = sorted(found.keys() & weights)
                weights |= found
            except Exception as error:  # damaged or hostile files can raise anything
                is_pickle = part.suffix != ".safetensors"
                asks = ", or asks for code, which was not run" if is_pickle else ""
                raise ValueError(f"{part.name} is damaged{asks}") from error
            if twice:
                raise ValueError(f"{twice[0]} must lie in one file, got another in {part.name}")
        return weights

    def _parts(self) -> list[Path]:
        path = self.file(*_WEIGHTS)
        if path is None:
            raise ValueError(f"it has no {' or '.join(_WEIGHTS)}")
        if not path.name.endswith(".index.json"):
            return [path]
        try:
            names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
            outside = [x for x in names if Path(x).is_absolute() or ".." in Path(x).parts or not x]
            parts = [] if outside else [self.file(name) for name in names]
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path.name} is damaged") from error
        if outside:
            raise ValueError(
                f"weight_map of {path.name} must name files of the folder, got {outside[0]!r:.80}"
            )
        if None in parts:
            raise ValueError(f"it has not all parts that {path.name} names")
        return [part for part in parts if part is not None]


# What is read of a folder, here or by Transformers.
_READ = (".json", ".safetensors", ".bin", ".model", ".jinja")
_WORDS = ("dict.txt", "vocab.txt", "merges.txt")


def _check_folder(folder: Path) -> None:
    """Check every file that a loader may read: none waits for a writer, none lies elsewhere."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ or path.name in _WORDS:
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path.name} must be a file, got a pipe, socket or device")
            _check_inside(folder, path)


def _check_inside(folder: Path, path: Path) -> None:
    """Raise a ValueError if a file leads out of its folder, or the Hub's cache, by a link."""
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:  # of which resolve() says nothing from Python 3.13 on
            raise ValueError(f"{path.name} must be a file, got a loop of links") from error
    found = path.resolve()
    if not found.is_relative_to(root):
        raise ValueError(f"{path.name} must lie in the folder, got a link to {str(found)!r}")


_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64},
}


def _look_at(part: Path) -> Weights:
    found = {}
    with safe_open(part, "pt") as file:
        for name in file.keys():  # no dictionary
            header = file.get_slice(name)
            dtype = _DTYPES.get(header.get_dtype(), torch.int8)
            found[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
    return found


def refuse_model_in(output: Path, caller: str) -> None:
    """Check that a folder to make holds no model."""
    held = sorted(
        file.name for name in ("config.json", "*.safetensors") for file in output.glob(name)
    )
    if held:
        raise ValueError(
            f"{caller}: output must not hold a model already, got {output} "
            f"(it has {', '.join(held)})"
        )


@contextmanager
def new_folder(output: Path, caller: str) -> Iterator[Path]:
    """A folder for files that appear in `output`, all of them, when the block ends; a block that
    fails leaves no folder that was not there before.
    """
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    check_writable(output, caller)
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=output) as partial:
            yield Path(partial)
            move_into_place(Path(partial), output)
    except BaseException as error:
        if made:
            shutil.rmtree(output, ignore_errors=True)
        with suppress(OSError):
            for parent in made[1:]:
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"{caller}: could not write to {output} ({error})") from error
        raise


@contextmanager
def one_error(caller: str, name: str) -> Iterator[None]:
    """Whatever goes wrong within the block is a ValueError of one line."""
    try:
        yield
    except pickle.UnpicklingError as error:  # its own words advise to run what is in the file
        reason = "its weights are damaged, or ask for code, which was not run"
        raise ValueError(f"{caller}: cannot read a model at {name!r}: {reason}") from error
    except Exception as error:  # damaged or hostile files can raise anything
        first, *more = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"{first} {more[0].strip()}" if more and first.endswith(":") else first
        if isinstance(error, ValueError) and reason.startswith((f"{caller}: ", "fuse: ")):
            raise
        if not Path(name).exists():
            reason = f"there is no such folder, and on the Hugging Face Hub: {reason}"
        raise ValueError(f"{caller}: cannot read a model at {name!r}: {reason}") from error
