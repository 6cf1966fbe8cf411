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
from linbias.models.decoder.layout import TokenLayout
from linbias.models.decoder.positions import NO_OPTIONS, AttendOptions, LinearBias, Position
from linbias.models.decoder.rows import put_back, put_weights_back


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
    if layout.pages is not None:
        return layout.pages.attend(q, k, v, method, layer), None
    linear: Any = method if isinstance(method, LinearBias) and steps is None else None
    if (own := attending_layer(cache, layer)) is not None:
        if linear is None:
            raise ValueError(
                f"{type(own).__name__}: a cache whose heads keep different keys must be given to "
                "a model with linear biases that do not depend on the text, got one with "
                f"{type(method).__name__}"
            )
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
        if isinstance(method, LinearBias):
            bound = key_bound(cache.layers[layer])
    if layout.is_packed:
        return _by_texts(q, k, v, layout, how, lengths, bound)
    if keep is not None:
        layout, q = layout.last_queries(keep), q[:, :, q.shape[2] - keep :]
    return _by_rows(q, k, v, layout, how, lengths, bound)


def _by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TokenLayout,
    how: How,
    lengths: Tensor | None,
    bound: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Let the tokens of each row attend, and put what they gather back: [B, H, T, D].

    lengths are the steps of all keys, [B, H, S, 1], and bound is that of their norms.
    """
    method, gathered, weights = how.method, [], []
    for queries, keys in zip(layout.queries, layout.keys, strict=True):
        row_q, row_k, row_v = queries.take(q), keys.take(k), keys.take(v)
        positions = keys.places_apart() if method.counts_hidden else None
        if lengths is not None:  # in float64, since far from 0 the nearest differ least
            positions = keys.take(lengths).squeeze(-1).double().cumsum(-1)
        options = AttendOptions(
            key_range=keys.span,
            query_start=keys.start_of(queries),
            key_bound=bound,
            dropout=how.dropout or 0.0,
            positions=positions,
        )
        gathered.append(method.attend(row_q, row_k, row_v, options))
        if layout.need_weights:
            weights.append(method.weights(row_q, row_k, options))
    size = len(q), q.shape[2], k.shape[2]
    whole = put_weights_back(weights, layout.queries, layout.keys, size) if weights else None
    return put_back(gathered, layout.queries, *size[:2]), whole


# Where a text starts decides shapes, which no graph can hold.
_by_texts = torch.compiler.disable(_by_rows)
