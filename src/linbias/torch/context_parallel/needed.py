"""How many keys beyond its shard each head of a process needs."""

import math

import torch
from torch import Tensor

from linbias import _request
from linbias.near_to_far import reach
from linbias.torch.call import run
from linbias.torch.context_parallel.call import Shard
from linbias.torch.context_parallel.halo import LEFT, RIGHT, Halo
from linbias.torch.context_parallel.processes import gather

_NEAR = 128  # keys beside each query whose sum is compared with what lies beyond the shard
_ROWS = 1 << 14  # queries that are asked at once what they need


@torch.no_grad()
def needed_halo(shard: Shard) -> Halo:
    """Find which keys beyond the shards some query, of any process, cannot do without.

    With a ball of center c and radius r around the keys beyond an edge, those from a distance d on
    weigh together at most

        exp(scale * q . c + |scale * q| * r - slope * d) / (1 - exp(-slope))

    and a head needs those up to where that is a share of what the keys near each query weigh: half
    of the tolerance, or a quarter on each side where two are open.
    """
    counts = torch.zeros(2, shard.problem.G, dtype=torch.int64, device=shard.k.device)
    for side, slopes in enumerate(shard.slopes):
        rows, most = _beyond(shard, side)
        if slopes is None or not most.any():
            continue
        for start in range(rows.start, rows.stop, _ROWS):
            some = slice(start, min(start + _ROWS, rows.stop))
            counts[side] = counts[side].maximum(_needed(shard, side, slopes, most, some))
    return Halo(shard.rank, shard.lengths, gather(counts, shard.group).tolist())


def _beyond(shard: Shard, side: int) -> tuple[slice, Tensor]:
    """The own rows that may see beyond an edge; and how many keys [B] are visible there."""
    own, B = shard.own, shard.problem.B
    rows, first, end = own, torch.zeros(B, dtype=torch.int64), torch.tensor([sum(shard.lengths)])
    if shard.documents is not None and shard.problem.T:
        last = own.start if side == LEFT else own.stop - 1
        at = int(torch.searchsorted(shard.documents, last, right=True))
        begin, stop = shard.documents[at - 1 : at + 1].tolist()
        rows = slice(max(begin, own.start), min(stop, own.stop))
        first, end = first + begin, end.new_tensor([stop])
    if shard.key_range is not None:
        first, end = first.maximum(shard.key_range[:, 0]), end.minimum(shard.key_range[:, 1])
    most = own.start - first if side == LEFT else end - own.stop
    if shard.window[side] >= 0:
        most = most.clamp(max=shard.window[side])
    sees = (end > first) & (shard.problem.T > 0)
    return rows, torch.where(sees, most.clamp(min=0), 0)


def _needed(shard: Shard, side: int, slopes: Tensor, most: Tensor, rows: slice) -> Tensor:
    """[G]: how many keys beyond an edge, of the `most` [B] there, some rows need."""
    p, m = shard.problem, slopes.double()[..., None]  # [H, 1] or [B, H, 1]
    q = shard.q[:, :, rows.start - shard.first : rows.stop - shard.first].double()
    # A ball around those of all shards beyond the edge.
    others = range(shard.rank) if side == LEFT else range(shard.rank + 1, shard.size)
    some = [rank for rank in others if shard.lengths[rank]]
    center = shard.centers[some].mean(0)
    away = (shard.centers[some] - center).norm(dim=-1) * (1 + 1e-9)
    radius = (away + shard.radii[some]).amax(0).repeat_interleave(p.H // p.G)[:, None]
    aligned = torch.einsum("bghtd,gd->bght", q.unflatten(1, (p.G, -1)), center).flatten(1, 2)
    norms = abs(p.scale) * q.norm(dim=-1) * (1 + 1e-9)
    # Scores are rounded, those of the keys that are there as well.
    longest = (shard.centers.norm(dim=-1) + shard.radii).amax(0)
    longest = radius + 2 * longest.repeat_interleave(p.H // p.G)[:, None]
    rounding = (p.D + 8) * torch.finfo(slopes.dtype).eps * norms * longest
    lead = p.scale * aligned + norms * radius + rounding - _sums(shard, rows)
    share = p.tolerance / 2 / (1 if p.causal else 2)
    tolerance = math.exp(_request.log_share(share))
    limit = most.to(q.device)[:, None, None].double()
    if shard.positions is None:
        distance = reach(m, lead, tolerance=tolerance, num_keys=limit, xp=torch)
        row = torch.arange(rows.start, rows.stop, device=q.device)
        nearest = row + 1 - shard.own.start if side == LEFT else shard.own.stop - row
        keys = distance.ceil() - nearest
    else:
        distance = reach(m, lead + limit.log(), tolerance=tolerance, num_keys=1, xp=torch)
        # A search among keys takes NaN for the farthest of all, which is no key on the left.
        distance = distance.nan_to_num(math.inf, math.inf) * (1 + 1e-9)
        keys = _keys_within(shard, side, rows, distance)
    # What cannot be bounded is fetched; a hidden side needs nothing.
    keys = keys.nan_to_num(math.inf, math.inf).clamp(min=0).minimum(limit)
    keys = keys.masked_fill(m.isinf(), 0)
    return keys.amax((0, 2)).unflatten(0, (p.G, -1)).amax(1).long()


def _sums(shard: Shard, rows: slice) -> Tensor:
    """[B, H, rows], float64: at most lse, from the own keys beside each query."""
    p, own = shard.problem, shard.own
    keys = slice(max(rows.start - _NEAR, own.start), min(rows.stop + _NEAR, own.stop))
    window = [_NEAR if n < 0 else min(n, _NEAR) for n in shard.window]
    queries = shard.q[:, :, rows.start - own.start : rows.stop - own.start]
    k = shard.k[:, :, keys.start - own.start : keys.stop - own.start]
    ranges = torch.tensor([keys.start, keys.stop]).expand(p.B, p.G, 2)
    places = None if shard.positions is None else shard.positions.detach()
    call = shard.prepare_among(
        keys,
        (queries, k, k[..., :1]),
        shard.slopes,
        ranges,
        rows,
        2.0**-10,
        places,
        window=(window[LEFT], 0 if p.causal else window[RIGHT]),
    )
    return run(*call, "auto", True)[1].double()


def _keys_within(shard: Shard, side: int, rows: slice, distance: Tensor) -> Tensor:
    """[B, H, rows], float64: how many keys beyond an edge lie within a distance of its rows."""
    assert shard.positions is not None
    x = shard.positions.detach()
    # From 0 on, as integers may lie so far from it that floats are coarse.
    x = (x - x[..., :1]).double().expand(*distance.shape[:2], -1)
    own = x[..., rows]
    if side == LEFT:
        beyond = x[..., : shard.own.start].contiguous()
        first = torch.searchsorted(beyond, (own - distance).contiguous(), right=True)
        return (beyond.shape[2] - first).double()
    beyond = x[..., shard.own.stop :].contiguous()
    return torch.searchsorted(beyond, (own + distance).contiguous()).double()
