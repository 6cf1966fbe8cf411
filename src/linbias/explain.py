"""Every step of attention, to read: the trace of the book chapter, for any inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from linbias._arrays import Float64, Options, prepare, split_heads
from linbias._matrix import printable
from linbias.definition import compute
from linbias.schedules import in_words


@dataclass(frozen=True, repr=False)
class Explanation:
    """Every step of attention for every head, query and key. Made by `explain`.

    Attributes:
        q: [..., H, T, D], the queries.
        raw: [..., H, T, S], q . k.
        scaled: [..., H, T, S], scale * raw.
        bias: [..., H, T, S], what is added: -slope * distance, -inf where hidden; and the numbers
            of a mask.
        scores: [..., H, T, S], scaled + bias.
        weights: [..., H, T, S], softmax(scores).
        output: [..., H, T, E], weights @ v.
        lse: [..., H, T].
        slopes, right_slopes: [H] or [B, H] (right_slopes is inf for causal attention).
        query_start: [...], the position of query 0.
        tokens: S names for the keys, or None.
    """

    q: Float64
    raw: Float64
    scaled: Float64
    bias: Float64
    scores: Float64
    weights: Float64
    output: Float64
    lse: Float64
    slopes: Float64
    right_slopes: Float64
    query_start: npt.NDArray[np.int64]
    tokens: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        *batch, H, T, S = self.scores.shape
        of = f" for a batch {batch}" if batch else ""
        return f"Explanation({H} heads, {T} queries, {S} keys{of}; table() shows it)"

    def slopes_in_words(self, head: int) -> str:
        """The slopes of a head, without those of a hidden side."""
        return in_words(float(self.slopes[..., head]), float(self.right_slopes[..., head]))

    def names(self, tokens: Sequence[str] | None = None) -> list[str]:
        """Name the S keys: by tokens given here, else to `explain`, else by their index."""
        S = self.scores.shape[-1]
        tokens = self.tokens if tokens is None else tokens
        names = [str(s) for s in range(S)] if tokens is None else [str(token) for token in tokens]
        if len(names) != S:
            raise ValueError(f"explain: tokens must name the {S} keys, got {len(names)}")
        return names

    def find(self, query: int | str, tokens: Sequence[str] | None = None) -> int:
        """Find a query's index by a number, negative from the end, or by its token.

        Args:
            query: A number, in digits too, or one of the tokens.
            tokens: As for `names`.

        Raises:
            ValueError: There is no such query.
        """
        T = self.scores.shape[-2]
        names = self.names(tokens)
        if isinstance(query, str) and query in names:
            number = names.index(query) - int(self.query_start)
            in_range = 0 <= number < T
        else:
            try:
                number = int(query)
            except ValueError:
                raise ValueError(
                    f"explain: query must be a number or token, got {query!r}"
                ) from None
            in_range = -T <= number < T
        if not in_range:
            raise ValueError(f"explain: query must be in [-{T}, {T}), got {query}")
        return number % T

    def table(
        self, query: int | str = -1, head: int | None = None, tokens: Sequence[str] | None = None
    ) -> str:
        """Write one query's trace as text, a block per head.

        Args:
            query: Its index, negative from the end, or its token; the last by default.
            head: Only this head; None means all.
            tokens: As for `names`.

        Raises:
            ValueError: There is a batch axis, no such query, or tokens has another length than the
                keys.
            IndexError: head is out of range.
        """
        if self.scores.ndim != 3:
            raise ValueError(f"table: needs arrays without a batch axis, got {self.scores.shape}")
        H, _, S = self.scores.shape
        query = self.find(query, tokens)
        names = [printable(name) for name in self.names(tokens)]
        width = max([3, *map(len, names)])
        lines = []
        for h in range(H) if head is None else [range(H)[head]]:
            position = query + int(self.query_start)
            label = names[position] if 0 <= position < S else f"position {position}"
            lines.append(f"head {h}, {self.slopes_in_words(h)}, query {label}")
            lines.append(f"  q [{_in_a_row(self.q[h, query])}]")
            lines.append(f"  {'key':<{width}}    q . k   scaled     bias   scores  weights")
            steps = (self.raw, self.scaled, self.bias, self.scores, self.weights)
            for s in range(S):
                numbers = "".join(f"{step[h, query, s]:9.4f}" for step in steps)
                lines.append(f"  {names[s]:<{width}}{numbers}")
            lines.append(f"  output [{_in_a_row(self.output[h, query])}]")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return every array as nested lists, JSON but for inf (hidden keys), and the tokens."""
        arrays = {name: value.tolist() for name, value in vars(self).items() if name != "tokens"}
        return {**arrays, "tokens": None if self.tokens is None else list(self.tokens)}


def _in_a_row(vector: Float64) -> str:
    return " ".join(f"{value:.4f}" for value in vector)


def explain(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    *,
    tokens: Sequence[str] | None = None,
    num_heads: int | None = None,
    **options: Unpack[Options],
) -> Explanation:
    """Compute `attention` and keep every step on the way.

    Args:
        q, k, v, slopes, options: As for `attention`.
        tokens: S names for the keys, to be shown.
        num_heads: As for `attention`.

    Returns:
        An `Explanation`: arrays per head, query and key, and `table()` to read them.

    Raises:
        TypeError, ValueError: As `attention`; or tokens has another length than the keys.

    Example:
        >>> trace = explain(np.zeros((1, 2, 1)), np.zeros((1, 2, 1)), np.ones((1, 2, 1)), [0.5])
        >>> print(trace.table())
        head 0, slope 1/2, query 1
          q [0.0000]
          key    q . k   scaled     bias   scores  weights
          0     0.0000   0.0000  -0.5000  -0.5000   0.3775
          1     0.0000   0.0000   0.0000   0.0000   0.6225
          output [1.0000]

    Source: the step-by-step trace of the book chapter.
    """
    if num_heads is not None:
        q, k, v = split_heads("explain", num_heads, q, k, v)
    inputs = prepare("explain", q, k, v, slopes, **options)
    S = inputs.k.shape[2]
    if tokens is not None and len(tokens) != S:
        raise ValueError(f"explain: tokens must name the {S} keys, got {len(tokens)}")
    steps = compute(inputs)
    return Explanation(
        q=inputs.restore(inputs.q),
        **{name: inputs.restore(getattr(steps, name)) for name in steps._fields},
        slopes=inputs.left,
        right_slopes=inputs.right,
        query_start=inputs.restore(inputs.query_start),
        tokens=None if tokens is None else tuple(map(str, tokens)),
    )
