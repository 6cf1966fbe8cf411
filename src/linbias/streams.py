"""Streams: which keys a cache may drop whatever the text, as the weights of a model say.

A head with slope m cannot be moved, beyond rounding, by keys beyond its reach. No key that the
model can make leads a query's own key by more than `largest_lead`, so that a weight at distance d
is at most exp(lead - m d). The proof is in docs/math.md. Everything here is float64 and NumPy.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from linbias.definition import Float64

_UP = 1 + 1e-12  # more than the rounding of float64 sums


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
