"""When may a head stop? The bound on everything that it has not visited (derived in docs/math.md).

A key at distance d on a side with slope m has, for a fixed vector c,

    score <= a - m * d        a = scale * q . c + |scale| * |q| * max |k_s - c|    over the keys not yet visited

so that all keys from distance d outwards together weigh at most

    exp(a - m * d) * min(number of them, 1 / (1 - exp(-m)))

or, where keys have positions, with the exp of `log_sums` at the nearest of them in the place of the minimum.

A side is left when that is at most `tolerance` times the row's sum over the keys visited so far (half of it
each, where two sides are open), for every row. c is the mean key; the maximum runs from the nearest unvisited key
outwards.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from linbias.jax import standing
from linbias.jax.impl.tiles import LEFT, Side, Tiles


@dataclass(frozen=True)
class Certificate:
    """What the bound needs of one head.

    A key or value that is not finite counts as infinitely far from c: it is never left out, and shows in the output
    as it would without a certificate.
    """

    tiles: Tiles
    base: Array  # [B, tiles, rows]: the part of a that no key changes
    q_norm: Array  # [B, tiles, rows]: |scale| * |q|, rounded up
    radius: tuple[Array, Array | None]  # [B, padded keys]: max |k - c| up to a key, and from it on
    key_range: tuple[Array, Array]  # [B or 1]: first, end
    slopes: tuple[Array, Array | None]  # [B, 1, 1]
    # Where queries stand [B, tiles, rows, parts] and keys [B, padded keys, parts]; None: key s at s.
    stands: tuple[Array, Array] | None
    log_sums: tuple[Array | None, Array | None]  # [B, padded keys]; None where keys are counted
    log_share: float
    slack: float

    @classmethod
    def prepare(
        cls,
        tiles: Tiles,
        q: Array,
        k: Array,
        v: Array,
        seen: Array,
        key_range: tuple[Array, Array],
        slopes: tuple[Array, Array | None],
        stands: tuple[Array, Array] | None,
        tolerance: float,
    ) -> "Certificate":
        """Take q [B, tiles, rows, D] times scale, k, v [B, padded keys, size] with zeros where not seen, slopes [B, 1, 1, 1]."""
        # Relative rounding of norms, of dot products over D terms, and of the scores in the sums.
        slack = (k.shape[-1] + 8) * float(jnp.finfo(k.dtype).eps)  # eps is twice the unit roundoff
        count = jnp.maximum(seen.sum(1), 1)[:, None].astype(k.dtype)
        center = k.sum(1) / count
        radius = norm(k - center[:, None]) * (1 + slack) + 0 * v.sum(-1)
        radius = jnp.where(seen, radius, 0)
        from_key_on = None if slopes[1] is None else lax.cummax(radius, axis=1, reverse=True)
        q_norm = norm(q) * (1 + slack)
        largest = norm(center) + radius.max(1)
        exact = lax.Precision.HIGHEST
        aligned = jnp.einsum("btrd,bd->btr", q, center, precision=exact)
        base = aligned + slack * (q_norm * largest[:, None, None])
        share = tolerance if slopes[1] is None else tolerance / 2
        log_share = math.log(share) if share else -math.inf
        sides = slopes[0][..., 0], None if slopes[1] is None else slopes[1][..., 0]
        radii = lax.cummax(radius, axis=1), from_key_on
        to_left = to_right = None
        if stands is not None:
            x, inside = stands[1], tiles.inside(*key_range)
            to_left = log_sums(x, inside, sides[0][..., 0])
            if sides[1] is not None:
                mirrored = log_sums(-x[:, ::-1], inside[:, ::-1], sides[1][..., 0])
                to_right = mirrored[:, ::-1]
        sums = to_left, to_right
        return cls(tiles, base, q_norm, radii, key_range, sides, stands, sums, log_share, slack)

    def covers(self, side: Side, step: Array, lse: Array) -> Array:
        """Say whether the head may leave out the band of this step and all further outwards.

        Args:
            side: Which one.
            step: [], counted from the side's nearest band.
            lse: [B, tiles, rows], log of each row's sum over the keys visited.

        Returns:
            [], bool. A comparison with NaN is False: what cannot be bounded is visited.
        """
        tiles, band, (first, end) = self.tiles, side.band(step), self.key_range
        to_left = side.direction == LEFT
        slope, radius = self.slopes[not to_left], self.radius[not to_left]
        sums = self.log_sums[not to_left]
        assert slope is not None and radius is not None, (
            "nothing lies to the right of a causal row"
        )
        lowest = tiles.first_keys(band)
        # The nearest key of each tile's block; how many there are from it outwards; how far away it is.
        nearest = lowest + tiles.block - 1 if to_left else lowest
        count = (nearest + 1 - first[:, None]) if to_left else (end[:, None] - nearest)
        nearest = jnp.clip(nearest, first[:, None], end[:, None] - 1)
        padded = jnp.clip(nearest + tiles.band_keys, 0, radius.shape[1] - 1)
        padded = jnp.broadcast_to(padded, (radius.shape[0], tiles.num_tiles))
        radius = jnp.take_along_axis(radius, padded, axis=1)[..., None]
        if self.stands is None or sums is None:
            offset = band * tiles.block + (tiles.block - 1 if to_left else 0)
            distance = jnp.abs(tiles.offsets() - offset[:, None, None]).astype(lse.dtype)
            log_sum = jnp.log(jnp.maximum(count, 1).astype(lse.dtype))[..., None]
            log_sum = jnp.minimum(-jnp.log(-jnp.expm1(-slope)), log_sum)
        else:
            xq, x = self.stands
            x = jnp.take_along_axis(x, padded[..., None], axis=1)[..., None, :]
            distance = jnp.abs(standing.distance(xq, x)[..., 0]).astype(lse.dtype)
            log_sum = jnp.take_along_axis(sums, padded, axis=1)[..., None]
        tail = self.base + self.q_norm * radius - slope * distance * (1 - self.slack) + log_sum
        small = (tail <= self.log_share + lse) & (slope > 0)
        # Nothing is there, nothing is seen there, or the row is padding.
        nothing = (count <= 0)[..., None] | jnp.isinf(slope) | (tiles.row_numbers() < 0)
        return (small | nothing).all()


def log_sums(x: Array, inside: Array, slope: Array) -> Array:
    """Bound `near_to_far.log_sums` from above: log of what the keys up to each key can weigh together, seen from it.

    A stretch of keys has a length, times the slope, and the log of the sum of its weights, seen from its end; two stretches that
    follow each other make one. So the scan is 2 log2(number of keys) deep, and the bound allows for what so many steps round.

    Args:
        x: [B, keys, parts], positions, never falling where inside.
        inside: [B or 1, keys], keys of the range.
        slope: [B, 1].
    """
    dtype = slope.dtype
    gap = (x[:, 1:] - x[:, :-1]).sum(-1).astype(dtype)
    both = inside[:, 1:] & inside[:, :-1]
    slope = jnp.where(jnp.isinf(slope), 0, slope)  # a hidden side is never read
    further = jnp.pad(jnp.where(both, slope * gap, 0), ((0, 0), (1, 0)))

    def join(near: tuple[Array, Array], far: tuple[Array, Array]) -> tuple[Array, Array]:
        return near[0] + far[0], jnp.logaddexp(near[1] - far[0], far[1])

    itself = jnp.broadcast_to(jnp.where(inside, 0, -jnp.inf).astype(dtype), further.shape)
    found = lax.associative_scan(join, (further, itself), axis=1)[1]
    rounding = 128 * float(jnp.finfo(dtype).eps)
    return found + rounding * (1 + jnp.maximum(found, 0))


def norm(x: Array) -> Array:
    """The length of [..., D], also where the squares of all entries would vanish; NaN for entries that are not finite."""
    largest = jnp.abs(x).max(-1, keepdims=True)
    return jnp.linalg.norm(x / jnp.where(largest == 0, 1, largest), axis=-1) * largest[..., 0]
