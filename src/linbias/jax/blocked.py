"""Near-to-far linear-bias attention in JAX operations: exact to rounding, at a cost of T x window.

Computes DESIGN section 1 on any device that XLA compiles for. One query head after the other; its queries are cut
into tiles, and step j visits for all tiles at once the key block that lies j blocks to the left (then, unless
causal, to the right) of the tile's own: one batched product over a diagonal band. An online softmax takes it in. A
side ends when the certificate (docs/math.md) says that for no row of the head the keys not yet visited there, all
together, can hold more than `tolerance` of the probability. Backward visits the same bands: the exact gradient of
the function that forward computed. Trip counts depend on the data, shapes do not.

Memory: wide copies of one head's arrays, scores of [B, T, BLOCK], and in backward wide gradients of k and v.
Measured: docs/LOG.md, benchmarks/results.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from linbias._checks import Problem
from linbias.jax import operator
from linbias.jax.certificate import Certificate
from linbias.jax.dropout import keep_mask
from linbias.jax.operator import Arguments, Gradients, Numbers
from linbias.jax.tiles import Tiles

NAME = "blocked"


def why_not(call: Problem) -> str | None:
    return None


class Kept(NamedTuple):
    """What backward needs, per head. lse = row_max + log_sum: their rounded sum would cost it digits."""

    out: Array  # [H, B, T, E], wide
    row_max: Array  # [H, B, T]
    log_sum: Array  # [H, B, T]
    visited: Array  # [H, 2], int32: bands to the left, the own one included, and to the right


@dataclass(frozen=True)
class Head:
    """One query head of all batch rows, wide, cut into tiles."""

    tiles: Tiles
    numbers: Numbers
    q: Array  # [B, tiles, rows, D], times scale
    k: Array  # [B, padded keys, D]
    v: Array  # [B, padded keys, E]
    left: Array  # [B, 1, 1, 1]
    right: Array | None
    seen: Array  # [B, padded keys], bool
    mask: Array | None  # [B or 1, tiles, rows, padded keys], bool
    seed: Array | None
    batch_heads: Array  # [B], b * H + h
    first_key: Array  # [B], the number of the first padded key

    def score(self, band: Array) -> tuple[Array, Array]:
        """Score [B, tiles, rows, BLOCK], -inf where hidden, and distance [rows, BLOCK]."""
        distance = self.tiles.distance(band)
        score = product("btrd,btsd->btrs", self.q, self.tiles.blocks(self.k, band))
        hidden = ~self.tiles.blocks(self.seen, band)[:, :, None]
        if self.mask is not None:
            hidden = hidden | ~self.tiles.columns(self.mask, band)
        for slope, reach in ((self.left, distance), (self.right, -distance)):
            if slope is None:
                hidden = hidden | (reach > 0)
            else:
                hidden = hidden | ((reach > 0) & jnp.isinf(slope))
                # 0 * inf would be NaN: a query always sees its own position.
                score = score - jnp.where(reach > 0, slope, 0) * reach.astype(score.dtype)
        return jnp.where(hidden, -jnp.inf, score), distance

    def drop(self, weight: Array, band: Array) -> Array:
        """Apply attention dropout to weight [B, tiles, rows, BLOCK]."""
        if self.seed is None:
            return weight
        numbers = jnp.arange(self.k.shape[1]) + self.first_key[:, None]
        keys = self.tiles.blocks(numbers, band)
        heads = jnp.broadcast_to(self.batch_heads[:, None], keys.shape[:2])
        keep = keep_mask(self.seed, self.numbers.dropout, heads, self.tiles.queries(), keys)
        return jnp.where(keep, weight / (1 - self.numbers.dropout), 0)


def product(axes: str, *operands: Array) -> Array:
    return jnp.einsum(axes, *operands, precision=lax.Precision.HIGHEST)


def _head(call: Arguments, numbers: Numbers, h: Array) -> tuple[Head, Certificate]:
    q, k, v, left, right, key_range, _, mask, seed = call
    (B, T, H, _), (S, G) = q.shape, k.shape[1:3]
    tiles = Tiles.cut(T, S, both_sides=right is not None)
    wide = left.dtype
    limits = jnp.array([[0, S]]) if key_range is None else key_range
    # Queries stand at the end of the range: turn the keys so that it ends at S.
    turn = None if key_range is None else S - limits[:, 1]
    first = tiles.turned(jnp.broadcast_to(limits[:, 0] + S - limits[:, 1], (B,)))
    seen = jnp.arange(tiles.padded_keys) >= first[:, None]
    seen = seen & (jnp.arange(tiles.padded_keys) < tiles.end)
    if mask is not None:
        mask = mask[:, jnp.minimum(h, mask.shape[1] - 1)]
        mask = tiles.pad_keys(tiles.turn(mask, turn, axis=-1), axis=-1)
        if mask.shape[1] == 1 != T:
            seen, mask = seen & mask[:, 0], None
        else:
            mask = tiles.tile(mask)
    g = h // (H // G)
    k, v = (tiles.pad_keys(tiles.turn(x[:, :, g].astype(wide), turn)) for x in (k, v))
    # Hidden keys may hold anything, NaN included, and 0 * NaN is NaN.
    k, v = (jnp.where(seen[..., None], x, 0) for x in (k, v))
    q = tiles.tile(q[:, :, h].astype(wide))
    of_head = (slice(None), h, None, None, None)
    slopes = left[of_head], None if right is None else right[of_head]
    certificate = Certificate.prepare(tiles, q, k, v, seen, first, slopes, numbers)
    head = Head(
        tiles,
        numbers,
        q * numbers.scale,
        k,
        v,
        slopes[0],
        slopes[1],
        seen,
        mask,
        seed,
        batch_heads=jnp.arange(B) * H + h,
        first_key=jnp.broadcast_to(limits[:, 1], (B,)) - tiles.end,
    )
    return head, certificate


def _forward(call: Arguments, numbers: Numbers, precise: bool) -> tuple[Array, Array, Kept]:
    def one(h: Array) -> Kept:
        return _forward_head(*_head(call, numbers, h))

    kept = lax.map(one, jnp.arange(call.q.shape[2]))
    out = jnp.moveaxis(kept.out, 0, 2).astype(call.q.dtype)
    return out, jnp.moveaxis(kept.row_max + kept.log_sum, 0, 2), kept


class _Sums(NamedTuple):
    """The online softmax of all rows of a head."""

    acc: Array  # [B, tiles, rows, E]
    row_max: Array  # [B, tiles, rows, 1]
    row_sum: Array

    @property
    def lse(self) -> Array:
        return (self.row_max + jnp.log(self.row_sum))[..., 0]


def _forward_head(head: Head, certificate: Certificate) -> Kept:
    tiles = head.tiles

    def visit(sums: _Sums, band: Array) -> _Sums:
        score, _ = head.score(band)
        row_max = jnp.maximum(sums.row_max, score.max(-1, keepdims=True))
        # While a row has seen no key its maximum is -inf, and any finite pivot keeps its sums at 0.
        pivot = jnp.where(row_max == -jnp.inf, 0, row_max)
        weight = jnp.exp(score - pivot)
        shrink = jnp.exp(sums.row_max - pivot)
        row_sum = sums.row_sum * shrink + weight.sum(-1, keepdims=True)
        values = tiles.blocks(head.v, band)
        added = product("btrs,btse->btre", head.drop(weight, band), values)
        return _Sums(sums.acc * shrink + added, row_max, row_sum)

    def outwards(sums: _Sums, sign: int, last: int) -> tuple[Array, _Sums]:
        def is_open(state: tuple[Array, _Sums]) -> Array:
            step, sums = state
            covered = certificate.covered(sign * step, sums.lse)
            # The own band is visited first, whatever the certificate says of it.
            return (step <= last) & (~covered | (step == 0))

        def go(state: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
            step, sums = state
            return step + 1, visit(sums, sign * step)

        start = jnp.int32(0 if sign < 0 else 1)
        start, sums = operator.vary_alike((start, sums, head.q))[:2]
        return lax.while_loop(is_open, go, (start, sums))

    column = jnp.zeros_like(head.q[..., :1])
    acc = jnp.zeros((*head.q.shape[:3], head.v.shape[-1]), head.q.dtype)
    sums = _Sums(acc, column - jnp.inf, column)
    to_left, sums = outwards(sums, -1, tiles.last_left)
    to_right = jnp.int32(1)
    if head.right is not None:
        to_right, sums = outwards(sums, 1, tiles.last_right)
    out = sums.acc / jnp.where(sums.row_sum == 0, 1, sums.row_sum)
    out, row_max, log_sum = (tiles.untile(x) for x in (out, sums.row_max, jnp.log(sums.row_sum)))
    return Kept(out, row_max[..., 0], log_sum[..., 0], jnp.stack([to_left, to_right]))


def _backward(
    call: Arguments, numbers: Numbers, kept: Kept, dout: Array, dlse: Array
) -> Gradients:
    G, n = call.k.shape[2], call.q.shape[2] // call.k.shape[2]

    def one(sums: tuple[Array, Array], h: Array) -> Any:
        head, _ = _head(call, numbers, h)
        own = jax.tree.map(lambda x: x[h], kept)
        dq, dk, dv, dleft, dright = _backward_head(head, own, dout[:, :, h], dlse[:, :, h])
        dk, dv = (_as_given(x, call) for x in (dk, dv))
        g = h // n
        return (sums[0].at[g].add(dk), sums[1].at[g].add(dv)), (dq, dleft, dright)

    B, S = call.k.shape[:2]
    zeros = (jnp.zeros((G, B, S, x.shape[-1]), call.left.dtype) for x in (call.k, call.v))
    zeros, heads = operator.vary_alike(((*zeros,), jnp.arange(n * G), call, dout))[:2]
    sums, (dq, dleft, dright) = lax.scan(one, zeros, heads)
    dk, dv = (jnp.moveaxis(x, 0, 2) for x in sums)
    return Gradients(jnp.moveaxis(dq, 0, 2), dk, dv, dleft.T, dright.T)


def _as_given(padded: Array, call: Arguments) -> Array:
    """Gradient of padded and turned keys -> of the keys as they came."""
    T, S = call.q.shape[1], call.k.shape[1]
    tiles = Tiles.cut(T, S, both_sides=call.right is not None)
    turn = None if call.key_range is None else call.key_range[:, 1] - S
    return tiles.turn(padded[:, tiles.end - S : tiles.end], turn)


def _backward_head(head: Head, kept: Kept, dout: Array, dlse: Array) -> tuple[Array, ...]:
    """Return dq [B, T, D], dk and dv [B, padded keys, size], dleft and dright [B] of one head."""
    tiles = head.tiles
    # Weights are exp(score - row_max) times this; a row without a key has none.
    per_sum = jnp.where(kept.log_sum == -jnp.inf, 0, jnp.exp(-kept.log_sum))
    delta = ((dout * kept.out).sum(-1) - dlse) * per_sum
    pivot = jnp.where(kept.row_max == -jnp.inf, jnp.inf, kept.row_max)
    rows = (dout * per_sum[..., None], delta[..., None], pivot[..., None])
    dout, delta, pivot = (tiles.tile(x) for x in rows)

    def visit(sign: int, step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        dq, dk, dv, dleft, dright = sums
        band = sign * step
        score, distance = head.score(band)
        weight = jnp.exp(score - pivot)
        dweight = product("btre,btse->btrs", dout, tiles.blocks(head.v, band))
        dscore = weight * (head.drop(dweight, band) - delta)
        dq = dq + product("btrs,btsd->btrd", dscore, tiles.blocks(head.k, band))
        dk = tiles.add_blocks(dk, band, product("btrs,btrd->btsd", dscore, head.q))
        dropped = head.drop(weight, band)
        dv = tiles.add_blocks(dv, band, product("btrs,btre->btse", dropped, dout))
        # Row by row: a sum of few numbers after the other keeps more digits.
        dleft = dleft - (dscore * jnp.maximum(distance, 0)).sum(-1)
        dright = dright + (dscore * jnp.minimum(distance, 0)).sum(-1)
        return dq, dk, dv, dleft, dright

    row = jnp.zeros_like(head.q[..., 0])
    sums = tuple(jnp.zeros_like(x) for x in (head.q, head.k, head.v, row, row))
    sums = operator.vary_alike((sums, head.q, dout))[0]
    sums = lax.fori_loop(0, kept.visited[0], lambda j, s: visit(-1, j, s), sums)
    if head.right is not None:
        sums = lax.fori_loop(1, kept.visited[1], lambda j, s: visit(1, j, s), sums)
    dq, dk, dv, dleft, dright = sums
    slopes = (x.sum(-1).sum(-1) for x in (dleft, dright))
    return tiles.untile(dq) * head.numbers.scale, dk, dv, *slopes


_run = operator.define(NAME, _forward, _backward)


def attention(arguments: Arguments, call: Problem) -> tuple[Array, Array]:
    """Return out [B, T, H, E] and lse [B, T, H]."""
    return _run(arguments, call)
