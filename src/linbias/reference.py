"""The definition in code: attention, its gradients and its trace in NumPy, float64 inside.

Slow, plain, and the truth that every other implementation is tested against. Axis letters: B batch, T queries,
S keys, H query heads, G key/value heads, D key size, E value size.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from linbias._checks import Described, Problem, check, check_slope_values
from linbias.bias import bias, distances
from linbias.schedules import slopes

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    left: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    right: npt.ArrayLike | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Float64]:
    """Softmax attention whose scores fall linearly with distance (ALiBi).

    The last query stands at the last key, so query t has position p = t + S - T:

        score[t, s] = scale * (q[t] . k[s]) - left  * (p - s)    for s <= p
        score[t, s] = scale * (q[t] . k[s]) - right * (s - p)    for s >  p
        out[t] = sum over s of softmax(score[t])[s] * v[s]       lse[t] = log sum exp(score[t])

    With causal=True only keys s <= p take part. T=2, S=4 and T=4, S=2 (x = takes part):

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    A query that may see no key gives a row of zeros and lse = -inf. Query head h reads key/value head
    h // (H // G). Everything is computed in float64.

    Args:
        q: [..., H, T, D], any real dtype; leading axes are batch axes (none, one or more).
        k: [..., G, S, D]. H must be a multiple of G.
        v: [..., G, S, E].
        left: [H] or [B, H], at least 0, inf hides the side: slope towards earlier keys.
            None means `slopes(H)`; zeros mean no bias.
        causal: Hide the keys after the query. With False and right=None the bias is symmetric.
        right: Like left: slope towards later keys; needs causal=False.
        scale: Factor on q . k. None means D ** -0.5.
        return_lse: Also return lse.

    Returns:
        [..., H, T, E] in the dtype of q (float64 for integers); with return_lse also lse [..., H, T], float64.

    Raises:
        TypeError, ValueError: A shape, dtype or value breaks a rule above.

    Example:
        >>> q = k = np.zeros((1, 3, 2))
        >>> v = np.array([[[1.0], [2.0], [4.0]]])
        >>> attention(q, k, v, [0.0]).ravel().round(4).tolist()
        [1.0, 1.5, 2.3333]
        >>> attention(q, k, v, [np.inf]).ravel().tolist()
        [1.0, 2.0, 4.0]

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3.
    """
    call = _prepare("attention", q, k, v, left, right, causal, scale)
    trace = _trace(call)
    out = call.restore(trace.out).astype(call.dtype)
    return (out, call.restore(trace.lse)) if return_lse else out


class Gradients(NamedTuple):
    """Gradients in the shapes of the arguments, float64; `dright` is None for causal attention."""

    dq: Float64
    dk: Float64
    dv: Float64
    dleft: Float64
    dright: Float64 | None


def attention_backward(
    dout: npt.ArrayLike,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    left: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    right: npt.ArrayLike | None = None,
    scale: float | None = None,
    dlse: npt.ArrayLike | None = None,
) -> Gradients:
    """Differentiate `attention`, written out by hand as the kernels do it.

    With the weights P = softmax(score) and dP = dout v^T:

        dscore = P * (dP - sum(dout * out) + dlse)
        dq = scale * dscore k      dk = scale * dscore^T q      dv = P^T dout
        dleft = -sum dscore * (p - s) over s < p,   dright = -sum dscore * (s - p) over s > p

    The gradient of an infinite slope is 0. With causal=False and right=None, the one slope of both sides has
    the gradient dleft + dright.

    Args:
        dout: [..., H, T, E], gradient of the loss with respect to the output.
        q, k, v, left, causal, right, scale: As for `attention`.
        dlse: [..., H, T], gradient with respect to lse; None means zeros.

    Returns:
        dq, dk, dv, dleft, dright.

    Raises:
        TypeError, ValueError: As `attention`; or dout has another shape than the output.

    Example:
        >>> q = k = v = np.ones((1, 2, 1))
        >>> attention_backward(np.ones((1, 2, 1)), q, k, v, [0.0]).dv.ravel().tolist()
        [1.5, 0.5]
    """
    call = _prepare("attention_backward", q, k, v, left, right, causal, scale)
    out_shape = (*call.batch, *call.q.shape[1:3], call.v.shape[3])
    dout = np.asarray(dout, dtype=np.float64)
    if dout.shape != out_shape:
        raise ValueError(
            f"attention_backward: dout must have shape {list(out_shape)}, got {list(dout.shape)}"
        )
    trace = _trace(call)
    dout = dout.reshape(trace.out.shape)
    dlse = np.zeros_like(trace.lse) if dlse is None else np.reshape(dlse, trace.lse.shape)
    delta = (dout * trace.out).sum(-1) - dlse
    dscore = trace.weight * (dout @ call.expand(call.v).swapaxes(-1, -2) - delta[..., None])
    distance = distances(*dscore.shape[-2:])
    dslope = -dscore * np.abs(distance)
    return Gradients(
        dq=call.restore(call.scale * dscore @ call.expand(call.k)),
        dk=call.restore(call.collect(call.scale * dscore.swapaxes(-1, -2) @ call.q)),
        dv=call.restore(call.collect(trace.weight.swapaxes(-1, -2) @ dout)),
        dleft=call.sum_slope(np.where(distance > 0, dslope, 0.0), call.left),
        dright=None if causal else call.sum_slope(np.where(distance < 0, dslope, 0.0), call.right),
    )


@dataclass(frozen=True)
class Explanation:
    """Every step of attention for every head, query and key. Made by `explain`.

    Attributes:
        raw: [..., H, T, S], q . k.
        scaled: [..., H, T, S], scale * raw.
        penalty: [..., H, T, S], what the bias takes away: slope * distance, inf where hidden.
        biased: [..., H, T, S], scaled - penalty: the score that softmax sees.
        weight: [..., H, T, S], softmax(biased).
        output: [..., H, T, E], weight @ v.
        lse: [..., H, T].
        left, right: [H] or [B, H], the slopes (right is inf for causal attention).
    """

    raw: Float64
    scaled: Float64
    penalty: Float64
    biased: Float64
    weight: Float64
    output: Float64
    lse: Float64
    left: Float64
    right: Float64

    def table(
        self, query: int = -1, head: int | None = None, tokens: list[str] | None = None
    ) -> str:
        """Write one query's trace as text, a block per head.

        Args:
            query: Index of the query, negative from the end.
            head: Only this head; None means all.
            tokens: S names for the keys; None means their index.

        Raises:
            ValueError: There is a batch axis, or tokens has another length than the keys.
            IndexError: query or head is out of range.
        """
        if self.biased.ndim != 3:
            raise ValueError(f"table: needs arrays without a batch axis, got {self.biased.shape}")
        H, T, S = self.biased.shape
        names = [str(s) for s in range(S)] if tokens is None else [str(token) for token in tokens]
        if len(names) != S:
            raise ValueError(f"table: tokens must name the {S} keys, got {len(names)}")
        query = range(T)[query]
        width = max([3, *map(len, names)])
        lines = []
        for h in range(H) if head is None else [range(H)[head]]:
            left, right = self.left[..., h], self.right[..., h]
            slope = (
                f"slope {left:g}"
                if left == right or np.isinf(right)
                else f"slopes {left:g}, {right:g}"
            )
            position = query + S - T
            label = names[position] if 0 <= position < S else f"position {position}"
            lines.append(f"head {h} ({slope}), query {label}")
            lines.append(f"  {'key':<{width}}      q.k   scaled  penalty   biased   weight")
            steps = (self.raw, self.scaled, self.penalty, self.biased, self.weight)
            for s in range(S):
                numbers = "".join(f"{step[h, query, s]:9.4f}" for step in steps)
                lines.append(f"  {names[s]:<{width}}{numbers}")
            values = " ".join(f"{value:.4f}" for value in self.output[h, query])
            lines.append(f"  output [{values}]")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return every array as nested lists, ready for JSON but for inf (hidden keys)."""
        return {name: getattr(self, name).tolist() for name in self.__dataclass_fields__}


