"""How queries and keys of one head are cut: tiles of rows, and for each tile the blocks of keys on either side.

Rows and keys are padded in front, so that the last row and the last key end a tile and a block. Band 0 is for
every tile the block where its last row stands; band j the block j further to the right (negative: to the left).
Keys get further blocks of padding around them, so that every band is one slice for all tiles:

    keys    . . | 0 | 1 | 2 | 3 | . .      four blocks
    tiles       |   | 0 | 1 | 2 |          three tiles; band -1 is the slice | 0 | 1 | 2 |
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 256  # keys per block, and rows per tile where there are several


class Tiles(NamedTuple):
    """Sizes; all static."""

    num_tiles: int
    rows: int  # per tile
    num_blocks: int
    block: int  # keys per block
    T: int
    S: int
    blocks_after: int  # of padding

    @classmethod
    def cut(cls, T: int, S: int, both_sides: bool) -> "Tiles":
        block = min(BLOCK, max(T, S))
        rows = min(T, block)
        num_tiles = -(-T // rows)
        num_blocks = max(1, -(-S // block))
        return cls(num_tiles, rows, num_blocks, block, T, S, (num_tiles - 1) * both_sides)

    @property
    def end(self) -> int:
        """Where the keys end among the padded ones."""
        return (self.num_tiles - 1 + self.num_blocks) * self.block

    @property
    def padded_keys(self) -> int:
        return self.end + self.blocks_after * self.block

    @property
    def last_left(self) -> int:
        return self.num_blocks - 1

    @property
    def last_right(self) -> int:
        return self.num_tiles - 1

    def first_block(self, band: Any) -> Any:
        """The padded block that the first tile meets in this band."""
        return self.num_blocks - 1 + band

    def turned(self, key: Array) -> Array:
        """The number of a key among the padded ones."""
        return key + self.end - self.S

    @staticmethod
    def turn(x: Array, places: Array | None, axis: int = 1) -> Array:
        """Move batch row b of x [B, S, ...] by places[b] to the right along an axis, around the end."""
        if places is None:
            return x
        axis = axis % x.ndim - 1
        x = jnp.broadcast_to(x, (len(places), *x.shape[1:]))
        return jax.vmap(lambda row, n: jnp.roll(row, n, axis))(x, places)

    def pad_keys(self, x: Array, axis: int = 1) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (self.end - self.S, self.padded_keys - self.end)
        return jnp.pad(x, widths)

    def tile(self, x: Array) -> Array:
        """[B, T, ...] -> [B, tiles, rows, ...]."""
        widths = [(0, 0)] * x.ndim
        widths[1] = (self.num_tiles * self.rows - self.T, 0)
        return jnp.pad(x, widths).reshape(len(x), self.num_tiles, self.rows, *x.shape[2:])

    def untile(self, x: Array) -> Array:
        """[B, tiles, rows, ...] -> [B, T, ...]."""
        padded = self.num_tiles * self.rows
        return x.reshape(len(x), padded, *x.shape[3:])[:, padded - self.T :]

    def queries(self) -> Array:
        """[tiles, rows]: the row of q at each place; negative for padding."""
        padded = self.num_tiles * self.rows
        return jnp.arange(self.T - padded, self.T).reshape(self.num_tiles, self.rows)

    def offsets(self) -> Array:
        """[rows]: where each row stands, counted from the start of its band 0."""
        return jnp.arange(self.block - self.rows, self.block)

    def distance(self, band: Array) -> Array:
        """[rows, block]: position minus key, the same for every tile."""
        return self.offsets()[:, None] - band * self.block - jnp.arange(self.block)

    def blocks(self, x: Array, band: Array) -> Array:
        """[B, padded keys, ...] -> [B, tiles, block, ...]: the block that each tile meets in this band."""
        start, size = self.first_block(band) * self.block, self.num_tiles * self.block
        found = lax.dynamic_slice_in_dim(x, start, size, axis=1)
        return found.reshape(len(x), self.num_tiles, self.block, *x.shape[2:])

    def add_blocks(self, x: Array, band: Array, added: Array) -> Array:
        """Add [B, tiles, block, ...] to x [B, padded keys, ...] where `blocks` would find it."""
        start = self.first_block(band) * self.block
        added = added.reshape(len(x), -1, *x.shape[2:])
        old = lax.dynamic_slice_in_dim(x, start, added.shape[1], axis=1)
        return lax.dynamic_update_slice_in_dim(x, old + added, start, axis=1)

    def columns(self, x: Array, band: Array) -> Array:
        """[B, tiles, rows, padded keys] -> [B, tiles, rows, block]."""
        starts = (self.first_block(band) + jnp.arange(self.num_tiles)) * self.block

        def of_tile(row: Array, start: Array) -> Array:
            return lax.dynamic_slice_in_dim(row, start, self.block, axis=-1)

        return jax.vmap(of_tile, in_axes=(1, 0), out_axes=1)(x, starts)
