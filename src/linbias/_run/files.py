"""Files that are whole or not there at all, and logs that grow line by line.

Only the standard library is imported here: processes that read text use this module as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that appears under its name when the block ends, and never in part.

    It is written under a temporary name in the same folder, and renamed once it is on the disk. If
    the block fails, the temporary file is deleted and a file that was there before stays. An
    `OSError` names the path.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    with new_file(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that is there whole or not at all."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path, function: str) -> Record:
    """Reads a JSON file that holds one object; `function` is what the `ValueError` names."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError as error:
        raise ValueError(f"{function}: {path} must exist, got no such file") from error
    except ValueError as error:
        raise ValueError(f"{function}: {path} is damaged ({error})") from error
    return content


def check_writable(folder: Path, function: str) -> None:
    """Makes a folder and a temporary file in it, so that a long job fails at its start.

    `function` is what the `ValueError` names where that cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{function}: output must be a folder to write in, got {folder} ({error})"
        ) from error


def move_into_place(source: Path, target: Path) -> None:
    """Moves a model's files from one folder into another, and deletes the first folder.

    config.json moves last: without it, Transformers does not take a folder for a model.
    """
    for file in sorted(source.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, target / file.name)
    source.rmdir()


def fingerprint(path: Path) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a file's content."""
    return sha256(path)[:16]


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JsonLog:
    """A file of JSON records, one in each line, which is only ever appended to.

    A crash can leave the last line without its end. Such a line does not count, and is cut off
    when the log is opened. `records` are what the lines hold; another line that holds none is
    refused.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "log.jsonl")
        ...     _ = path.write_text('{"length": 64, "loss": 2.5}\\n{"length": 128, "lo')
        ...     log = JsonLog(path)
        ...     log.append({"length": 128, "loss": 2.25})
        ...     log.find(length=128), len(JsonLog(path).records)
        ({'length': 128, 'loss': 2.25}, 2)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        self.records: list[Record] = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("it holds no JSON object")
                self.records.append(record)
            except ValueError as error:
                raise ValueError(
                    f"JsonLog: line {number} of {path} is damaged ({error})"
                ) from error

    def find(self, **fields: Any) -> Record | None:
        """The first record that has these values, or None."""
        for record in self.records:
            if record.items() >= fields.items():
                return record
        return None

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line, on the disk when this returns; after an `OSError` the file is as before."""
        line = json.dumps(record)
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.records.append(json.loads(line))

    def restart(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the whole log by these records."""
        lines = [json.dumps(record) + "\n" for record in records]
        write_whole(self.path, "".join(lines).encode())
        self.records = [json.loads(line) for line in lines]
