"""How queries and keys are cut: tiles of rows, and for each the blocks of keys on either side.

Rows are padded in front, so that the last one ends a tile. Band 0 gives every tile the block of
keys that ends where the tile's last row stands, band j the block that lies j blocks further right.
The blocks of one band follow each other, so that a band is one slice of the keys of a batch row:

    key        . . . . . . 0 1 2 3 4 5 6 7 8 9 . . . . . .     padding on either side
    band  0                    [tile 0][tile 1]                the last row stands at key 8
    band -1            [tile 0][tile 1]

Where the slice starts depends on `query_start` of the batch row, while distances within a band do
not. With a padding as wide as a band, one that lies beyond the keys can be moved until it touches
them: it still holds none.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from linbias.jax import standing
from linbias.jax.dropout import keep_mask
from linbias.jax.operator import Inputs

BLOCK = 256  # keys per block, and rows per tile where there are several

LEFT, RIGHT = -1, 1


class Side(NamedTuple):
    """The bands on one side of the queries where any tile meets keys, from near to far.

    The left side has band 0 too. Each batch row begins at its own nearest band.
    """

    direction: int  # LEFT or RIGHT
    nearest: Array  # [B or 1]
    num_steps: Array  # [], of the batch row that has most

    def band(self, step: Array) -> Array:
        return self.nearest + self.direction * step


@dataclass(frozen=True)
class Tiles:
    """Sizes, known when tracing, and where the queries stand, which may not be."""

    num_tiles: int
    rows: int  # per tile
    block: int  # keys per block
    T: int
    S: int
    padding_after: int  # keys
    stop: Array  # [B], or [1] if it is the same for all: one past the position of the last query

    @classmethod
    def cut(cls, T: int, S: int, query_start: Array | None, both_sides: bool) -> "Tiles":
        # Lengths that are symbols, in jax.export, are cut into whole blocks.
        known = isinstance(T, int) and isinstance(S, int)
        block = min(BLOCK, max(T, S)) if known else BLOCK
        rows = min(T, block) if known else BLOCK
        num_tiles = -(-T // rows)
        stop = jnp.full(1, S) if query_start is None else query_start + T
        # A causal query that stands at a key meets nothing after the keys.
        needed = both_sides or query_start is not None
        return cls(num_tiles, rows, block, T, S, num_tiles * block * needed, stop)

    @property
    def band_keys(self) -> int:
        """Keys in a band, and in the padding before the keys."""
        return self.num_tiles * self.block

    def pad_keys(self, x: Array, axis: int = 1) -> Array:
        """[B, S, ...] -> [B, padded keys, ...]."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (self.band_keys, self.padding_after)
        return jnp.pad(x, widths)

    def unpad_keys(self, x: Array) -> Array:
        """[B, padded keys, ...] -> [B, S, ...]."""
        return x[:, self.band_keys : self.band_keys + self.S]

    def key_numbers(self) -> Array:
        """[padded keys]: negative, or S and more, in the padding."""
        return jnp.arange(-self.band_keys, self.S + self.padding_after)

    def inside(self, first: Array, end: Array) -> Array:
        """[B or 1, padded keys]: whether a key is one of first .. end - 1, each [B or 1]."""
        keys = self.key_numbers()
        return (keys >= first[:, None]) & (keys < end[:, None])

    def tile(self, x: Array) -> Array:
        """[B, T, ...] -> [B, tiles, rows, ...]."""
        widths = [(0, 0)] * x.ndim
        widths[1] = (self.num_tiles * self.rows - self.T, 0)
        return jnp.pad(x, widths).reshape(x.shape[0], self.num_tiles, self.rows, *x.shape[2:])

    def untile(self, x: Array) -> Array:
        """[B, tiles, rows, ...] -> [B, T, ...]."""
        padded = self.num_tiles * self.rows
        return x.reshape(x.shape[0], padded, *x.shape[3:])[:, padded - self.T :]

    def row_numbers(self) -> Array:
        """[tiles, rows]: which query a row is; negative in the padding."""
        padded = self.num_tiles * self.rows
        return jnp.arange(self.T - padded, self.T).reshape(self.num_tiles, self.rows)

    def side(self, direction: int, first: Array, end: Array) -> Side:
        """Find the bands on one side that hold any of the keys first .. end - 1, each [B or 1]."""
        # Band j holds the keys from stop + (j - num_tiles) * block to stop + j * block - 1.
        lowest = (first - self.stop) // self.block + 1
        highest = (end - 1 - self.stop) // self.block + self.num_tiles
        return self._side(direction, lowest, highest, first < end)

    def side_of_rows(self, direction: int, first: Array, end: Array) -> Side:
        """As `side`, where each row has keys of its own: first and end [B, tiles, rows]."""
        own_block = self.first_keys(jnp.zeros_like(self.stop))[..., None]  # in band 0
        lowest, highest = (first - own_block) // self.block, (end - 1 - own_block) // self.block
        farthest, sees = jnp.iinfo(lowest.dtype).max // 2, first < end
        lowest = jnp.where(sees, lowest, farthest).min((1, 2))
        highest = jnp.where(sees, highest, -farthest).max((1, 2))
        any_keys = sees.any((1, 2))
        lowest, highest = (jnp.where(any_keys, band, 0) for band in (lowest, highest))
        return self._side(direction, lowest, highest, any_keys)

    def _side(self, direction: int, lowest: Array, highest: Array, any_keys: Array) -> Side:
        """What of the bands lowest .. highest lies on one side, each [B or 1]."""
        if direction == LEFT:
            highest = jnp.minimum(highest, 0)
        else:
            lowest = jnp.maximum(lowest, 1)
        num_steps = jnp.where(any_keys, highest - lowest + 1, 0)
        nearest = highest if direction == LEFT else lowest
        return Side(direction, nearest, jnp.maximum(num_steps, 0).max())

    def offsets(self) -> Array:
        """[rows]: where each row stands, counted from the first key of its block in band 0."""
        return jnp.arange(self.block - self.rows, self.block)

    def distance(self, band: Array) -> Array:
        """Position minus key, for every tile: band [B or 1] -> [B or 1, 1, rows, block]."""
        near = self.offsets()[:, None] - jnp.arange(self.block)
        return near - (band * self.block)[:, None, None, None]

    def first_keys(self, band: Array) -> Array:
        """[B or 1, tiles]: the number of the first key that each tile meets."""
        first = self.stop + (band - self.num_tiles) * self.block
        return first[:, None] + jnp.arange(self.num_tiles) * self.block

    def blocks(self, x: Array, band: Array) -> Array:
        """[B, padded keys, ...] -> [B, tiles, block, ...]: what each tile meets in this band."""
        start = self._start(band)
        if start.shape[0] == 1:
            taken = lax.dynamic_slice_in_dim(x, start[0], self.band_keys, axis=1)
        else:
            take = jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, self.band_keys))
            taken = take(x, start)
        return taken.reshape(x.shape[0], self.num_tiles, self.block, *x.shape[2:])

    def add_blocks(self, x: Array, band: Array, added: Array) -> Array:
        """Add [B, tiles, block, ...] to x [B, padded keys, ...] where `blocks` would find it."""
        start = self._start(band)
        added = self.blocks(x, band) + added
        added = added.reshape(x.shape[0], self.band_keys, *x.shape[2:])
        if start.shape[0] == 1:
            return lax.dynamic_update_slice_in_dim(x, added, start[0], axis=1)
        put = jax.vmap(lambda row, new, n: lax.dynamic_update_slice_in_dim(row, new, n, 0))
        return put(x, added, start)

    def columns(self, mask: Array, band: Array) -> Array:
        """[B or 1, tiles, rows, padded keys] -> [B or 1, tiles, rows, block]."""
        starts = self._start(band)[:, None] + jnp.arange(self.num_tiles) * self.block
        num_batch_rows = max(mask.shape[0], starts.shape[0])
        mask = jnp.broadcast_to(mask, (num_batch_rows, *mask.shape[1:]))
        starts = jnp.broadcast_to(starts, (num_batch_rows, self.num_tiles))

        take = jax.vmap(lambda rows, n: lax.dynamic_slice_in_dim(rows, n, self.block, axis=-1))
        return jax.vmap(take)(mask, starts)

    def _start(self, band: Array) -> Array:
        """[B or 1]: the padded key where a band starts, moved to where a slice fits."""
        return jnp.clip(self.stop + band * self.block, 0, self.S + self.padding_after)


