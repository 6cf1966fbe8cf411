"""The files of the vectors of documents: .npy, .jsonl or .parquet, whole or not at all."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linbias._run.files import check_writable, new_file, read_json, write_json
from linbias._run.folders import list_differences
from linbias.models.embedding.documents import Id
from linbias.models.embedding.spans import Span

Vectors = NDArray[np.float32]
Settings = Mapping[str, Any]  # with which vectors were made
Columns = Mapping[str, Any]  # by name, a value for each document


class Embedded(NamedTuple):
    """What `embed` made of N documents, in their order."""

    vectors: Vectors  # [N, hidden_size]
    ids: tuple[Id, ...]
    num_tokens: tuple[int, ...]  # that were read of each, special tokens included
    num_shortened: int  # documents of which max_length left a part unread
    spans: tuple[tuple[Span, ...], ...] = ()  # of each document, if any were asked for
    span_vectors: tuple[Vectors, ...] = ()  # [number of its spans, hidden_size] of each


def check_output(output: Path) -> None:
    """Check before any work that the file can be written."""
    if output.suffix not in WRITERS:
        raise ValueError(
            f"embed: output must end in one of {', '.join(WRITERS)}, got {str(output)!r}"
        )
    if output.suffix == ".npy" and not (output.exists() or partial_folder(output).exists()):
        for beside in (beside_file(output), _spans_file(output)):  # of vectors that are gone
            if beside.exists():
                raise ValueError(f"embed: output must not exist, got {beside}")
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ModuleNotFoundError(
            "embed: a .parquet file needs pyarrow, which is not installed: pip install pyarrow",
            name="pyarrow",
        )
    check_writable(output.parent, "embed")


def partial_folder(output: Path) -> Path:
    """Where a run keeps what it has, until the output is there."""
    return output.with_name(f"{output.name}.partial")


def beside_file(output: Path) -> Path:
    """Where the ids of the rows of a .npy file are, and the settings of it or of a .jsonl file."""
    return output.with_suffix(".ids.json" if output.suffix == ".npy" else ".settings.json")


def _spans_file(output: Path) -> Path:
    """Where the vectors of spans are that belong to a .npy file."""
    return output.with_suffix(".spans.npy")


def split_rows(rows: Vectors, counts: Sequence[int]) -> tuple[Vectors, ...]:
    """The first rows, the next ones, ..., so many at a time."""
    return tuple(np.split(rows, np.cumsum(counts)[:-1]))


def read_finished(output: Path, settings: Settings, num_shortened: int) -> Embedded:
    """What a writer wrote with the same settings; ValueError for any other file."""
    try:
        columns, made_by = _READERS[output.suffix](output)
        made = Embedded(
            vectors=np.asarray(columns["vector"], np.float32),
            ids=tuple(columns["id"]),
            num_tokens=tuple(columns["num_tokens"]),
            num_shortened=num_shortened,
            spans=tuple(tuple(map(tuple, pairs)) for pairs in columns.get("spans", ())),
            span_vectors=tuple(columns.get("span_vectors", ())),
        )
    except (OSError, EOFError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"embed: output must not exist, got {output}") from error
    if differences := list_differences(made_by, settings):
        raise ValueError(f"embed: output must not be another run's, got {output} ({differences})")
    return made


def _write_npy(output: Path, made: Embedded, settings: Settings) -> None:
    named: dict[str, Any] = {"settings": settings, "ids": made.ids, "num_tokens": made.num_tokens}
    if made.spans:
        named["spans"] = made.spans
        with new_file(_spans_file(output)) as file:
            np.save(file, np.concatenate(made.span_vectors))
    write_json(beside_file(output), named)
    with new_file(output) as file:
        np.save(file, made.vectors)


def _write_jsonl(output: Path, made: Embedded, settings: Settings) -> None:
    write_json(beside_file(output), settings)
    with new_file(output) as file:
        for i, name in enumerate(made.ids):
            line: dict[str, Any] = {"id": name, "num_tokens": made.num_tokens[i]}
            line["vector"] = _plain(made.vectors[i])
            if made.spans:
                line["spans"] = made.spans[i]
                line["span_vectors"] = [*map(_plain, made.span_vectors[i])]
            file.write(f"{json.dumps(line)}\n".encode())


def _plain(vector: Vectors) -> list[float]:
    """Numbers of as few digits as tell float32 apart."""
    return [float(str(x)) for x in vector]


def _write_parquet(output: Path, made: Embedded, settings: Settings) -> None:
    import pyarrow
    from pyarrow import parquet

    def rows(vectors: Vectors) -> pyarrow.Array:
        return pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])

    ids = made.ids
    all_integers = all(isinstance(name, int) and abs(name) < 2**63 for name in ids)
    columns = {
        "id": pyarrow.array(ids if all_integers else list(map(str, ids))),
        "num_tokens": pyarrow.array(made.num_tokens),
        "vector": rows(made.vectors),
    }
    if made.spans:
        ends = np.cumsum([0, *map(len, made.spans)])
        for name, values in (
            ("spans", rows(np.concatenate(made.spans))),
            ("span_vectors", rows(np.concatenate(made.span_vectors))),
        ):
            columns[name] = pyarrow.LargeListArray.from_arrays(ends, values)
    table = pyarrow.table(columns, metadata={"linbias.embed": json.dumps(settings)})
    with new_file(output) as file:
        parquet.write_table(table, file)


def _read_npy(output: Path) -> tuple[Columns, Settings]:
    columns = read_json(beside_file(output), "embed")
    columns["vector"] = np.load(output)
    columns["id"] = columns["ids"]
    if "spans" in columns:
        counts = [*map(len, columns["spans"])]
        columns["span_vectors"] = split_rows(np.load(_spans_file(output)), counts)
    return columns, columns["settings"]


def _read_jsonl(output: Path) -> tuple[Columns, Settings]:
    rows = []
    with output.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            for name in {"vector", "span_vectors"} & row.keys():
                row[name] = np.asarray(row[name], np.float32)
            rows.append(row)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return columns, read_json(beside_file(output), "embed")


def _read_parquet(output: Path) -> tuple[Columns, Settings]:
    from pyarrow import parquet

    table = parquet.read_table(output)
    names = {"id", "num_tokens", "spans"} & {*table.column_names}
    columns = {name: table[name].to_pylist() for name in names}
    columns["vector"] = np.stack(table["vector"].to_numpy())
    if "span_vectors" in table.column_names:
        columns["span_vectors"] = [*map(np.stack, table["span_vectors"].to_numpy())]
    return columns, json.loads(table.schema.metadata[b"linbias.embed"])


_READERS = {".npy": _read_npy, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
# By the ending of an output: what writes a row per document.
WRITERS = {".npy": _write_npy, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
