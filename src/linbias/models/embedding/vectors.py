"""The files of the vectors of documents: .npy, .jsonl or .parquet, whole or not at all."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linbias._run.files import check_writable, new_file, read_json, write_json, write_whole
from linbias._run.folders import list_differences
from linbias.models.embedding.documents import Id

Vectors = NDArray[np.float32]
Settings = Mapping[str, Any]  # with which vectors were made


class Embedded(NamedTuple):
    """What `embed` made of N documents, in their order."""

    vectors: Vectors  # [N, hidden_size]
    ids: tuple[Id, ...]
    num_tokens: tuple[int, ...]  # that were read of each, special tokens included
    num_shortened: int  # documents of which max_length left a part unread


def check_output(output: Path) -> None:
    """Check before any work that the file can be written."""
    if output.suffix not in WRITERS:
        raise ValueError(
            f"embed: output must end in one of {', '.join(WRITERS)}, got {str(output)!r}"
        )
    if output.suffix == ".npy" and not (output.exists() or partial_folder(output).exists()):
        if (beside := beside_file(output)).exists():  # the ids of vectors that are gone
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


def read_finished(output: Path, settings: Settings, num_shortened: int) -> Embedded:
    """What a writer wrote with the same settings; ValueError for any other file."""
    try:
        vectors, ids, num_tokens, made_by = _READERS[output.suffix](output)
    except (OSError, EOFError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"embed: output must not exist, got {output}") from error
    if differences := list_differences(made_by, settings):
        raise ValueError(f"embed: output must not be another run's, got {output} ({differences})")
    return Embedded(
        vectors=np.asarray(vectors, np.float32),
        ids=tuple(ids),
        num_tokens=tuple(num_tokens),
        num_shortened=num_shortened,
    )


def _write_npy(output: Path, made: Embedded, settings: Settings) -> None:
    named = {"settings": settings, "ids": list(made.ids), "num_tokens": list(made.num_tokens)}
    write_json(beside_file(output), named)
    with new_file(output) as file:
        np.save(file, made.vectors)


def _write_jsonl(output: Path, made: Embedded, settings: Settings) -> None:
    lines = []
    for vector, name, tokens in zip(made.vectors, made.ids, made.num_tokens, strict=True):
        numbers = [float(str(x)) for x in vector]  # as few digits as tell float32 apart
        lines.append(json.dumps({"id": name, "num_tokens": tokens, "vector": numbers}) + "\n")
    write_json(beside_file(output), settings)
    write_whole(output, "".join(lines).encode())


def _write_parquet(output: Path, made: Embedded, settings: Settings) -> None:
    import pyarrow
    from pyarrow import parquet

    vectors, ids = made.vectors, made.ids
    all_integers = all(isinstance(name, int) and abs(name) < 2**63 for name in ids)
    columns = {
        "id": pyarrow.array(ids if all_integers else list(map(str, ids))),
        "num_tokens": pyarrow.array(made.num_tokens),
        "vector": pyarrow.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1]),
    }
    table = pyarrow.table(columns, metadata={"linbias.embed": json.dumps(settings)})
    with new_file(output) as file:
        parquet.write_table(table, file)


def _read_npy(output: Path) -> tuple[Any, ...]:
    named = read_json(beside_file(output), "embed")
    return np.load(output), named["ids"], named["num_tokens"], named["settings"]


def _read_jsonl(output: Path) -> tuple[Any, ...]:
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    columns = ([row[name] for row in rows] for name in ("vector", "id", "num_tokens"))
    return *columns, read_json(beside_file(output), "embed")


def _read_parquet(output: Path) -> tuple[Any, ...]:
    from pyarrow import parquet

    table = parquet.read_table(output)
    columns = (table[name].to_pylist() for name in ("vector", "id", "num_tokens"))
    return *columns, json.loads(table.schema.metadata[b"linbias.embed"])


_READERS = {".npy": _read_npy, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
# By the ending of an output: what writes a row per document.
WRITERS = {".npy": _write_npy, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
