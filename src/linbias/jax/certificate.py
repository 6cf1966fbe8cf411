"""When may a head stop? The bound on everything that it has not visited (derived in docs/math.md).

A key at distance d on a side with slope m has, for a fixed vector c,

    score <= a - m * d        a = scale * q . c + |scale| * |q| * max |k_s - c|    over the keys not yet visited

so that all keys from distance d outwards together weigh at most

    exp(a - m * d) * min(number of them, 1 / (1 - exp(-m)))

A side is left when that is at most `tolerance` times the row's sum over the keys visited so far (half of it
each, where two sides are open), for every row. c is the mean key; the maximum runs block by block from the nearest
unvisited one outwards.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from linbias.jax.operator import Numbers
from linbias.jax.tiles import Tiles


@dataclass(frozen=True)
class Certificate:
    """What the bound needs of one head.

    A key or value that is not finite gets an endless norm: it is never left out, and shows in the output as it
    would without a certificate.
    """

    tiles: Tiles
    base: Array  # [B, tiles, rows]: the part of a that no key changes
    q_norm: Array  # [B, tiles, rows]: |scale| * |q|, rounded up
    reach: tuple[
        Array, Array
    ]  # [B, padded blocks]: max |k - c| from a block outwards, to the left and to the right
    first: Array  # [B]: the first padded key that is seen
    slopes: tuple[Array, Array | None]  # [B, 1, 1]
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
        first: Array,
        slopes: tuple[Array, Array | None],
        numbers: Numbers,
    ) -> "Certificate":
        """Take q [B, tiles, rows, D] without scale, k, v [B, padded keys, size] with zeros where not seen."""
        # Relative rounding of norms, of dot products over D terms, and of the scores in the sums.
        slack = (k.shape[-1] + 8) * float(jnp.finfo(k.dtype).eps)  # eps is twice the unit roundoff
        count = jnp.maximum(seen.sum(1), 1)[:, None].astype(k.dtype)
        center = k.sum(1) / count
        radius = jnp.linalg.norm(k - center[:, None], axis=-1) * (1 + slack) + 0 * v.sum(-1)
        farthest = jnp.where(seen, radius, 0).reshape(len(k), -1, tiles.block).max(-1)
        reach = lax.cummax(farthest, axis=1), lax.cummax(farthest, axis=1, reverse=True)
        q_norm = jnp.linalg.norm(q, axis=-1) * abs(numbers.scale) * (1 + slack)
        largest = jnp.linalg.norm(center, axis=-1) + reach[1][:, 0]
        exact = lax.Precision.HIGHEST
        aligned = jnp.einsum("btrd,bd->btr", q, center, precision=exact) * numbers.scale
        base = aligned + slack * q_norm * largest[:, None, None]
        share = numbers.tolerance if slopes[1] is None else numbers.tolerance / 2
        log_share = math.log(share) if share else -math.inf
        sides = slopes[0][..., 0], None if slopes[1] is None else slopes[1][..., 0]
        return cls(tiles, base, q_norm, reach, first, sides, log_share, slack)

    def covered(self, band: Array, lse: Array) -> Array:
        """Say whether the head may leave out this band and all further outwards.

        Args:
            band: [], counted from the tile's own, negative to the left.
            lse: [B, tiles, rows], log of each row's sum over the keys visited.

        Returns:
            [], bool. A comparison with NaN is False: what cannot be bounded is visited.
        """
        to_right = band > 0
        left, right = self.slopes
        slope = left if right is None else jnp.where(to_right, right, left)
        tiles = self.tiles
        block = tiles.first_block(band) + jnp.arange(tiles.num_tiles)
        before = (block + 1) * tiles.block - self.first[:, None]
        after = jnp.broadcast_to(tiles.end - block * tiles.block, before.shape)
        count = jnp.where(to_right, after, before)[..., None]
        reach = jnp.where(to_right, self.reach[1], self.reach[0])
        reach = lax.dynamic_slice_in_dim(reach, tiles.first_block(band), tiles.num_tiles, axis=1)
        nearest = band * tiles.block + jnp.where(to_right, 0, tiles.block - 1)
        distance = jnp.abs(tiles.offsets() - nearest).astype(lse.dtype)
        log_count = jnp.log(jnp.maximum(count, 1).astype(lse.dtype))
        log_count = jnp.minimum(-jnp.log(-jnp.expm1(-slope)), log_count)
        best = self.base + self.q_norm * reach[..., None]
        tail = best - slope * distance * (1 - self.slack) + log_count
        small = (tail <= self.log_share + lse) & (slope > 0)
        # Nothing is there, nothing is seen there, or the row is padding.
        nothing = (count <= 0) | jnp.isinf(slope) | (tiles.queries() < 0)
        return (small | nothing).all()