def explain(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    left: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    right: npt.ArrayLike | None = None,
    scale: float | None = None,
) -> Explanation:
    """Compute `attention` and keep every step on the way.

    Args:
        q, k, v, left, causal, right, scale: As for `attention`.

    Returns:
        An `Explanation`: arrays per head, query and key, and `table()` to read them.

    Raises:
        TypeError, ValueError: As `attention`.

    Example:
        >>> trace = explain(np.zeros((1, 2, 1)), np.zeros((1, 2, 1)), np.ones((1, 2, 1)), [0.5])
        >>> print(trace.table())
        head 0 (slope 0.5), query 1
          key      q.k   scaled  penalty   biased   weight
          0     0.0000   0.0000   0.5000  -0.5000   0.3775
          1     0.0000   0.0000   0.0000   0.0000   0.6225
          output [1.0000]

    Source: the step-by-step trace of the book chapter among the project's seed documents.
    """
    call = _prepare("explain", q, k, v, left, right, causal, scale)
    trace = _trace(call)
    steps = {name: call.restore(getattr(trace, name)) for name in _Trace._fields if name != "out"}
    return Explanation(**steps, output=call.restore(trace.out), left=call.left, right=call.right)


class _Trace(NamedTuple):
    raw: Float64
    scaled: Float64
    penalty: Float64
    biased: Float64
    weight: Float64
    lse: Float64
    out: Float64


