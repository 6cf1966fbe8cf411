"""How new tokens attend, in every family: in packed rows, to a cache, or to each other."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from linbias.models.decoder.cache import (
    attending_layer,
    check_rows,
    growing_layer,
    keep_beside,
    key_bound,
)
from linbias.models.decoder.holes import take
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.positions import NO_OPTIONS, AttendOptions, LinearBias, Position


class Steps(NamedTuple):
    """The steps [B, H, T, 1] of new tokens, and the layer of a cache that keeps those of all."""

    lengths: Tensor
    layer: int


class How(NamedTuple):
    """How the new tokens of a layer attend to the cached ones and to each other."""

    method: Position | LinearBias  # a position method, or the bias of a fused model
    layout: TokenLayout
    cache: Cache | None  # extended in place
    layer: int  # of the cache
    dropout: float | None  # None while the model does not train
    keep: int | None = None  # how many of the last queries attend; None means all
    steps: Steps | None = None  # of a `Stepped` method


def attend(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
    """Return what the queries gather, [B, keep, H * D], and their weights, if asked for."""
    gathered, weights = _gather(q, k, v, how)
    if how.keep is not None:
        gathered = gathered[:, :, gathered.shape[2] - how.keep :]
    return gathered.transpose(1, 2).flatten(2), weights


def _gather(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
    """As `attend`, but [B, H, keep or T, D]."""
    method, layout, cache, layer, dropout, keep, steps = how
    if layout.packing is not None:
        return _gather_packed(q, k, v, how)
    slopes_say_all = isinstance(method, LinearBias) and method.uses_key_bound and steps is None
    linear: Any = method if slopes_say_all else None
    if (own := attending_layer(cache, layer)) is not None:
        if linear is None:
            raise ValueError(f"{type(own).__name__}: {method.why_not_slopes}")
        fall = linear.fall(q, k.shape[2], NO_OPTIONS)
        return own.attend(q, k, v, fall["slopes"], fall.get("scale"), layout), None
    is_step = dropout is None and layout.are_last and not layout.need_weights
    if cache is not None and is_step and linear is not None and linear.decodes:
        fall = linear.fall(q, cache.get_seq_length(layer) + k.shape[2], NO_OPTIONS)
        growing = growing_layer(cache, layer)
        out = growing and growing.decode(q, k, v, fall["slopes"], fall.get("scale"))
        if out is not None:
            return out, None
    lengths, bound = None if steps is None else steps.lengths, None
    if cache is not None:
        check_rows(cache, layer, len(k))
        k, v = cache.update(k, v, layer)
        if steps is not None:
            lengths = keep_beside(cache, steps.layer, steps.lengths)
        if method.uses_key_bound:
            bound = key_bound(cache.layers[layer])
    if keep is not None:
        layout, q = layout.last_queries(keep), q[:, :, q.shape[2] - keep :]
    num_keys, holes = k.shape[2], layout.holes
    if holes is not None:
        q, k, v = take(q, holes.queries), take(k, holes.keys), take(v, holes.keys)
        lengths = None if lengths is None else take(lengths, holes.keys)
    positions = _positions(lengths)
    if holes is not None and method.counts_hidden:
        positions = holes.keys
    options = AttendOptions(
        key_range=layout.key_range,
        query_start=layout.query_start,
        key_bound=bound,
        dropout=dropout or 0.0,
        positions=positions,
        full_mask=layout.full_mask,
    )
    weights = method.weights(q, k, options) if layout.need_weights else None
    gathered = method.attend(q, k, v, options)
    if holes is None:
        return gathered, weights
    whole = None if weights is None else holes.put_weights_back(weights, num_keys)
    return holes.put_back(gathered), whole


# Where a text starts decides shapes, which no graph can hold.
@torch.compiler.disable
def _gather_packed(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
    """Let every text of a packed batch attend to itself alone: its weights are zero elsewhere."""
    method, packing = how.method, how.layout.packing
    assert packing is not None
    gathered, weights = [], []
    for group in packing.groups:
        q_of, k_of, v_of = (packing.take(x, group) for x in (q, k, v))
        key_range, positions = group.key_range(), None
        if how.steps is not None:
            positions = _positions(packing.take(how.steps.lengths, group))
        elif method.counts_hidden:
            positions = group.positions()
        options = AttendOptions(
            key_range=key_range,
            query_start=None if key_range is None else torch.zeros_like(key_range[:, 0]),
            dropout=how.dropout or 0.0,
            positions=positions,
        )
        gathered.append(method.attend(q_of, k_of, v_of, options))
        if how.layout.need_weights:
            weights.append(method.weights(q_of, k_of, options))
    whole = packing.put_weights_back(weights, q.shape) if weights else None
    return packing.put_back(gathered, q.shape), whole


def _positions(lengths: Tensor | None) -> Tensor | None:
    """[B, H, S]: where keys stand; float64, since far from 0 the nearest differ least."""
    return None if lengths is None else lengths.squeeze(-1).double().cumsum(-1)
