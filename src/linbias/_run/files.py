"""Files that are whole or not there at all, and logs that grow line by line."""

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
    """Opens a file that appears under its name, whole, when the block ends without an error."""
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
    with new_file(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path, function: str) -> Record:
    """Reads a JSON file that holds one object; a `ValueError` names `function` and the path."""
    try:
        return _record(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{function}: {path} must exist, got no such file") from error
    except ValueError as error:
        raise ValueError(f"{function}: {path} is damaged ({error})") from error


def _record(text: bytes) -> Record:
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("it holds no JSON object")
    return record


def check_writable(folder: Path, function: str) -> None:
    """Makes a folder and a file in it, so that a long job that cannot write fails at its start."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{function}: output must be a folder to write in, got {folder} ({error})"
        ) from error


def move_into_place(source: Path, target: Path) -> None:
    """Moves a model's files, config.json last: it makes a folder a model to Transformers."""
    for file in sorted(source.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(file, target / file.name)
    source.rmdir()


def fingerprint(path: Path) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a file's content."""
    return sha256(path)[:16]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JsonLog:
    """A log of JSON records, one in a line; a last line without its end is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        self.records: list[Record] = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self.records.append(_record(line))
            except ValueError as error:
                raise ValueError(
                    f"JsonLog: line {number} of {path} is damaged ({error})"
                ) from error

    def find(self, **fields: Any) -> Record | None:
        return next((record for record in self.records if record.items() >= fields.items()), None)

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
        lines = [json.dumps(record).encode() + b"\n" for record in records]
        write_whole(self.path, b"".join(lines))
        self.records = [json.loads(line) for line in lines]