def _trace(call: "_Prepared") -> _Trace:
    raw = call.q @ call.expand(call.k).swapaxes(-1, -2)
    scaled = call.scale * raw
    penalty = 0.0 - bias(call.left, raw.shape[-2], raw.shape[-1], right=call.right)
    biased = np.where(np.isposinf(penalty), -np.inf, scaled - penalty)
    # An empty row has no maximum; any finite pivot gives it weights and a sum of exactly 0.
    row_max = biased.max(-1, keepdims=True, initial=-np.inf)
    pivot = np.where(np.isneginf(row_max), 0.0, row_max)
    unnormalised = np.exp(biased - pivot)
    row_sum = unnormalised.sum(-1, keepdims=True)
    weight = unnormalised / np.where(row_sum == 0, 1.0, row_sum)
    with np.errstate(divide="ignore"):
        lse = (pivot + np.log(row_sum))[..., 0]
    return _Trace(
        raw,
        scaled,
        np.broadcast_to(penalty, raw.shape),
        biased,
        weight,
        lse,
        weight @ call.expand(call.v),
    )


@dataclass(frozen=True)
class _Prepared:
    """Checked arguments as [B, heads, length, size] in float64."""

    q: Float64
    k: Float64
    v: Float64
    left: Float64
    right: Float64
    scale: float
    batch: tuple[int, ...]
    dtype: np.dtype[Any]

    def expand(self, array: Float64) -> Float64:
        """[B, G, ...] -> [B, H, ...]: query head h reads key/value head h // (H // G)."""
        return np.repeat(array, self.q.shape[1] // max(1, array.shape[1]), axis=1)

    def collect(self, array: Float64) -> Float64:
        """[B, H, ...] -> [B, G, ...]: the transpose of `expand`."""
        B, H, *rest = array.shape
        G = self.k.shape[1]
        return array.reshape(B, G, H // max(1, G), *rest).sum(2)

    def restore(self, array: Float64) -> Float64:
        return array.reshape(*self.batch, *array.shape[1:])

    def sum_slope(self, dslope: Float64, slope: Float64) -> Float64:
        """Sum over all that share a slope; an infinite slope has no gradient."""
        total = dslope.sum((-1, -2))
        return np.where(np.isinf(slope), 0.0, total if slope.ndim == 2 else total.sum(0))


def _prepare(
    function: str,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    left: npt.ArrayLike | None,
    right: npt.ArrayLike | None,
    causal: bool,
    scale: float | None,
) -> _Prepared:
    arrays = []
    for name, argument in (("q", q), ("k", k), ("v", v)):
        array = np.asarray(argument)
        if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
            raise TypeError(f"{function}: {name} must hold real numbers, got {array.dtype}")
        if array.ndim < 3:
            raise ValueError(
                f"{function}: {name} must have at least 3 axes, heads, length, size, got {list(array.shape)}"
            )
        arrays.append(array)
    dtype = arrays[0].dtype if arrays[0].dtype.kind not in "iu" else np.dtype(np.float64)
    batch = arrays[0].shape[:-3]
    for name, array in zip("kv", arrays[1:], strict=True):
        if array.shape[:-3] != batch:
            raise ValueError(
                f"{function}: {name} has batch axes {list(array.shape[:-3])} but q has {list(batch)}"
            )
    B = math.prod(batch)
    q, k, v = (array.reshape(B, *array.shape[-3:]).astype(np.float64) for array in arrays)
    left = slopes(q.shape[1]) if left is None else np.asarray(left, dtype=np.float64)
    given_right = None if right is None else np.asarray(right, dtype=np.float64)
    sizes: Problem = check(
        function,
        Described(q.shape, "float64"),
        Described(k.shape, "float64"),
        Described(v.shape, "float64"),
        left=Described(left.shape, "float64"),
        right=None if given_right is None else Described(given_right.shape, "float64"),
        causal=causal,
        scale=scale,
    )
    if given_right is None:
        right = np.full_like(left, np.inf) if causal else left
    else:
        right = given_right
    check_slope_values(function, "left", left)
    check_slope_values(function, "right", right)
    left, right = np.broadcast_arrays(left, right)
    return _Prepared(q, k, v, left, right, sizes.scale, batch, dtype)
