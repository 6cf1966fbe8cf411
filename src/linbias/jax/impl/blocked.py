"""Near-to-far linear-bias attention in JAX operations: exact to rounding, at a cost of T x window.

One query head after the other; each step visits one band (`tiles.py`), a block of keys for every
tile of queries, left ones first, from near to far, with one batched product and an online softmax.
A side ends when the certificate says that the keys not yet visited there can hold no more than
`tolerance` of any row's probability. Backward visits the same bands. The number of steps depends
on the data, shapes do not. Memory: wide copies of one head's arrays, keys with a padding of T or 2
T; scores of [B, T, BLOCK]; in backward wide gradients of k and v.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from linbias._dispatch import Abilities
from linbias._request import Problem
from linbias.jax import operator
from linbias.jax.impl.certificate import Certificate
from linbias.jax.impl.tiles import LEFT, RIGHT, Head, Side, product
from linbias.jax.operator import Gradients, Inputs

NAME = "blocked"
ABILITIES = Abilities(
    runs_on="any JAX device",
    how="near to far in JAX operations: static shapes, no callbacks",
    memory="linear in length",
    has=("mask", "positions", "dropout", "transformed"),
)


def why_not(problem: Problem) -> str | None:
    if problem.positions and not all(isinstance(n, int) for n in (problem.T, problem.S)):
        return "its scan over positions needs lengths that are numbers, not symbols of jax.export"
    return ABILITIES.lacks(problem)


class Results(NamedTuple):
    """What backward needs, per head: the sum of row_max and log_sum, lse, would lose digits."""

    out: Array  # [H, B, T, E], wide
    row_max: Array  # [H, B, T]
    log_sum: Array  # [H, B, T]
    num_steps: Array  # [H, 2], int32: bands visited to the left and to the right


def _forward(inputs: Inputs) -> tuple[Array, Array, Results]:
    def one(h: Array) -> Results:
        head = Head.cut(inputs, h)
        return _forward_head(head, Certificate.prepare(head, inputs.tolerance))

    results = lax.map(one, jnp.arange(inputs.q.shape[2]))
    out = jnp.moveaxis(results.out, 0, 2).astype(inputs.q.dtype)
    return out, jnp.moveaxis(results.row_max + results.log_sum, 0, 2), results


class _Sums(NamedTuple):
    """The online softmax of all rows of a head."""

    acc: Array  # [B, tiles, rows, E]
    row_max: Array  # [B, tiles, rows, 1]
    row_sum: Array

    @property
    def lse(self) -> Array:
        return (self.row_max + jnp.log(self.row_sum))[..., 0]


def _forward_head(head: Head, certificate: Certificate) -> Results:
    tiles = head.tiles

    def visit(sums: _Sums, band: Array) -> _Sums:
        score = head.score(band)
        row_max = jnp.maximum(sums.row_max, score.max(-1, keepdims=True))
        # While a row has seen no key its maximum is -inf, and any finite pivot keeps its sums at
        # 0.
        pivot = jnp.where(row_max == -jnp.inf, 0, row_max)
        weight = jnp.exp(score - pivot)
        shrink = jnp.exp(sums.row_max - pivot)
        row_sum = sums.row_sum * shrink + weight.sum(-1, keepdims=True)
        values = tiles.blocks(head.v, band)
        added = product("btrs,btse->btre", head.drop(weight, band), values)
        return _Sums(sums.acc * shrink + added, row_max, row_sum)

    def outwards(sums: _Sums, side: Side) -> tuple[Array, _Sums]:
        def is_open(state: tuple[Array, _Sums]) -> Array:
            step, sums = state
            covered = certificate.covers(side, step, sums.lse)
            if side.direction == LEFT:
                # The queries' own band may be the first, and the certificate speaks of one side
                # only.
                covered = covered & (step > 0)
            return (step < side.num_steps) & ~covered

        def go(state: tuple[Array, _Sums]) -> tuple[Array, _Sums]:
            step, sums = state
            return step + 1, visit(sums, side.band(step))

        start, sums = operator.with_the_same_mesh_axes((jnp.int32(0), sums, head.q))[:2]
        return lax.while_loop(is_open, go, (start, sums))

    column = jnp.zeros_like(head.q[..., :1])
    acc = jnp.zeros((*head.q.shape[:3], head.v.shape[-1]), head.q.dtype)
    to_left, sums = outwards(_Sums(acc, column - jnp.inf, column), head.side(LEFT))
    to_right = jnp.int32(0)
    if head.right is not None:
        to_right, sums = outwards(sums, head.side(RIGHT))
    out = sums.acc / jnp.where(sums.row_sum == 0, 1, sums.row_sum)
    out, row_max, log_sum = (tiles.untile(x) for x in (out, sums.row_max, jnp.log(sums.row_sum)))
    return Results(out, row_max[..., 0], log_sum[..., 0], jnp.stack([to_left, to_right]))


def _backward(inputs: Inputs, saved: Results, dout: Array, dlse: Array) -> Gradients:
    (B, S, G), H = inputs.k.shape[:3], inputs.q.shape[2]

    def one(sums: tuple[Array, Array], h: Array) -> Any:
        head = Head.cut(inputs, h)
        own = jax.tree.map(lambda x: x[h], saved)
        dq, dk, dv, *others = _backward_head(head, own, dout[:, :, h], dlse[:, :, h])
        g = h // (H // G)
        return (sums[0].at[g].add(dk), sums[1].at[g].add(dv)), (dq * inputs.scale, *others)

    zeros = (jnp.zeros((G, B, S, x.shape[3]), inputs.left.dtype) for x in (inputs.k, inputs.v))
    zeros, heads = operator.with_the_same_mesh_axes(((*zeros,), jnp.arange(H), inputs, dout))[:2]
    sums, (dq, dleft, dright, *stands) = lax.scan(one, zeros, heads)
    dk, dv = (jnp.moveaxis(x, 0, 2) for x in sums)
    stands = (None if x is None else x.swapaxes(0, 1) for x in stands)
    return Gradients(jnp.moveaxis(dq, 0, 2), dk, dv, dleft.T, dright.T, *stands)


def _backward_head(head: Head, saved: Results, dout: Array, dlse: Array) -> tuple[Any, ...]:
    """The gradients of one head: of q, k, v, the slopes [B], and positions or None."""
    tiles = head.tiles
    # Weights are exp(score - row_max) times this; a row without a key has none.
    per_sum = jnp.where(saved.log_sum == -jnp.inf, 0, jnp.exp(-saved.log_sum))
    delta = ((dout * saved.out).sum(-1) - dlse) * per_sum
    pivot = jnp.where(saved.row_max == -jnp.inf, jnp.inf, saved.row_max)
    rows = (dout * per_sum[..., None], delta[..., None], pivot[..., None])
    dout, delta, pivot = (tiles.tile(x) for x in rows)

    def visit(band: Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        dq, dk, dv, dleft, dright, dx, dxq = sums
        order, distance = head.distance(band)
        weight = jnp.exp(head.score(band) - pivot)
        dweight = product("btre,btse->btrs", dout, tiles.blocks(head.v, band))
        dscore = weight * (head.drop(dweight, band) - delta)
        dq = dq + product("btrs,btsd->btrd", dscore, tiles.blocks(head.k, band))
        dk = tiles.add_blocks(dk, band, product("btrs,btrd->btsd", dscore, head.q))
        dropped = head.drop(weight, band)
        dv = tiles.add_blocks(dv, band, product("btrs,btre->btse", dropped, dout))
        # Row by row: a sum of few numbers after the other keeps more digits.
        dleft = dleft - jnp.where(order >= 0, dscore * distance, 0).sum(-1)
        dright = dright + jnp.where(order < 0, dscore * distance, 0).sum(-1)
        if head.stands is not None:
            pull = dscore * head.pull(order)
            dx = tiles.add_blocks(dx, band, pull.sum(2))
            dxq = dxq - pull.sum(-1)
        return dq, dk, dv, dleft, dright, dx, dxq

    row, key = (jnp.zeros_like(x[..., 0]) for x in (head.q, head.k))
    sums: tuple[Any, ...] = tuple(jnp.zeros_like(x) for x in (head.q, head.k, head.v, row, row))
    sums = (*sums, None, None) if head.stands is None else (*sums, key, row)
    sums = operator.with_the_same_mesh_axes((sums, head.q, dout))[0]
    sides = (LEFT,) if head.right is None else (LEFT, RIGHT)
    for i, side in enumerate(head.side(direction) for direction in sides):
        sums = lax.fori_loop(
            0, saved.num_steps[i], lambda step, s, side=side: visit(side.band(step), s), sums
        )
    dq, dk, dv, dleft, dright, dx, dxq = sums
    slopes = (x.sum(-1).sum(-1) for x in (dleft, dright))
    dq, dk, dv = tiles.untile(dq), tiles.unpad_keys(dk), tiles.unpad_keys(dv)
    if head.stands is not None:
        dx, dxq = tiles.unpad_keys(dx), tiles.untile(dxq)
    return dq, dk, dv, *slopes, dx, dxq


attention = operator.define(NAME, _forward, _backward)
