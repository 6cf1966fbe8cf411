"""The documents that `embed` reads: text files, and JSON lines with a text each."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from linbias.data.corpus import matching_files

Id = str | int


class Document(NamedTuple):
    """A text and the name under which its vector is found again."""

    id: Id
    text: str


def read_documents(files: Sequence[str | Path]) -> list[Document]:
    """Read files in order: a .jsonl file has a document in each line, any other file is one.

    A line is `{"text": ..., "id": ...}`, its id otherwise `path:line`; that of a text is its path.
    `files` are files, folders or globs as of `load_corpus`; "-" is standard input of JSON lines.
    """
    documents: list[Document] = []
    seen: dict[str, str] = {}  # by id, where it stands
    for name in map(str, files):
        # A name alone is standard input, a pipe or nothing.
        matching = [] if name == "-" else [*map(str, matching_files(name, "read_documents"))]
        for where, document in chain.from_iterable(map(_read, matching or [name])):
            if not document.text.strip():
                raise ValueError(f"read_documents: text must not be empty, got none in {where}")
            if (before := seen.get(str(document.id))) is not None:
                got = f"got {document.id!r} in {before} and in {where}"
                raise ValueError(f"read_documents: ids must differ, {got}")
            seen[str(document.id)] = where
            documents.append(document)
    if not documents:
        raise ValueError(
            f"read_documents: files must hold a document, got {list(map(str, files))}"
        )
    return documents


def _read(file: str) -> Iterable[tuple[str, Document]]:
    """Each document of a file, and where it stands in words."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"read_documents: files must exist and be readable, got {file} ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        got = f"got another byte at {error.start} of {file}"
        raise ValueError(f"read_documents: files must be UTF-8 text, {got}") from error
    if file == "-" or Path(file).suffix == ".jsonl":
        return _lines(file, text)
    return [(file, Document(file, text))]


def _lines(file: str, content: str) -> Iterator[tuple[str, Document]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"read_documents: {where} must be JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            rule = 'an object with "text", a string'
            raise ValueError(f"read_documents: {where} must be {rule}, got {line[:60]!r}")
        name = record.get("id", f"{file}:{number}")
        if isinstance(name, bool) or not isinstance(name, Id):
            raise ValueError(
                f'read_documents: "id" must be a string or an integer, got {name!r} in {where}'
            )
        try:
            f"{name}{record['text']}".encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"read_documents: {where} must be Unicode text, got half of a surrogate pair"
            ) from error
        yield where, Document(name, record["text"])
