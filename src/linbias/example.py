"""The book chapter's example, "The cat sat on mat", and traces for `linbias explain`."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from linbias.explain import Explanation, explain
from linbias.schedules import slopes

TOKENS = ["The", "cat", "sat", "on", "mat"]
# Two heads of two numbers each stand side by side in a row.
Q: list[list[float]] = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
K: list[list[float]] = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
V: list[list[float]] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]


def trace(path: Path | None = None, causal: bool = True) -> tuple[Explanation, list[str]]:
    """Explain the book's example (slopes 1/2 and 1/4), or the arrays in a file.

    Args:
        path: .npz with q, k, v, each [heads, length, size]; optional left and right [heads] and
            tokens [keys].
        causal: hide the keys after the query, unless the file holds slopes for them (right).

    Returns:
        The trace, and a name for each key.

    Raises:
        ValueError: the file cannot be read, or its arrays do not fit together.
    """
    if path is None:
        q, k, v = (np.array(rows).reshape(5, 2, 2).swapaxes(0, 1) for rows in (Q, K, V))
        return explain(q, k, v, slopes(2, "halving"), causal=causal), TOKENS
    arrays = _read(path)
    missing = [name for name in "qkv" if name not in arrays]
    if missing:
        raise ValueError(
            f"explain: arrays must have q, k and v, got {', '.join(arrays)} in {path}"
        )
    q, k, v = (arrays[name] for name in "qkv")
    if q.ndim != 3:
        raise ValueError(f"explain: q must be [heads, length, size], got {list(q.shape)}")
    tokens = [str(token) for token in arrays.get("tokens", range(k.shape[-2]))]
    left, right = arrays.get("left"), arrays.get("right")
    return explain(q, k, v, left, causal=causal and right is None, right=right), tokens


def _read(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise ValueError(
            f"explain: arrays must be an .npz file, got {path} ({error.strerror or error})"
        ) from error
    except (EOFError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        # NumPy's own words advise to load what may run code.
        raise ValueError(
            f"explain: arrays must be an .npz file of numbers, as numpy.savez writes it, got {path}"
        ) from error


def find(query: str | None, trace: Explanation, tokens: list[str]) -> list[int]:
    """The numbers of the queries meant by a number, a token, "all", or None for the last."""
    num_queries = trace.biased.shape[-2]
    if query == "all":
        return list(range(num_queries))
    return [trace.find(-1 if query is None else query, tokens)]


def find_heads(head: int | None, num_heads: int) -> list[int]:
    """The one head that was asked for, or all."""
    if head is None:
        return list(range(num_heads))
    if not 0 <= head < num_heads:
        raise ValueError(f"explain: head must be in [0, {num_heads}), got {head}")
    return [head]


def steps(
    trace: Explanation, tokens: list[str], queries: list[int], heads: list[int]
) -> dict[str, Any]:
    """The chosen rows of a trace as JSON values; what is infinite (hidden keys) becomes null."""
    names = ("raw", "scaled", "penalty", "biased", "weight", "output")
    rows = [
        {
            "head": head,
            "query": query,
            **{name: _finite(getattr(trace, name)[head, query].tolist()) for name in names},
        }
        for query in queries
        for head in heads
    ]
    left, right = (_finite(side.tolist()) for side in (trace.left, trace.right))
    return {"tokens": tokens, "left": left, "right": right, "rows": rows}


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
