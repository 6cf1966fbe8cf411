"""What attention with linear biases gives when it has one of the known bugs: the answers that
vectors must differ from.

Each bug changes one thing of the definition: the bias that is added, what a query may see, or an
argument. All of them were found in released code or reported against it (docs/faq.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    def distance(self) -> npt.NDArray[np.int64]:
        """[B, 1, T, S]: position of the query minus that of the key."""
        position = self.query_start[:, None] + np.arange(self.q.shape[2])
        return (position[..., None] - np.arange(self.k.shape[2]))[:, None]

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """[B, 1, T, S]: the key is no padding, and of the query's own text."""
        keys = np.arange(self.k.shape[2])
        inside = (keys >= self.key_range[:, :1]) & (keys < self.key_range[:, 1:])
        own = np.ones((len(self.q), self.q.shape[2], len(keys)), bool)
        if self.segments.any():
            own = self.segments[:, :, None] == self.segments[:, None]
        return (inside[:, None] & own)[:, None]

    def bias(self, distance: npt.NDArray[np.int64] | None = None) -> Array:
        """[B, H, T, S]: the definition's, -inf where a side is hidden."""
        distance = self.distance if distance is None else distance
        slope = np.where(
            distance > 0, *(x[..., None, None] for x in (self.slopes, self.right_slopes))
        )
        return -np.where(distance == 0, 0.0, slope) * np.abs(distance)

    def attend(self, bias: Array | None = None) -> Answer:
        """Add this bias, or the definition's, to the scaled products of queries and keys."""
        bias = np.where(self.real, self.bias() if bias is None else bias, -np.inf)
        options = {"causal": False, "scale": self.scale, "mask": bias, "return_lse": True}
        return linbias.attention(self.q, self.k, self.v, np.zeros(self.H), **options)


BUGS: dict[str, Callable[[Call], Answer]] = {}


def bug(name: str) -> Callable[[Callable[[Call], Answer]], Callable[[Call], Answer]]:
    def add(function: Callable[[Call], Answer]) -> Callable[[Call], Answer]:
        BUGS[name] = function
        return function

    return add


def seen(call: Call, bias: Array) -> Array:
    """This bias where the definition lets a query see a key, and -inf elsewhere."""
    return np.where(np.isneginf(call.bias()), -np.inf, bias)


