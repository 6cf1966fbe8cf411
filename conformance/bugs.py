"""What attention with linear biases gives when it has one of the known bugs.

Each bug changes one thing of the definition: the bias that is added, what a query may see, or an
argument. All of them were found in released code or reported against it (docs/faq.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import linbias

Array = npt.NDArray[np.float64]
Answer = tuple[Array, Array]  # out [B, H, T, D], lse [B, H, T]


@dataclass(frozen=True)
class Call:
    """A call of attention with nothing left open: one number for each batch row and head."""

    q: Array  # [B, H, T, D]
    k: Array  # [B, G, S, D]
    v: Array  # [B, G, S, D]
    slopes: Array  # [B, H]
    right_slopes: Array  # [B, H]; inf: causal
    scale: float
    query_start: npt.NDArray[np.int64]  # [B]
    key_range: npt.NDArray[np.int64]  # [B, 2]
    segments: npt.NDArray[np.int64]  # [B, S], all 0 where nothing is packed

    @property
    def H(self) -> int:
        return self.q.shape[1]

    @property
    def slope(self) -> Array:
        """[B, H, 1, 1]: the slopes towards earlier keys."""
        return self.slopes[..., None, None]

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """[S]: the keys' positions."""
        return np.arange(self.k.shape[2])

    @property
    def distance(self) -> npt.NDArray[np.int64]:
        """[B, 1, T, S]: position of the query minus that of the key."""
        position = self.query_start[:, None] + np.arange(self.q.shape[2])
        return (position[..., None] - self.keys)[:, None]

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """[B, 1, T, S]: the key is no padding, and of the query's own text."""
        inside = (self.keys >= self.key_range[:, :1]) & (self.keys < self.key_range[:, 1:])
        real = inside[:, None].repeat(self.q.shape[2], 1)
        if self.segments.any():
            real &= self.segments[:, :, None] == self.segments[:, None]
        return real[:, None]

    @property
    def bias(self) -> Array:
        """[B, H, T, S]: the definition's, -inf where a side is hidden."""
        slope = np.where(self.distance > 0, self.slope, self.right_slopes[..., None, None])
        return -np.where(self.distance == 0, 0.0, slope) * np.abs(self.distance)

    @property
    def products(self) -> Array:
        """[B, H, T, S]: scaled products of queries and keys."""
        k = np.repeat(self.k, self.H // self.k.shape[1], 1)
        return self.scale * (self.q @ k.swapaxes(-1, -2))

    @property
    def values(self) -> Array:
        """[B, H, S, D]: those that each query head reads."""
        return np.repeat(self.v, self.H // self.v.shape[1], 1)

    def attend(self, bias: Array | None = None) -> Answer:
        """Add this bias, or the definition's, to the scaled products of queries and keys."""
        bias = np.where(self.real, self.bias if bias is None else bias, -np.inf)
        options = {"causal": False, "scale": self.scale, "mask": bias, "return_lse": True}
        return linbias.attention(self.q, self.k, self.v, np.zeros(self.H), **options)

    def attend_seen(self, bias: Array | float) -> Answer:
        """Add this bias where the definition lets a query see a key."""
        return self.attend(np.where(np.isneginf(self.bias), -np.inf, bias))

    def change(self, **fields: Any) -> Answer:
        """Answer for other arrays; what is smaller stands for all batch rows and heads."""
        filled = {n: np.broadcast_to(x, np.shape(getattr(self, n))) for n, x in fields.items()}
        return replace(self, **filled).attend()

    def with_slopes(self, slopes: Array) -> Answer:
        """Answer with these slopes on each side that is not hidden."""
        right = np.where(np.isinf(self.right_slopes), np.inf, slopes)
        return self.change(slopes=slopes, right_slopes=right)


def bfloat16(x: Array) -> Array:
    """Round to 8 significant bits, to even, which is bfloat16 without its limits."""
    fraction, exponent = np.frexp(x)
    return np.where(np.isfinite(x), np.ldexp(np.round(fraction * 256), exponent - 8), x)


def float16(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(float)


def bias_after_softmax(call: Call) -> Answer:
    hidden = ~call.real | np.isneginf(call.bias)
    scores = np.where(hidden, -np.inf, call.products)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights + np.where(hidden, 0.0, call.bias)) @ call.values, call.attend()[1]


def own_position_hidden(call: Call) -> Answer:
    blind = np.isinf(call.slope) | np.isinf(call.right_slopes[..., None, None])
    return call.attend(np.where((call.distance == 0) & blind, -np.inf, call.bias))


def hidden_by_10_000(call: Call) -> Answer:
    bias = np.where(call.real, call.bias, -np.inf)
    everything = np.broadcast_to([0, len(call.keys)], call.key_range.shape)
    return replace(call, key_range=everything).attend(np.maximum(bias, -1e4))


def empty_row(call: Call, out: Array | float, lse: float) -> Answer:
    """Answer with these where a query sees no key."""
    right_out, right_lse = call.attend()
    empty = np.isneginf(right_lse)
    return np.where(empty[..., None], out, right_out), np.where(empty, lse, right_lse)


def grouped_heads_in_the_wrong_order(call: Call) -> Answer:
    order = np.arange(call.H) % call.k.shape[1]
    return replace(call, k=call.k[:, order], v=call.v[:, order]).attend()


def lse_less_the_maximum(call: Call) -> Answer:
    out, lse = call.attend()
    scores = np.where(call.real, call.products + call.bias, -np.inf)
    return out, lse - np.maximum(scores.max(-1), -1e300)


def exponentials_without_the_maximum(call: Call) -> Answer:
    scores = call.products + np.where(call.real, call.bias, -np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(scores.astype(np.float32))
        out = weights @ call.values / weights.sum(-1, keepdims=True)
        return out, np.log(weights.sum(-1))


BUGS: dict[str, Callable[[Call], Answer]] = {
    # The bias itself
    "sign turned": lambda call: call.attend_seen(-call.bias),
    "no bias": lambda call: call.attend_seen(0.0),
    "bias added twice": lambda call: call.attend(2 * call.bias),
    "future rewarded": lambda call: call.attend(-call.slope * call.distance),
    "bias after softmax": bias_after_softmax,
    "scores multiplied by bias": lambda call: call.attend_seen(
        call.products * (np.maximum(call.bias, -1e300) - 1)
    ),
    # Slopes
    "slopes of schedule paper": lambda call: call.with_slopes(linbias.slopes(call.H)),
    "slopes of schedule geometric": lambda call: call.with_slopes(
        linbias.slopes(call.H, "geometric")
    ),
    "steepest slope is 1": lambda call: call.with_slopes(np.exp2(-8 * np.arange(call.H) / call.H)),
    "slopes of half the heads, twice": lambda call: call.with_slopes(
        np.tile(linbias.slopes(call.H // 2), 2)
    ),
    "slopes in reverse order": lambda call: call.with_slopes(call.slopes[:, ::-1]),
    "slopes sorted": lambda call: call.with_slopes(-np.sort(-call.slopes)),
    "first batch row's slopes for all": lambda call: call.with_slopes(call.slopes[:1]),
    "zero slopes taken for absent ones": lambda call: call.with_slopes(linbias.slopes(call.H)),
    # Scale
    "bias inside the scale": lambda call: call.attend(call.scale * call.bias),
    "scale of the whole width": lambda call: replace(
        call, scale=call.scale / call.H**0.5
    ).attend(),
    "no scale": lambda call: replace(call, scale=1.0).attend(),
    # Positions
    "first query at the first key": lambda call: call.change(query_start=0),
    "query one position early": lambda call: call.change(query_start=call.query_start - 1),
    "query one position late": lambda call: call.change(query_start=call.query_start + 1),
    "query counted without padding, keys with it": lambda call: call.change(
        query_start=call.query_start - call.key_range[:, 0]
    ),
    "empty slots of the cache seen": lambda call: call.change(
        query_start=len(call.keys) - call.q.shape[2], key_range=[0, len(call.keys)]
    ),
    "last query at the last key that counts": lambda call: call.change(
        query_start=call.key_range[:, 1] - call.q.shape[2]
    ),
    "each query counted as position 0": lambda call: call.attend_seen(-call.slope * call.keys),
    "bias of the key's position": lambda call: call.attend_seen(call.slope * call.keys),
    # What is seen
    "future seen": lambda call: call.change(right_slopes=call.slopes),
    "causal although both sides are asked for": lambda call: call.change(right_slopes=np.inf),
    "padding seen": lambda call: call.change(key_range=[0, len(call.keys)]),
    "neighbours in a packed row seen": lambda call: call.change(segments=0),
    "sides swapped": lambda call: call.change(slopes=call.right_slopes, right_slopes=call.slopes),
    "left slopes on both sides": lambda call: call.change(right_slopes=call.slopes),
    "own position hidden": own_position_hidden,
    "hidden by -10,000": hidden_by_10_000,
    "empty row gives NaN": lambda call: empty_row(call, np.nan, np.nan),
    "empty row gives the mean of all values": lambda call: empty_row(
        call, call.values.mean(2, keepdims=True), -np.inf
    ),
    # Heads
    "grouped heads in the wrong order": grouped_heads_in_the_wrong_order,
    "slopes of the key heads, repeated": lambda call: call.with_slopes(
        np.repeat(linbias.slopes(call.k.shape[1]), call.H // call.k.shape[1])
    ),
    # lse
    "lse without the bias": lambda call: (call.attend()[0], call.attend_seen(0.0)[1]),
    "lse in base 2": lambda call: (call.attend()[0], call.attend()[1] / np.log(2)),
    "lse less the row's maximum": lse_less_the_maximum,
    # Precision
    "bias of the key's position in bfloat16": lambda call: call.attend_seen(
        bfloat16(call.slope * call.keys)
    ),
    "bias of the key's position in float16": lambda call: call.attend_seen(
        float16(call.slope * call.keys)
    ),
    "distances in float16": lambda call: call.attend_seen(
        -call.slope * float16(np.abs(call.distance))
    ),
    "distances in bfloat16": lambda call: call.attend_seen(
        -call.slope * bfloat16(np.abs(call.distance))
    ),
    "distances end at 2,048": lambda call: call.attend_seen(
        -call.slope * np.minimum(np.abs(call.distance), 2048)
    ),
    "exponentials without the row's maximum": exponentials_without_the_maximum,
}
