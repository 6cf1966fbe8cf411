"""The book chapter's example, "The cat sat on mat", and traces for `linbias explain`."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linbias.definition import Float64
from linbias.explain import Explanation, explain
from linbias.schedules import slopes

TOKENS = ["The", "cat", "sat", "on", "mat"]
# Two heads of two numbers each stand side by side in a row.
Q: list[list[float]] = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
K: list[list[float]] = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
V: list[list[float]] = [
    [1, 0, 0, 0],
    [0, 1, 0, 0],
    [0, 0, 1, 0],
    [0, 0, 0, 1],
    [0.5, 0.5, 0.5, 0.5],
]


def trace(
    path: Path | None = None, causal: bool = True, slope: Sequence[float] | None = None
) -> tuple[Explanation, list[str]]:
    """Explain the book's example (slopes 1/2 and 1/4), or the arrays in a file.

    Args:
        path: .npz with q, k, v, each [heads, length, size]; optional slopes and right_slopes
            [heads] and tokens [keys]. Without slopes they are those of the paper for so many
            heads.
        causal: hide the keys after the query, unless the file holds slopes for them
            (right_slopes).
        slope: One for all heads, or one for each, instead of those on every side that is not
            hidden; 0 gives standard attention.

    Returns:
        The trace, and a name for each key.

    Raises:
        ValueError: the file cannot be read, or its arrays do not fit together.
    """
    if path is None:
        q, k, v = (np.array(rows).reshape(5, 2, 2).swapaxes(0, 1) for rows in (Q, K, V))
        left: Any = slopes(2, "halving")
        right, tokens = None, TOKENS
    else:
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
        for side, name in (("left", "slopes"), ("right", "right_slopes")):
            if side in arrays:
                raise ValueError(f"explain: arrays has {side}; say {name}, got {path}")
        left, right = arrays.get("slopes"), arrays.get("right_slopes")
    if slope is not None:
        left = _override(slopes(len(q)) if left is None else left, slope)
        right = None if right is None else _override(right, slope)
    causal = causal and right is None
    return explain(q, k, v, left, causal=causal, right_slopes=right, tokens=tokens), tokens


def _override(side: Any, slope: Sequence[float]) -> Float64:
    """The numbers given instead of the slopes of one side; what is hidden stays so."""
    if len(slope) not in (1, len(side)):
        raise ValueError(
            f"explain: slope must be one number or {len(side)}, one for each head,"
            f" got {len(slope)}"
        )
    if not all(0 <= number < math.inf for number in slope):
        raise ValueError(f"explain: slope must be at least 0 and finite, got {min(slope):g}")
    return np.where(np.isinf(side), np.inf, np.array(slope, np.float64))


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
            "explain: arrays must be an .npz file of numbers, as numpy.savez writes it,"
            f" got {path}"
        ) from error


def find(query: str | None, trace: Explanation, tokens: list[str]) -> list[int]:
    """The numbers of the queries meant by a number or a token; "all" and None mean every one."""
    if query in (None, "all"):
        return list(range(trace.scores.shape[-2]))
    return [trace.find(query, tokens)]


def find_heads(head: int | None, num_heads: int) -> list[int]:
    """The one head that was asked for, or all."""
    if head is None:
        return list(range(num_heads))
    if not 0 <= head < num_heads:
        raise ValueError(f"explain: head must be in [0, {num_heads}), got {head}")
    return [head]


def side_by_side(heads: Float64) -> Float64:
    """Outputs [H, T, E] as rows [T, H * E], as a layer joins its heads."""
    joined: Float64 = np.concatenate(list(heads), axis=-1)
    return joined


def to_json(trace: Explanation, plain: Explanation) -> dict[str, Any]:
    """A trace as JSON values, beside weights and output of the same one without a bias; what is
    infinite (hidden keys) becomes null.
    """
    without = {
        f"{name}_without_bias": getattr(plain, name).tolist() for name in ("weights", "output")
    }
    return {**{name: _finite(x) for name, x in trace.to_dict().items()}, **without}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