def bfloat16(x: Array) -> Array:
    """Round to 8 significant bits, to even, which is bfloat16 without its limits."""
    fraction, exponent = np.frexp(x)
    return np.where(np.isfinite(x), np.ldexp(np.round(fraction * 256), exponent - 8), x)


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def raw(call: Call) -> Array:
    """[B, H, T, S]: scaled products of queries and keys."""
    k = np.repeat(call.k, call.H // call.k.shape[1], 1)
    return call.scale * (call.q @ k.swapaxes(-1, -2))


def values(call: Call) -> Array:
    return np.repeat(call.v, call.H // call.v.shape[1], 1)


# The bias itself


@bug("sign turned")
def _(call: Call) -> Answer:
    return call.attend(seen(call, -call.bias()))


@bug("no bias")
def _(call: Call) -> Answer:
    return call.attend(seen(call, np.zeros_like(call.bias())))


@bug("bias added twice")
def _(call: Call) -> Answer:
    return call.attend(2 * call.bias())


@bug("future rewarded")
def _(call: Call) -> Answer:
    return call.attend(-call.slopes[..., None, None] * call.distance)


@bug("bias after softmax")
def _(call: Call) -> Answer:
    bias = call.bias()
    hidden = np.isneginf(np.where(call.real, bias, -np.inf))
    weights = softmax(np.where(hidden, -np.inf, raw(call))) + np.where(hidden, 0.0, bias)
    return weights @ values(call), call.attend()[1]


@bug("scores multiplied by bias")
def _(call: Call) -> Answer:
    return call.attend(
        seen(call, raw(call) * (np.where(np.isneginf(call.bias()), 0.0, call.bias()) - 1))
    )


# Slopes


def with_slopes(call: Call, slopes: Array) -> Answer:
    right = np.where(np.isinf(call.right_slopes), np.inf, slopes)
    return replace(
        call, slopes=np.broadcast_to(slopes, call.slopes.shape), right_slopes=right
    ).attend()


for _schedule in ("paper", "geometric"):
    BUGS[f"slopes of schedule {_schedule}"] = lambda call, schedule=_schedule: with_slopes(
        call, linbias.slopes(call.H, schedule)
    )


@bug("steepest slope is 1")
def _(call: Call) -> Answer:
    return with_slopes(call, np.exp2(-8 * np.arange(call.H) / call.H))


@bug("slopes of half the heads, twice")
def _(call: Call) -> Answer:
    return with_slopes(call, np.tile(linbias.slopes(call.H // 2), 2))


@bug("slopes in reverse order")
def _(call: Call) -> Answer:
    return with_slopes(call, call.slopes[:, ::-1])


@bug("slopes sorted")
def _(call: Call) -> Answer:
    return with_slopes(call, -np.sort(-call.slopes))


@bug("first batch row's slopes for all")
def _(call: Call) -> Answer:
    return with_slopes(call, call.slopes[:1])


@bug("zero slopes taken for absent ones")
def _(call: Call) -> Answer:
    return with_slopes(call, linbias.slopes(call.H))


# Scale


@bug("bias inside the scale")
def _(call: Call) -> Answer:
    return call.attend(call.scale * call.bias())


@bug("scale of the whole width")
def _(call: Call) -> Answer:
    return replace(call, scale=call.scale / call.H**0.5).attend()


@bug("no scale")
def _(call: Call) -> Answer:
    return replace(call, scale=1.0).attend()


# Positions


@bug("first query at the first key")
def _(call: Call) -> Answer:
    return replace(call, query_start=np.zeros_like(call.query_start)).attend()


@bug("query one position early")
def _(call: Call) -> Answer:
    return replace(call, query_start=call.query_start - 1).attend()


@bug("query one position late")
def _(call: Call) -> Answer:
    return replace(call, query_start=call.query_start + 1).attend()


@bug("query counted without padding, keys with it")
def _(call: Call) -> Answer:
    return replace(call, query_start=call.query_start - call.key_range[:, 0]).attend()


@bug("empty slots of the cache seen")
def _(call: Call) -> Answer:
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    whole = np.array([[0, S]] * B)
    return replace(call, query_start=np.full(B, S - T), key_range=whole).attend()


@bug("last query at the last key that counts")
def _(call: Call) -> Answer:
    return replace(call, query_start=call.key_range[:, 1] - call.q.shape[2]).attend()


@bug("each query counted as position 0")
def _(call: Call) -> Answer:
    keys = np.arange(call.k.shape[2])
    return call.attend(seen(call, -call.slopes[..., None, None] * keys))


@bug("bias of the key's position")
def _(call: Call) -> Answer:
    keys = np.arange(call.k.shape[2])
    return call.attend(seen(call, call.slopes[..., None, None] * keys))


# What is seen


@bug("future seen")
def _(call: Call) -> Answer:
    return replace(call, right_slopes=call.slopes).attend()


@bug("causal although both sides are asked for")
def _(call: Call) -> Answer:
    return replace(call, right_slopes=np.full_like(call.slopes, np.inf)).attend()


@bug("padding seen")
def _(call: Call) -> Answer:
    whole = np.array([0, call.k.shape[2]])
    return replace(call, key_range=np.broadcast_to(whole, call.key_range.shape)).attend()


@bug("neighbours in a packed row seen")
def _(call: Call) -> Answer:
    return replace(call, segments=np.zeros_like(call.segments)).attend()


@bug("sides swapped")
def _(call: Call) -> Answer:
    return replace(call, slopes=call.right_slopes, right_slopes=call.slopes).attend()


@bug("left slopes on both sides")
def _(call: Call) -> Answer:
    return replace(call, right_slopes=call.slopes).attend()


@bug("own position hidden")
def _(call: Call) -> Answer:
    blind = np.isinf(call.slopes) | np.isinf(call.right_slopes)
    return call.attend(
        np.where((call.distance == 0) & blind[..., None, None], -np.inf, call.bias())
    )


@bug("hidden by -10,000")
def _(call: Call) -> Answer:
    bias = np.where(call.real, call.bias(), -np.inf)
    return replace(call, key_range=np.array([[0, call.k.shape[2]]] * len(call.q))).attend(
        np.where(np.isneginf(bias), -1e4, bias)
    )


@bug("empty row gives NaN")
def _(call: Call) -> Answer:
    out, lse = call.attend()
    empty = np.isneginf(lse)
    return np.where(empty[..., None], np.nan, out), np.where(empty, np.nan, lse)


@bug("empty row gives the mean of all values")
def _(call: Call) -> Answer:
    out, lse = call.attend()
    mean = values(call).mean(2, keepdims=True)
    return np.where(np.isneginf(lse)[..., None], mean, out), lse


# Heads


@bug("grouped heads in the wrong order")
def _(call: Call) -> Answer:
    order = np.arange(call.H) % call.k.shape[1]
    return replace(call, k=call.k[:, order], v=call.v[:, order]).attend()


@bug("slopes of the key heads, repeated")
def _(call: Call) -> Answer:
    G = call.k.shape[1]
    return with_slopes(call, np.repeat(linbias.slopes(G), call.H // G))


# lse


@bug("lse without the bias")
def _(call: Call) -> Answer:
    return call.attend()[0], call.attend(seen(call, np.zeros_like(call.bias())))[1]


@bug("lse in base 2")
def _(call: Call) -> Answer:
    out, lse = call.attend()
    return out, lse / np.log(2)


@bug("lse less the row's maximum")
def _(call: Call) -> Answer:
    out, lse = call.attend()
    scores = np.where(call.real, raw(call) + call.bias(), -np.inf)
    return out, lse - np.maximum(scores.max(-1), -1e300)


# Precision


@bug("bias of the key's position in bfloat16")
def _(call: Call) -> Answer:
    keys = np.arange(call.k.shape[2])
    return call.attend(seen(call, bfloat16(call.slopes[..., None, None] * keys)))


@bug("bias of the key's position in float16")
def _(call: Call) -> Answer:
    keys = np.arange(call.k.shape[2])
    product = (call.slopes[..., None, None] * keys).astype(np.float16)
    return call.attend(seen(call, product.astype(float)))


@bug("distances in float16")
def _(call: Call) -> Answer:
    with np.errstate(over="ignore"):
        distance = np.abs(call.distance).astype(np.float16).astype(float)
    return call.attend(seen(call, -call.slopes[..., None, None] * distance))


@bug("distances in bfloat16")
def _(call: Call) -> Answer:
    distance = bfloat16(np.abs(call.distance).astype(float))
    return call.attend(seen(call, -call.slopes[..., None, None] * distance))


@bug("distances end at 2,048")
def _(call: Call) -> Answer:
    distance = np.minimum(np.abs(call.distance), 2048)
    return call.attend(seen(call, -call.slopes[..., None, None] * distance))


@bug("exponentials without the row's maximum")
def _(call: Call) -> Answer:
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(
            (raw(call) + np.where(call.real, call.bias(), -np.inf)).astype(np.float32)
        )
        out = weights @ values(call) / weights.sum(-1, keepdims=True)
        return out, np.log(weights.sum(-1))
