"""q, k and v for any text: the chapter's where it gives them, else numbers made of the token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from linbias.example import TOKENS, K, Q, V

SIZE = 2  # of a head, as in the chapter
_EXAMPLE: dict[str, dict[str, Sequence[float]]] = {
    role: dict(zip(TOKENS, rows, strict=True)) for role, rows in zip("qkv", (Q, K, V), strict=True)
}


def vectors(
    tokens: Sequence[str], num_heads: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Give each token the vectors that the explorer's page gives it.

    A token has the same vectors wherever it stands, since positions enter by the bias alone. In
    heads 0 and 1 the chapter's five tokens have the chapter's; all others are one of -1/2, 0, 1/2,
    1, 3/2 by a hash of the token.

    Args:
        tokens: The text.
        num_heads: Number of heads.

    Returns:
        q, k and v, each [num_heads, len(tokens), 2], float64.

    Raises:
        ValueError: There is no token or no head.

    Example:
        >>> q, k, v = vectors(["The", "cat"], 2)
        >>> q.tolist()
        [[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 1.0]]]
    """
    if not tokens or num_heads < 1:
        raise ValueError(
            f"vectors: needs tokens and heads, got {len(tokens)} tokens and num_heads={num_heads}"
        )

    def rows(role: str) -> npt.NDArray[np.float64]:
        heads = range(num_heads)
        return np.array([[_vector(role, h, token) for token in tokens] for h in heads], np.float64)

    return rows("q"), rows("k"), rows("v")


def _vector(role: str, head: int, token: str) -> Sequence[float]:
    row = _EXAMPLE[role].get(token)
    if row is not None and head * SIZE < len(row):
        return row[head * SIZE : (head + 1) * SIZE]
    return [(_hash(f"{role}{head}.{i} {token}") % 5 - 1) / 2 for i in range(SIZE)]


def _hash(text: str) -> int:
    """FNV-1a of the text in UTF-8, its bits mixed once more: the low ones are too regular."""
    state = 0x811C9DC5
    for byte in text.encode(errors="replace"):
        state = (state ^ byte) * 0x01000193 % 2**32
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    return state ^ state >> 13
