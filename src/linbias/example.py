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
Q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
K = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
V = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]


def trace(path: Path | None = None, causal: bool = False) -> tuple[Explanation, list[str]]:
    """Explain the book's example (slopes 1/2 and 1/4, both sides), or the arrays in a file.

    Args:
        path: .npz with q, k, v, each [heads, length, size]; optional left and right [heads] and
            tokens [keys].
        causal: hide the keys after the query.

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
    return explain(q, k, v, arrays.get("left"), causal=causal, right=arrays.get("right")), tokens


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


def find(query: str | None, tokens: list[str], num_queries: int) -> list[int]:
    """The numbers of the queries meant by a number, a token, "all", or None for the first.

    The last query stands at the last key, so a token's query is counted from the end.
    """
    if query == "all":
        return list(range(num_queries))
    if query in tokens:
        number = tokens.index(query) - len(tokens) + num_queries
    else:
        try:
            number = int(query or 0)
        except ValueError:
            raise ValueError(f"explain: query must be a number or token, got {query!r}") from None
    if not -num_queries <= number < num_queries:
        raise ValueError(f"explain: query must be one of {num_queries}, got {query}")
    return [number % num_queries]


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
