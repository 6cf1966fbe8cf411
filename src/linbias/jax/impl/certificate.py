"""When may a head stop? The bound on everything that it has not visited (derived in docs/math.md).

A key at distance d on a side with slope m has, for a fixed vector c,

    score <= a - m * d        a = scale * q . c + |scale| * |q| * max |k_s - c|

so that all keys from distance d outwards together weigh at most

    exp(a - m * d) * min(number of them, 1 / (1 - exp(-m)))

or, where keys have positions, with the exp of `log_sums` at the nearest for the minimum. A side is
left when for every row that is at most `tolerance` times its sum over the keys visited (half of it
each, where two sides are open). c is the mean key; the maximum runs over the keys not visited.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from linbias._request import log_share
from linbias.jax import standing
from linbias.jax.impl.tiles import LEFT, Head, Side


@dataclass(frozen=True)
class Certificate:
    """What the bound needs of one head. A key or value that is not finite is never left out."""

    head: Head
    base: Array  # [B, tiles, rows]: the part of a that no key changes
    q_norm: Array  # [B, tiles, rows]: |scale| * |q|, rounded up
    radius: tuple[Array, Array]  # [B, padded keys]: max |k - c| up to a key, and from it on
    log_sums: tuple[Array | None, Array | None]  # [B, padded keys]; None where keys are counted
    log_share: float
    slack: float

    @classmethod
    def prepare(cls, head: Head, tolerance: float) -> "Certificate":
        q, k, v, seen = head.q, head.k, head.v, head.seen
        # Relative rounding of norms, of dot products over D terms, and of the scores in the sums.
        slack = (k.shape[-1] + 8) * float(jnp.finfo(k.dtype).eps)  # eps is twice the unit roundoff
        count = jnp.maximum(seen.sum(1), 1)[:, None].astype(k.dtype)
        center = k.sum(1) / count
        radius = norm(k - center[:, None]) * (1 + slack) + 0 * v.sum(-1)
        radius = jnp.where(seen, radius, 0)
        q_norm = norm(q) * (1 + slack)
        largest = norm(center) + radius.max(1)
        aligned = jnp.einsum("btrd,bd->btr", q, center, precision=lax.Precision.HIGHEST)
        base = aligned + slack * (q_norm * largest[:, None, None])
        share = tolerance if head.right is None else tolerance / 2
        radii = lax.cummax(radius, axis=1), lax.cummax(radius, axis=1, reverse=True)
        to_left = to_right = None
        if head.stands is not None:
            x, inside = head.stands[1], head.tiles.inside(*head.key_range)
            to_left = log_sums(x, inside, head.left[..., 0, 0])
            if head.right is not None:
                mirrored = log_sums(-x[:, ::-1], inside[:, ::-1], head.right[..., 0, 0])
                to_right = mirrored[:, ::-1]
        return cls(head, base, q_norm, radii, (to_left, to_right), log_share(share), slack)

    def covers(self, side: Side, step: Array, lse: Array) -> Array:
        """Say whether the head may leave out the band of this step and all further outwards.

        lse [B, tiles, rows] is that over the keys visited. A comparison with NaN is False: what
        has no bound is visited.
        """
        head, band, to_left = self.head, side.band(step), side.direction == LEFT
        tiles, (first, end), sums = head.tiles, head.key_range, self.log_sums[not to_left]
        radius, slope = self.radius[not to_left], head.left if to_left else head.right
        assert slope is not None  # nothing lies to the right of a causal row
        slope = slope[..., 0]
        lowest = tiles.first_keys(band)
        # The nearest key of each tile's block, and how many there are from it outwards.
        nearest = lowest + tiles.block - 1 if to_left else lowest
        count = (nearest + 1 - first[:, None]) if to_left else (end[:, None] - nearest)
        nearest = jnp.clip(nearest, first[:, None], end[:, None] - 1)
        padded = jnp.clip(nearest + tiles.band_keys, 0, radius.shape[1] - 1)
        padded = jnp.broadcast_to(padded, (radius.shape[0], tiles.num_tiles))
        radius = jnp.take_along_axis(radius, padded, axis=1)[..., None]
        if head.stands is None or sums is None:
            offset = band * tiles.block + (tiles.block - 1 if to_left else 0)
            distance = jnp.abs(tiles.offsets() - offset[:, None, None]).astype(lse.dtype)
            log_sum = jnp.log(jnp.maximum(count, 1).astype(lse.dtype))[..., None]
            log_sum = jnp.minimum(-jnp.log(-jnp.expm1(-slope)), log_sum)
        else:
            xq, x = head.stands
            x = jnp.take_along_axis(x, padded[..., None], axis=1)[..., None, :]
            distance = jnp.abs(standing.distance(xq, x)[..., 0]).astype(lse.dtype)
            log_sum = jnp.take_along_axis(sums, padded, axis=1)[..., None]
        tail = self.base + self.q_norm * radius - slope * distance * (1 - self.slack) + log_sum
        small = (tail <= self.log_share + lse) & (slope > 0)
        # Nothing is there, nothing is seen there, or the row is padding.
        nothing = (count <= 0)[..., None] | jnp.isinf(slope) | (tiles.row_numbers() < 0)
        if head.row_range is not None:
            first, end = head.row_range
            beyond = first > nearest[..., None] if to_left else end <= nearest[..., None]
            nothing = nothing | beyond | (first >= end)
        return (small | nothing).all()


def log_sums(x: Array, inside: Array, slope: Array) -> Array:
    """Bound `near_to_far.log_sums` from above: log of what the keys up to each key can weigh
    together, seen from it.

    x [B, keys, parts] never falls where inside [B or 1, keys]; slope [B, 1]. Two stretches of keys
    that follow each other, each of a length and a log of its weights seen from its end, make one:
    2 log2(keys) steps, whose rounding is added.
    """
    dtype = slope.dtype
    gap = (x[:, 1:] - x[:, :-1]).sum(-1).astype(dtype)
    both = inside[:, 1:] & inside[:, :-1]
    slope = jnp.where(jnp.isinf(slope), 0, slope)  # a hidden side is never read
    further = jnp.pad(jnp.where(both, slope * gap, 0), ((0, 0), (1, 0)))

    def join(near: tuple[Array, Array], far: tuple[Array, Array]) -> tuple[Array, Array]:
        return near[0] + far[0], jnp.logaddexp(near[1] - far[0], far[1])

    itself = jnp.broadcast_to(jnp.where(inside, 0, -jnp.inf).astype(dtype), further.shape)
    sums = lax.associative_scan(join, (further, itself), axis=1)[1]
    rounding = 128 * float(jnp.finfo(dtype).eps)
    return sums + rounding * (1 + jnp.maximum(sums, 0))


def norm(x: Array) -> Array:
    """Lengths of [..., D], also where all squares would vanish; NaN for what is not finite."""
    largest = jnp.abs(x).max(-1, keepdims=True)
    return jnp.linalg.norm(x / jnp.where(largest == 0, 1, largest), axis=-1) * largest[..., 0]
