"""`ALiBiAttention` as the book chapter on ALiBi has it in NumPy: slopes 1/2, 1/4, ..."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from linbias import _values
from linbias.compat._rules import check_head_size
from linbias.definition import Float64, attention_weights, bias
from linbias.explain import explain
from linbias.schedules import slopes

__all__ = ["ALiBiAttention"]


class ALiBiAttention:
    """Attention with linear biases over the rows of three matrices, head by head.

        weights[h] = softmax(Q_h K_h^T / sqrt(d_k) - slopes[h] * |i - j|)
        output_h = weights[h] V_h

    Head h has the columns h * d_k to (h + 1) * d_k. A query sees keys on both sides. `forward` and
    `explain` read the attributes at each call, so that other slopes can be set. What differs from
    the chapter: all heads are computed at once, and the step methods stay to be called by hand;
    results are float64; matrices of unlike shapes are refused.

    Args:
        d_model: Number of columns of Q, K and V.
        n_heads: Number of heads, a divisor of d_model.

    Attributes:
        d_k: Size of a head, d_model // n_heads.
        scale: sqrt(d_k), by which scores are divided.
        slopes: List of n_heads floats, 1 / 2^(h + 1).

    Raises:
        TypeError, ValueError: A number is no integer of at least 1, or n_heads no divisor.

    Example:
        >>> alibi = ALiBiAttention(d_model=4, n_heads=2)
        >>> output, weights = alibi.forward(np.ones((3, 4)), np.ones((3, 4)), np.eye(3, 4))
        >>> output.shape, [w.shape for w in weights]
        ((3, 4), [(3, 3), (3, 3)])
        >>> weights[0].round(4)
        array([[0.5065, 0.3072, 0.1863],
               [0.2741, 0.4519, 0.2741],
               [0.1863, 0.3072, 0.5065]])

    Source: the book chapter on ALiBi, "NumPy implementation" (see docs/ideas/definition.md).
    """

    def __init__(self, d_model: int, n_heads: int) -> None:
        self.d_k = check_head_size("ALiBiAttention", d_model, "n_heads", n_heads)
        self.d_model, self.n_heads = d_model, n_heads
        self.scale = float(np.sqrt(self.d_k))
        self.slopes: list[float] = slopes(n_heads, "halving").tolist()

    def compute_scores(self, Qh: npt.ArrayLike, Kh: npt.ArrayLike) -> npt.NDArray[Any]:
        """Products of the queries [N, d_k] and keys [N, d_k] of one head: [N, N]."""
        return np.asarray(Qh) @ np.asarray(Kh).T

    def scale_scores(self, scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scores divided by sqrt(d_k)."""
        return scores / self.scale

    def apply_alibi_bias(self, scaled: npt.NDArray[Any], slope: float) -> Float64:
        """Scaled scores [N, N] less slope * distance."""
        return scaled + bias([slope], *scaled.shape)[0]

    def compute_weights(self, alibi_scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Softmax along the last axis."""
        weights = np.exp(alibi_scores - alibi_scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def compute_output(self, weights: npt.NDArray[Any], Vh: npt.ArrayLike) -> npt.NDArray[Any]:
        """The sum of the values [N, d_k] of one head, weighted by [N, N]."""
        return weights @ np.asarray(Vh)

    def forward(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike
    ) -> tuple[Float64, list[Float64]]:
        """Attend, for Q, K and V [N, d_model]: output [N, d_model], and weights [N, N] by head.

        Raises:
            TypeError, ValueError: An array does not hold real numbers, or has another shape.
        """
        q, k, v = self._heads("forward", Q, K, V)
        weights = attention_weights(q, k, self.slopes, causal=False, scale=1 / self.scale)
        output: Float64 = np.hstack(list(weights @ v))
        return output, list(weights)

    def explain(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        tokens: Sequence[str],
        query_idx: int = 0,
    ) -> None:
        """Print every step of one query, a row of Q, for each head; tokens: N names.

        Raises:
            TypeError, ValueError: As `forward`, or tokens or query_idx does not fit.
        """
        q, k, v = self._heads("explain", Q, K, V)
        if len(tokens) != q.shape[1]:
            raise ValueError(
                f"ALiBiAttention.explain: tokens must be {q.shape[1]} names, got {len(tokens)}"
            )
        if not 0 <= query_idx < q.shape[1]:
            raise ValueError(
                f"ALiBiAttention.explain: query_idx must be in [0, {q.shape[1]}), got {query_idx}"
            )
        trace = explain(q, k, v, self.slopes, causal=False, scale=1 / self.scale)
        token = tokens[query_idx]
        print(f"\n=== ALiBi trace for '{token}' (row {query_idx}) ===")
        for h in range(self.n_heads):
            print(f"\n--- Head {h + 1} (slope={self.slopes[h]}) ---")
            print(f"Q_h{h + 1}[{token}] = {q[h, query_idx]}")
            steps = (getattr(trace, name)[h, query_idx] for name in ("scaled", "bias", "scores"))
            for name, scaled, added, score in zip(tokens, *steps, strict=True):
                shown = f"penalty = -{abs(added):.4f}  alibi = {score:.4f}"
                print(f"  score[{name}] = {scaled:.4f}  {shown}")
            print(f"  softmax = {np.round(trace.weights[h, query_idx], 4)}")
            print(f"  output = {np.round(trace.output[h, query_idx], 4)}")

    def _heads(self, method: str, *matrices: npt.ArrayLike) -> list[npt.NDArray[Any]]:
        """Q, K and V as [n_heads, N, d_k]."""
        function = f"ALiBiAttention.{method}"
        arrays = [_values.real_array(function, n, x) for n, x in zip("QKV", matrices, strict=True)]
        for name, array in zip("QKV", arrays, strict=True):
            if array.ndim != 2 or array.shape != (len(arrays[0]), self.d_model):
                raise ValueError(
                    f"{function}: {name} must have shape [N, d_model = {self.d_model}], the same N"
                    f" for all, got {list(array.shape)}"
                )
        return [x.reshape(len(x), self.n_heads, self.d_k).swapaxes(0, 1) for x in arrays]
