"""The documents that `embed` reads: text files, and JSON lines with a text each."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
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

    A line is `{"text": ..., "id": ...}`, where other fields are ignored and an id may be left out. The id of a text
    file is its path, that of a line without one `path:line`. Lines of white space are skipped.

    Args:
        files: Files, folders or globs, as for `linbias.data.corpus.load_corpus`; "-" reads standard input as JSON lines.

    Raises:
        ValueError: A folder has no file, a file cannot be read or is not UTF-8, a line is no such record, a document is empty, or two have
            the same id; the message names file and line.

    Example:
        >>> path = Path(tempfile.mkdtemp(), "a.jsonl")
        >>> _ = path.write_text('{"text": "far", "id": 7}')
        >>> read_documents([path])
        [Document(id=7, text='far')]
    """
    documents: list[Document] = []
    places: dict[str, str] = {}
    for file in (file for name in files for file in _matching(name)):
        for place, document in _read(file):
            if not document.text.strip():
                raise ValueError(f"read_documents: text must not be empty, got none in {place}")
            before = places.setdefault(str(document.id), place)
            if before is not place:
                raise ValueError(
                    f"read_documents: ids must differ, got {document.id!r} in {before} and in {place}"
                )
            documents.append(document)
    if not documents:
        raise ValueError(
            f"read_documents: files must hold a document, got {list(map(str, files))}"
        )
    return documents


def _matching(name: str | Path) -> Sequence[str | Path]:
    """The files of a name; a name alone where it is standard input, a pipe or nothing."""
    found = [] if str(name) == "-" else matching_files(str(name), "read_documents")
    return found or [name]


def _read(file: str | Path) -> Iterable[tuple[str, Document]]:
    """Each document of a file, and where it stands in words."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(
            f"read_documents: files must exist and be readable, got {file} ({error.strerror})"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"read_documents: files must be UTF-8 text, got another byte at {error.start} of {file}"
        ) from error
    if str(file) == "-" or Path(file).suffix == ".jsonl":
        return _lines(str(file), text)
    return [(str(file), Document(str(file), text))]


def _lines(file: str, content: str) -> Iterator[tuple[str, Document]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"line {number} of {file}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"read_documents: {place} must be JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(
                f'read_documents: {place} must be an object with "text", a string, got {line[:60]!r}'
            )
        name = record.get("id", f"{file}:{number}")
        if isinstance(name, bool) or not isinstance(name, Id):
            raise ValueError(
                f'read_documents: "id" must be a string or an integer, got {name!r} in {place}'
            )
        try:
            f"{name}{record['text']}".encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"read_documents: {place} must be Unicode text, got half of a surrogate pair"
            ) from error
        yield place, Document(name, record["text"])
