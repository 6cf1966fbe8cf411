"""Streams: which keys a cache may drop, and what is known of keys that were dropped.

A head with slope m cannot be moved, beyond rounding, by keys beyond its reach. Two answers to
how far that is:

    from the weights    whatever the text: no key that the model can make leads a query's own key
                        by more than `largest_lead`: a weight at distance d is at most
                        exp(lead - m d)
    from the keys       `Dropped`, a ledger of constant size: an upper bound on all weight that the
                        keys gone would have in a row

The proofs are in docs/math.md. Everything here is float64 and NumPy.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from linbias.definition import Float64

# Lengths |scale q| for which the ledger keeps a sum; between two of them the chord is a bound.
GRID = np.array([0.0, *2.0 ** np.arange(-4, 6.01, 0.5)])
SLACK = 1e-6  # more than the rounding of float32 norms
_UP = 1 + 1e-12  # likewise of float64 sums


def largest_lead(
    q_weight: npt.ArrayLike,
    k_weight: npt.ArrayLike,
    q_bias: npt.ArrayLike | None = None,
    *,
    radius: float,
    scale: float,
    centred: bool,
    related: bool = True,
) -> float:
    """Bound by how much a key's score without bias can lead that of the query's own key.

    With y the normed input at the query and z that at the key, q = F y + f and k = G z + g (g
    plays no part):

        lead = max over |y|, |z| <= radius of
               scale * q . (k - k_own) = scale * (F y + f) . G (z - y)

    The largest value over z is known in closed form; what remains is a quadratic form on a ball
    for each of a family of upper bounds, which its dual solves exactly. Every value that is tried
    is an upper bound, so none is too small.

    Args:
        q_weight, k_weight: [D, n], F and G: one head's projections, with the norm's weights
            multiplied into the columns.
        q_bias: [D], f: the query projection's bias and what it makes of the norm's; None is 0.
        radius: At least the norm of every normed input: sqrt(n) after layer norm and RMS norm.
        scale: Factor on q . k.
        centred: Whether the entries of normed inputs sum to 0, as after layer norm and not after
            RMS norm.
        related: Whether a query and its own key are made of one normed input. Not so where queries
            and keys have norms of their own, behind the projections: then F and G are those norms'
            weights, and the own key is any that there is.

    Returns:
        The lead in nats, at least 0; inf where a weight is not finite.

    Raises:
        ValueError: Shapes do not fit, or radius is negative or nan.

    Example:
        >>> F = G = np.diag([1.0, 2.0])  # the best key: half the query, on the other side
        >>> round(largest_lead(F, G, radius=1.0, scale=-1.0, centred=False), 6)
        8.0
    """
    F, G = np.asarray(q_weight, np.float64), np.asarray(k_weight, np.float64)
    f = np.zeros(len(F)) if q_bias is None else np.asarray(q_bias, np.float64)
    if F.ndim != 2 or F.shape != G.shape or f.shape != F.shape[:1]:
        raise ValueError(
            "largest_lead: q_weight and k_weight must have one shape [D, n], and q_bias [D],"
            f" got {F.shape}, {G.shape} and {f.shape}"
        )
    if not radius >= 0:
        raise ValueError(f"largest_lead: radius must be at least 0, got {radius}")
    if not (np.isfinite(F).all() and np.isfinite(G).all() and np.isfinite(f).all()):
        return math.inf
    if centred:
        F, G = F - F.mean(1, keepdims=True), G - G.mean(1, keepdims=True)
    # Nothing happens outside the directions that F and G see: at most 2 D of them.
    seen = np.linalg.qr(np.concatenate([F, G]).T)[0]
    F, G = scale * F @ seen, G @ seen
    C, b = F.T @ G, scale * G.T @ f  # lead = y'C z + b.z - y'C y - b.y
    size = np.linalg.norm(C, 2)
    if radius == 0 or size == 0:
        return 2 * radius * float(np.linalg.norm(b)) * _UP
    if not related:  # max over y of 2 radius |C'y + b|
        squared = _most_on_ball(C @ C.T, 2 * C @ b, radius) + float(b @ b)
        return 2 * radius * math.sqrt(max(0.0, squared)) * _UP

    # max over z: radius |C'y + b| <= radius^2 t / 2 + |C'y + b|^2 / (2 t) for every t > 0
    def bound(log_t: float) -> float:
        t = math.exp(log_t)
        quadratic = C @ C.T / (2 * t) - (C + C.T) / 2
        most = _most_on_ball(quadratic, C @ b / t - b, radius)
        return radius**2 * t / 2 + float(b @ b) / (2 * t) + most

    scale_of_t = size + float(np.linalg.norm(b)) / radius
    low, high = math.log(scale_of_t) - 8.0, math.log(scale_of_t) + 1.0
    return max(0.0, bound(_least(bound, low, high)) * _UP)


class Dropped:
    """What is known of a head's dropped keys: a bound on their weight, in constant memory.

    For lengths r of |scale q| on a fixed grid it keeps

        sums[r] = log sum over dropped keys s of exp(r |k_s - center| - slope * (at - s))

    which a key joins once and which falls by `slope` for every token since. As a function of r it
    is convex, so that between two lengths of the grid the chord is an upper bound, and beyond the
    last one the largest |k - center| is its steepest slope. A huge key is forgotten as its
    distance grows.

    Args:
        slope: At least 0.
        center: [D], any fixed vector: the bound is tight where keys lie around it.
        scale: Factor on q . k.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> q, k = rng.normal(size=(2, 1000, 16))
        >>> gone = Dropped(0.25, np.zeros(16), scale=0.25)
        >>> gone.add(k[:800], first=0)
        >>> scores = 0.25 * q[-1:] @ k.T - 0.25 * np.arange(999, -1, -1)
        >>> lse = np.logaddexp.reduce(scores[:, 800:], axis=1)
        >>> missing = np.logaddexp.reduce(scores[:, :800], axis=1) - lse
        >>> bool(missing[0] <= gone.bound(q[-1:], lse, [999])[0] <= math.log(2**-24))
        True
    """

    def __init__(self, slope: float, center: npt.ArrayLike, *, scale: float) -> None:
        self.slope, self.scale = float(slope), float(scale)
        if not 0 <= self.slope < math.inf:
            raise ValueError(f"Dropped: slope must be at least 0 and finite, got {slope}")
        self.center = np.array(center, np.float64)  # its own, whatever the caller does with theirs
        self.count = 0
        self.sums = np.full(len(GRID), -math.inf)
        self.largest = 0.0  # |k - center|
        self.at = 0  # the position from which the sums count distances

    def add(self, keys: npt.ArrayLike, first: int) -> None:
        """Take over keys that are dropped.

        Args:
            keys: [n, D], at positions first, first + 1, ...; a key that is not finite makes every
                later bound inf.
            first: At least the position after the last key that was dropped.

        Raises:
            ValueError: first lies before keys that are in the ledger.
        """
        keys = np.asarray(keys, np.float64)
        if first < self.at:
            raise ValueError(f"Dropped: first must be at least {self.at}, got {first}")
        if len(keys) == 0:
            return
        radius = np.linalg.norm(keys - self.center, axis=-1) * (1 + SLACK)
        radius = np.where(np.isfinite(radius), radius, math.inf)
        at = first + len(keys)
        behind = np.arange(len(keys), 0, -1)
        with np.errstate(invalid="ignore"):
            grown = np.where(np.isinf(radius), math.inf, GRID[:, None] * radius)
        new = np.logaddexp.reduce(grown - self.slope * behind, axis=1)
        self.sums = np.logaddexp(self.sums - self.slope * (at - self.at), new)
        self.largest = max(self.largest, float(radius.max()))
        self.at, self.count = at, self.count + len(keys)

    def bound(self, q: npt.ArrayLike, lse: npt.ArrayLike, positions: npt.ArrayLike) -> Float64:
        """Bound log(weight of the dropped keys / weight of the keys read), for each query row.

        Args:
            q: [T, D].
            lse: [T], log sum exp of the scores of the keys that were read.
            positions: [T], at or after all dropped keys.

        Returns:
            [T]; -inf where nothing was dropped. nan wherever q or lse is: compare so that it does
            not pass.
        """
        q, lse = np.asarray(q, np.float64), np.asarray(lse, np.float64)
        if self.count == 0:
            return np.full(len(q), -math.inf)
        length = abs(self.scale) * np.linalg.norm(q, axis=-1) * (1 + SLACK)
        right = np.clip(np.searchsorted(GRID, length), 1, len(GRID) - 1)
        low, high = GRID[right - 1], GRID[right]
        share = np.minimum((length - low) / (high - low), 1.0)
        if math.isinf(self.largest):
            return np.full(len(q), math.inf)
        most = (1 - share) * self.sums[right - 1] + share * self.sums[right]
        most += np.maximum(length - GRID[-1], 0.0) * self.largest
        since = np.asarray(positions, np.float64) - self.at
        return self.scale * q @ self.center + most - self.slope * since - lse


def _most_on_ball(M: Float64, b: Float64, radius: float) -> float:
    """At least max of y'M y + b.y over |y| <= radius, by its dual; no gap, as M is symmetric."""
    values, vectors = np.linalg.eigh(M)
    squares = (vectors.T @ b) ** 2
    low = max(0.0, float(values[-1]))
    room = max(abs(values[0]), abs(values[-1]), math.sqrt(squares.sum()) / radius, 1e-300)

    # x >= 0, values: max of y'M y + b.y <= x radius^2 + sum of squares / (4 (x - values)), convex
    def dual(log_x: float) -> float:
        x = low + math.exp(log_x)
        return x * radius**2 + float((squares / (x - values)).sum()) / 4

    # Where no part of b lies along the largest value, the least lies at the end x = low.
    start = math.log(room)
    return dual(_least(dual, start - 28.0, start + 3.0))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that falls and then rises is least, by golden section."""
    golden = (math.sqrt(5.0) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > 1e-4:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = function(b)
    return a if at_a < at_b else b
