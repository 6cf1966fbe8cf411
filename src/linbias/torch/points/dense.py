"""Attention over points with the whole bias in memory: the definition in PyTorch operations."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linbias._dispatch import Abilities
from linbias.torch.dropout import keep_mask
from linbias.torch.points.geometry import PointInputs, distances, further

NAME = "dense"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="the whole score matrix, for reading and checking",
    memory="length x length",
    has=("query_points", "dropout", "transformed"),
    higher_derivatives=True,
)
why_not = ABILITIES.lacks


def attention(inputs: PointInputs) -> tuple[Tensor, Tensor]:
    """Return out [B, H, T, E] in q's dtype and lse [B, H, T], wide."""
    weight, lse = attention_weights(inputs)
    if inputs.seed is not None:
        B, H, T, N = weight.shape
        rows, queries, keys = (torch.arange(n, device=weight.device) for n in (B * H, T, N))
        keep = keep_mask(inputs.seed, inputs.dropout, rows.view(B, H), queries, keys)
        weight = torch.where(keep, weight / (1 - inputs.dropout), 0.0)
    v = _blank(inputs.v, _real(inputs)).to(weight.dtype)
    return (weight @ _per_query_head(v, inputs)).to(inputs.q.dtype), lse


def attention_weights(inputs: PointInputs) -> tuple[Tensor, Tensor]:
    """Return softmax(score) [B, H, T, N] before dropout, and lse [B, H, T], both wide."""
    wide, real = inputs.slopes.dtype, _real(inputs)
    own = real if inputs.query_points is None else None  # of the queries
    q, k = _blank(inputs.q, own).to(wide), _blank(inputs.k, real).to(wide)
    score = q @ _per_query_head(k, inputs).mT * inputs.scale
    apart, away = (x.to(wide)[:, None] for x in _distances(inputs, real))
    score = score - inputs.slopes[:, :, None, None] * apart
    lost = inputs.slopes[..., None] * away
    if not score.shape[-1]:
        return score, score.new_full(score.shape[:-1], -torch.inf)
    if real is None:
        return score.softmax(-1), score.logsumexp(-1) - lost
    # A row that sees no key gets some scores, so that no gradient is NaN, and then no weights.
    empty = ~real.any(1)[:, None] if own is None else ~own
    empty = empty[:, None, :, None]
    score = score.masked_fill(~(real[:, None, None] | empty), -torch.inf)
    lse = (score.logsumexp(-1) - lost).masked_fill(empty[..., 0], -torch.inf)
    return score.softmax(-1).masked_fill(empty, 0.0), lse


def _real(inputs: PointInputs) -> Tensor | None:
    """[B, N]: which tokens are no padding; None: all."""
    if inputs.num_points is None:
        return None
    tokens = torch.arange(inputs.k.shape[2], device=inputs.k.device)
    return tokens < inputs.num_points[:, None]


def _blank(array: Tensor, real: Tensor | None) -> Tensor:
    """Zero padding in [B, heads, N, size]: it may hold NaN."""
    return array if real is None else array.masked_fill(~real[:, None, :, None], 0.0)


def _distances(inputs: PointInputs, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B or 1, T, N], 0 where one of them stands nowhere, less those to the nearest key, [B or 1,
    T]: softmax does not see what all lose, but it would cost a narrow type digits.
    """
    keys, first = inputs.points, inputs.global_tokens  # which come first
    if real is not None:
        keys = keys.where(real[:, first:, None], 0.0)
    own = inputs.query_points is None
    asking = keys if inputs.query_points is None else inputs.query_points
    apart = distances(asking, keys, inputs.manhattan)
    if own or first or not keys.shape[1]:  # the query itself is near, or what stands nowhere is
        return F.pad(apart, (first, 0, first if own else 0, 0)), keys.new_zeros(1, 1)
    seen = apart if real is None else apart.masked_fill(~real[:, None], torch.inf)
    least = seen.argmin(-1, keepdim=True)
    nearest, away = (torch.take_along_dim(x, least, axis) for x, axis in ((keys, 1), (apart, 2)))
    return further(asking, keys, nearest, inputs.manhattan), away.squeeze(2)


def _per_query_head(array: Tensor, inputs: PointInputs) -> Tensor:
    """[B, G, ...] -> [B, H, ...]."""
    return array.repeat_interleave(inputs.q.shape[1] // max(1, inputs.k.shape[1]), dim=1)