@dataclass(frozen=True)
class Head:
    """One query head of all batch rows, wide, cut into tiles."""

    tiles: Tiles
    q: Array  # [B, tiles, rows, D], times scale
    k: Array  # [B, padded keys, D]
    v: Array  # [B, padded keys, E]
    left: Array  # [B, 1, 1, 1]
    right: Array | None
    key_range: tuple[Array, Array]  # [B or 1]: first, end
    row_range: tuple[Array, Array] | None  # [B, tiles, rows]: of each row, within key_range
    seen: Array  # [B, padded keys], bool
    mask: Array | None  # [B or 1, tiles, rows, padded keys], bool
    # Queries [B, tiles, rows, parts], keys [B, padded keys, parts]; None: key s stands at s.
    stands: tuple[Array, Array] | None
    dropout: float
    seed: Array | None
    batch_heads: Array  # [B], b * H + h

    @classmethod
    def cut(cls, inputs: Inputs, h: Array) -> "Head":
        (B, T, H, _), (S, G) = inputs.q.shape, inputs.k.shape[1:3]
        right, wide, g = inputs.right, inputs.left.dtype, h // (H // G)
        tiles = Tiles.cut(T, S, inputs.query_start, both_sides=right is not None)
        limits = jnp.array([[0, S]]) if inputs.key_range is None else inputs.key_range[:, g]
        first, end = limits[:, 0], limits[:, 1]
        seen = tiles.inside(first, end)
        seen = jnp.broadcast_to(seen, (B, seen.shape[1]))
        row_range = None
        if inputs.query_range is not None:
            own = tiles.tile(inputs.query_range)
            least, most = (x[:, None, None] for x in (first, end))
            row_range = jnp.maximum(own[..., 0], least), jnp.minimum(own[..., 1], most)
        mask = inputs.mask
        if mask is not None:
            mask = tiles.pad_keys(mask[:, jnp.minimum(h, mask.shape[1] - 1)], axis=-1)
            if mask.shape[1] == 1 != T:
                seen, mask = seen & mask[:, 0], None
            else:
                mask = tiles.tile(mask)
        k, v = (tiles.pad_keys(x[:, :, g].astype(wide)) for x in (inputs.k, inputs.v))
        # Hidden keys may hold anything, NaN included, and 0 * NaN is NaN.
        k, v = (jnp.where(seen[..., None], x, 0) for x in (k, v))
        of_head = (slice(None), h, None, None, None)
        x, xq = inputs.positions, inputs.query_positions
        stands = None
        if x is not None and xq is not None:
            stands = tiles.tile(xq[:, h]), tiles.pad_keys(x[:, h])
        return cls(
            tiles,
            q=tiles.tile(inputs.q[:, :, h].astype(wide)) * inputs.scale,
            k=k,
            v=v,
            left=inputs.left[of_head],
            right=None if right is None else right[of_head],
            key_range=(first, end),
            row_range=row_range,
            seen=seen,
            mask=mask,
            stands=stands,
            dropout=inputs.dropout,
            seed=inputs.seed,
            batch_heads=jnp.arange(B) * H + h,
        )

    def side(self, direction: int) -> Side:
        if self.row_range is not None:
            return self.tiles.side_of_rows(direction, *self.row_range)
        return self.tiles.side(direction, *self.key_range)

    def distance(self, band: Array) -> tuple[Array, Array]:
        """By how many keys each key lies back, [B or 1, 1, rows, BLOCK], and how far."""
        order = self.tiles.distance(band)
        if self.stands is None:
            return order, order.astype(self.q.dtype)
        xq, x = self.stands
        apart = standing.distance(xq, self.tiles.blocks(x, band))
        padding = self.tiles.row_numbers()[..., None] < 0  # which stands nowhere
        return order, jnp.where(padding, 0, apart).astype(self.q.dtype)

    def pull(self, order: Array) -> Array:
        """By how much a score falls for each unit that its key lies further back."""
        left, right = (
            0 if slope is None else jnp.where(jnp.isinf(slope), 0, slope)  # 0 * inf would be NaN
            for slope in (self.left, self.right)
        )
        return jnp.where(order >= 0, left, -right)

    def score(self, band: Array) -> Array:
        """[B, tiles, rows, BLOCK], -inf where hidden."""
        order, distance = self.distance(band)
        score = product("btrd,btsd->btrs", self.q, self.tiles.blocks(self.k, band))
        hidden = ~self.tiles.blocks(self.seen, band)[:, :, None]
        if self.mask is not None:
            hidden = hidden | ~self.tiles.columns(self.mask, band)
        if self.row_range is not None:
            keys = self.tiles.first_keys(band)[..., None, None] + jnp.arange(self.tiles.block)
            first, end = (x[..., None] for x in self.row_range)
            hidden = hidden | (keys < first) | (keys >= end)
        # A query always sees the key at its own position.
        for slope, beyond in ((self.left, order > 0), (self.right, order < 0)):
            hidden = hidden | (beyond if slope is None else beyond & jnp.isinf(slope))
        return jnp.where(hidden, -jnp.inf, score - self.pull(order) * distance)

    def drop(self, weight: Array, band: Array) -> Array:
        """Apply attention dropout to weight [B, tiles, rows, BLOCK]."""
        if self.seed is None:
            return weight
        tiles = self.tiles
        keys = tiles.first_keys(band)[..., None] + jnp.arange(tiles.block)
        heads = self.batch_heads[:, None]
        keep = keep_mask(self.seed, self.dropout, heads, tiles.row_numbers(), keys)
        return jnp.where(keep, weight / (1 - self.dropout), 0)


def product(axes: str, *operands: Array) -> Array:
    return jnp.einsum(axes, *operands, precision=lax.Precision.HIGHEST)
