"""A process's share of a sequence: what it tells others, the keys it needs, its attention."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from linbias import _request, _seen, _values
from linbias.torch.call import Slopes, as_int64, as_slopes, autocast, describe, prepare, run
from linbias.torch.context_parallel.halo import (
    LEFT,
    RIGHT,
    Fetch,
    Group,
    Plan,
    named_failures,
    process_group,
    rank_and_size,
)
from linbias.torch.context_parallel.places import Gather, keys_within
from linbias.torch.operators.operator import Inputs
from linbias.torch.packed.varlen import attention_varlen as _attention_varlen
from linbias.torch.standing import Positions, as_tensors, of_rows

_NAME = "context_parallel.attention"
_BLOCK = 64  # queries that are compared with the keys around them for a first idea of their sums
_ROWS = 1 << 14  # queries that are asked at once what they need
OUT_OF_ORDER = -2  # the number of a first token, where those of a share do not follow each other


@dataclass(frozen=True)
class Table:
    """What the first gather tells: lengths, rank 0's seed, and balls that keys lie in."""

    lengths: list[int]
    seed: int
    centers: Tensor  # [ranks, G, D], float64
    radii: Tensor  # [ranks, G]

    def ball(self, ranks: range) -> tuple[Tensor, Tensor]:
        """Center [G, D] and radius [G] of a ball around the keys of some shares."""
        some = [rank for rank in ranks if self.lengths[rank]]
        centers = self.centers[some]
        center = centers.mean(0)
        radius = ((centers - center).norm(dim=-1) * (1 + 1e-9) + self.radii[some]).amax(0)
        return center, radius


class Share:
    """A process's arguments, checked, and what the processes tell each other of their keys."""

    # Whether a model runs on shares: key_range and gradients of slopes are those of the share.
    within = False
    begins: int | None = None  # the number that the first token must have; None for any
    documents: np.ndarray[Any, Any] | None = None  # where they begin and end; None for one
    own_places: Tensor | None = None  # [B, 1 or H, n], where the own keys stand; None: counted
    places: Tensor | None = None  # [B, 1 or H, total], of the keys of all shares

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Slopes | None,
        group: Group,
        *,
        right_slopes: Slopes | None = None,
        key_range: Tensor | None = None,
        positions: Positions | None = None,
        window: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        self.group = group
        self.rank, self.size = rank_and_size(group)
        self.q, self.k, self.v = q, k, v = autocast(q, k, v)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.given_slopes = [
            None if x is None else as_slopes(_NAME, name, x, wide, q.device)
            for name, x in (("slopes", slopes), ("right_slopes", right_slopes))
        ]
        placed: dict[str, Any] = {} if positions is None else {"positions": positions}
        as_tensors(_NAME, placed, q.device)
        inputs, self.problem = prepare(
            _NAME,
            q,
            k,
            v,
            self.given_slopes[0],
            right_slopes=self.given_slopes[1],
            **placed,
            **options,
        )
        p = self.problem
        self.window = _seen.check_window(_NAME, window, p.causal)
        if p.any_order:
            raise ValueError(f"{_NAME}: positions must not fall; sort the whole sequence by them")
        if positions is not None:
            x = of_rows(placed["positions"], p.B)
            self.own_places = x if x.is_floating_point() else x.long()
        if p.T != p.S:
            raise ValueError(f"{_NAME}: q and k must be equally long, got {p.T} and {p.S}")
        if key_range is not None and tuple(key_range.shape) != (p.B, 2):
            raise ValueError(
                f"{_NAME}: key_range must have shape [B, 2] = {[p.B, 2]},"
                f" got {list(key_range.shape)}"
            )
        if key_range is not None:
            described = describe("key_range", key_range, _NAME)
            _request.check_holds(_NAME, "key_range", described.dtype, "integers")
            key_range = as_int64(key_range.cpu())
        self.key_range = key_range
        self.slopes = inputs.left.detach(), None if inputs.right is None else inputs.right.detach()
        self.seed = inputs.seed
        # Half of the tolerance for what is not fetched on the open sides; half for the kernel.
        share = p.tolerance / 2 / (1 if p.causal else 2)
        self.log_share = _request.log_share(share)

    # What the processes tell each other

    @torch.no_grad()
    def meet(self) -> Table:
        """The first gather: lengths and balls. All calls must be alike."""
        p, k = self.problem, self.k.double()
        center = k.mean((0, 2)) if p.B * p.S else k.new_zeros(p.G, p.D)
        center = center.nan_to_num(0.0, 0.0, 0.0)
        radius = k.new_zeros(p.G)
        if p.B * p.S:
            # A key or value that is not finite lies in no ball: all processes fetch it.
            distances = (k - center[:, None]).norm(dim=-1) * (1 + 1e-9)
            distances = distances + 0.0 * self.v.double().sum(-1)
            radius = distances.amax((0, 2)).nan_to_num(math.inf, math.inf)
        alike = {
            **{name: getattr(p, name) for name in "BHGDE"},
            "dtype": _request.FLOATS.index(p.dtype),
            **{name: getattr(p, name) for name in ("causal", "scale", "tolerance", "dropout")},
            "slopes": _checksum(self.slopes[LEFT]),
            "right_slopes": _checksum(self.slopes[RIGHT]),
            "key_range": 0 if self.within else _checksum(self.key_range),
            **{f"window[{side}]": self.window[side] for side in (LEFT, RIGHT)},
            "positions": self._kind_of_places(),
            "cu_seqlens": 0 if self.documents is None else zlib.crc32(self.documents.tobytes()),
        }
        seed = 0 if self.seed is None else int(self.seed)
        own = [p.T, seed, -1 if self.begins is None else self.begins, *alike.values()]
        ranges = torch.tensor([[0, p.T]] * p.B) if self.key_range is None else self.key_range
        numbers = k.new_tensor([float(x) for x in own])
        told = torch.cat([numbers, radius, center.flatten(), ranges.flatten().to(k)])
        # Of one size for most shapes, so that processes whose shapes differ understand each other.
        size = max(1024, 1 << (len(told) - 1).bit_length())
        rows = self._gather(torch.nn.functional.pad(told, (0, size - len(told))))
        of_ranks = rows[:, : len(own)].tolist()
        for i, name in enumerate(alike, len(own) - len(alike)):
            for rank, row in enumerate(of_ranks):
                if row[i] != of_ranks[0][i]:
                    here, there = (_told(name, of_ranks[r][i]) for r in (0, rank))
                    raise ValueError(
                        f"{_NAME}: {name} must be the same on all processes, got {here} on rank 0"
                        f" and {there} on rank {rank}"
                    )
        lengths = [int(row[0]) for row in of_ranks]
        offsets = [sum(lengths[:rank]) for rank in range(self.size)]
        self.offset = offsets[self.rank]
        for rank, (_, _, begins, *_) in enumerate(of_ranks):
            if begins == OUT_OF_ORDER:
                raise ValueError(
                    f"{_NAME}: position_ids of a piece must count on from token to token, but"
                    f" those on rank {rank} do not: pieces are contiguous"
                    " (context_parallel.shard), not made of head and tail"
                )
            if begins not in (-1, offsets[rank]) and lengths[rank]:
                raise ValueError(
                    f"{_NAME}: pieces must lie in the order of ranks, got position {begins:.0f} at"
                    f" the start of that on rank {rank}, before which there are {offsets[rank]}"
                    " tokens"
                )
        radii, centers, ranges = rows[:, len(own) : len(told)].split([p.G, p.G * p.D, 2 * p.B], 1)
        self.gather_places(lengths)
        if self.within:
            self._join_ranges(ranges.long().cpu().unflatten(1, (p.B, 2)), lengths, offsets)
        return Table(lengths, int(of_ranks[0][1]), centers.unflatten(1, (p.G, p.D)), radii)

    def _kind_of_places(self) -> int:
        """A number for the type of positions, and whether heads have their own; -1 for none."""
        x = self.own_places
        if x is None:
            return -1
        kind = _request.HOLDS["positions"][0].index(str(x.dtype).removeprefix("torch."))
        return 2 * kind + (x.shape[1] > 1)

    def gather_places(self, lengths: list[int]) -> None:
        """Where the keys of all shares stand, if they have positions."""
        if self.own_places is None or self.places is not None or not sum(lengths):
            return
        with torch.enable_grad():  # `meet` counts without
            self.places = Gather.apply(self.own_places, lengths, self.rank, self.group)
        x = self.places.detach()
        falls = (~(x[..., 1:] >= x[..., :-1])).any(0).any(0).nonzero().flatten().tolist()
        if falls:
            raise ValueError(
                f"{_NAME}: positions must not fall from piece to piece, but token {falls[0] + 1}"
                " of the whole sequence stands before its neighbour"
            )

    def _join_ranges(self, ranges: Tensor, lengths: list[int], offsets: list[int]) -> None:
        """Make a key range of the whole sequence of those of the shares [ranks, B, 2]."""
        counts = (ranges[..., 1] - ranges[..., 0]).clamp(min=0)
        if bool((counts == torch.tensor(lengths)[:, None]).all()):
            self.key_range = None
            return
        whole = ranges + torch.tensor(offsets)[:, None, None]
        total = sum(lengths)
        empty = (counts == 0)[..., None]
        first = whole.masked_fill(empty, total)[..., 0].amin(0)
        end = whole.masked_fill(empty, 0)[..., 1].amax(0)
        broken = (counts.sum(0) != (end - first).clamp(min=0)).nonzero().flatten().tolist()
        if broken:
            raise ValueError(
                f"{_NAME}: attention_mask must mark one unbroken run of tokens per row, also"
                f" across pieces, got a gap in row {broken[0]}"
            )
        self.key_range = torch.stack([first.minimum(end), end], -1)

    def agree(self, table: Table, needs: list[list[int]]) -> Plan:
        """The second gather: how many keys each process fetches."""
        rows = self._gather(torch.tensor(needs, dtype=torch.int64, device=self.k.device))
        return Plan(self.rank, table.lengths, rows.tolist(), table.seed)

    def _gather(self, x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(self.size)]
        with named_failures():
            dist.all_gather(rows, x, group=process_group(self.group))
        return torch.stack(rows)

    # How many keys are needed

    @torch.no_grad()
    def needs(self, table: Table, lse: Tensor | None = None) -> list[list[int]]:
        """[2][G]: how many keys beyond each edge some query, with this lse, cannot do without."""
        keys = np.zeros((2, self.problem.G), np.int64)
        for side, slopes in enumerate(self.slopes):
            others = range(self.rank) if side == LEFT else range(self.rank + 1, self.size)
            most, looking = self._within_reach(table, side), self.own_document(side)
            if slopes is None or not most.max(initial=0):
                continue
            ball = table.ball(others)
            for start in range(looking.start, looking.stop, _ROWS):
                rows = slice(start, min(start + _ROWS, looking.stop))
                inwards = start if side == LEFT else looking.stop - rows.stop
                needed = self._needs_beyond(side, slopes, *ball, most, rows, inwards, lse)
                keys[side] = np.maximum(keys[side], needed)
        return keys.tolist()

    def own_document(self, side: int) -> slice:
        """The own rows of the document at an edge: all, where there are no documents."""
        rows = slice(0, self.problem.T)
        if self.documents is None or not self.problem.T:
            return rows
        begin, end = (x - self.offset for x in self._document_at(side))
        return slice(max(begin, 0), min(end, rows.stop))

    def _document_at(self, side: int) -> tuple[int, int]:
        """Begin and end, in the whole sequence, of the document of the first or last own row."""
        assert self.documents is not None
        row = self.offset if side == LEFT else self.offset + self.problem.T - 1
        at = int(np.searchsorted(self.documents, row, "right"))
        return int(self.documents[at - 1]), int(self.documents[at])

    def _within_reach(self, table: Table, side: int) -> np.ndarray[Any, Any]:
        """[B]: keys between an edge and the far end of key range, document and sequence."""
        total = sum(table.lengths)
        if not self.problem.T:
            return np.zeros(self.problem.B, np.int64)
        ranges = np.array([[0, total]] * self.problem.B).reshape(-1, 2)
        if self.documents is not None:
            ranges[:] = self._document_at(side)
        if self.key_range is not None:
            ranges = self.key_range.numpy()
            _values.check_ranges(_NAME, "key_range", ranges, total)
        first, end = ranges.T
        beyond = self.offset - first if side == LEFT else end - (self.offset + self.problem.T)
        if self.window[side] >= 0:
            beyond = beyond.clip(max=self.window[side])
        return np.where(end > first, beyond.clip(0), 0)

    def _needs_beyond(
        self,
        side: int,
        slopes: Tensor,
        center: Tensor,
        radius: Tensor,
        most: np.ndarray[Any, Any],
        rows: slice,
        inwards: int,
        lse: Tensor | None,
    ) -> np.ndarray[Any, Any]:
        """[G]: how many keys in balls (center [G, D], radius [G]) beyond an edge some rows need.

        The rows lie `inwards` from the edge, beyond which `most` [B] keys are visible. All from a
        distance d on weigh at most exp(scale q . c + |scale q| r - m d) / (1 - exp(-m)).
        """
        p, m = self.problem, slopes.double()[..., None]  # [H, 1] or [B, H, 1]
        q = self.q[:, :, rows].double()
        aligned = torch.einsum("bghtd,gd->bght", q.unflatten(1, (p.G, -1)), center)
        aligned = p.scale * aligned.flatten(1, 2)
        norms = abs(p.scale) * q.norm(dim=-1) * (1 + 1e-9)
        reach = radius.repeat_interleave(p.H // p.G)[:, None]
        # Scores are rounded, those of the keys that are there as well.
        largest = reach + center.norm(dim=-1).amax() + self._longest_key
        rounding = (p.D + 8) * torch.finfo(slopes.dtype).eps * norms * largest
        best = aligned + norms * reach + rounding
        limit = torch.from_numpy(most).to(q.device)[:, None, None].double()
        count = torch.minimum(-torch.log(-torch.expm1(-m)), limit.log())
        between = torch.arange(q.shape[2], device=q.device) + inwards
        if side == RIGHT:
            between = between.flip(0)

        def beyond(lse: Tensor) -> Tensor:
            """[B, H, n]: the key at a distance of this and more may go."""
            weighs = best - lse.double() - self.log_share
            if self.places is None:
                keys = ((weighs + count) / m).ceil() - 1 - between
            else:
                distance = (weighs + limit.log()) / m * (1 + 1e-9)
                distance = torch.where(distance.isnan() | (m == 0), math.inf, distance)
                share = slice(self.offset, self.offset + p.T)
                keys = keys_within(self.places.detach(), share, side, rows, distance)
            # What cannot be bounded is fetched; a hidden side needs nothing.
            keys = torch.where(keys.isnan() | (m == 0), math.inf, keys).clamp(min=0)
            return torch.where(m.isinf(), 0.0, torch.minimum(keys, limit))

        if lse is None:
            # A query's own key is a first idea of its sum; where it is not enough, keys around it.
            keys = beyond(self._own_scores(rows))
            asking = (keys > 0).any(0).any(0).nonzero().flatten()
            if len(asking):
                first, last = int(asking[0]), int(asking[-1]) + 1
                lse = torch.full_like(keys, -math.inf)
                around = slice(rows.start + first, rows.start + last)
                sums = self._sums_around if self.places is None else self._own_sums
                lse[:, :, first:last] = sums(around)
                keys = torch.minimum(keys, beyond(lse))
        else:
            keys = beyond(lse[:, :, rows])
        of_head = keys.amax((0, 2)).unflatten(0, (p.G, -1)).amax(1)
        return of_head.long().cpu().numpy()

    @cached_property
    def _longest_key(self) -> Tensor:
        """[], of the own keys."""
        return torch.linalg.vector_norm(self.k.detach(), dim=-1, dtype=torch.float64).amax()

    def _own_scores(self, rows: slice) -> Tensor:
        """[B, H, rows]: the score of each query's own key, -inf where the key range hides it."""
        p = self.problem
        keys = self.k[:, :, rows].double().repeat_interleave(p.H // p.G, 1)
        scores = p.scale * (self.q[:, :, rows].double() * keys).sum(-1)
        if self.key_range is not None:
            own = torch.arange(rows.start, rows.stop) + self.offset
            first, end = self.key_range[:, :1], self.key_range[:, 1:]
            hidden = ((own < first) | (own >= end)).to(scores.device)
            scores = scores.masked_fill(hidden[:, None], -math.inf)
        return scores

    def _sums_around(self, rows: slice) -> Tensor:
        """[B, H, rows]: at most lse, from the own keys within a block of each query."""
        p = self.problem
        q, k = self.q[:, :, rows], self.k[:, :, rows]
        n = q.shape[2]
        blocks, after = -(-n // _BLOCK), 0 if p.causal else _BLOCK
        more = blocks * _BLOCK - n
        pad = torch.nn.functional.pad
        queries = pad(q, (0, 0, 0, more)).unflatten(2, (blocks, _BLOCK))
        queries = queries.transpose(1, 2).flatten(0, 1)
        keys = pad(k, (0, 0, _BLOCK, more + after)).unfold(2, 2 * _BLOCK + after, _BLOCK)
        keys = keys.permute(0, 2, 1, 4, 3).flatten(0, 1)
        # The keys of block j are rows j * _BLOCK and on of the padded ones.
        ranges = torch.tensor([[0, n]] * p.B)
        if self.key_range is not None:
            ranges = (self.key_range - self.offset - rows.start).clamp(0, n)
        starts = torch.arange(blocks) * _BLOCK
        ranges = (ranges[:, None] + _BLOCK - starts[:, None]).clamp(0, keys.shape[2]).flatten(0, 1)
        ranges[:, 1] = ranges[:, 1].maximum(ranges[:, 0])
        slopes = [
            s if s is None or s.dim() == 1 else s.repeat_interleave(blocks, 0) for s in self.slopes
        ]
        starts = torch.full((p.B * blocks,), _BLOCK, device=q.device)
        arrays = queries, keys, keys[..., :1]
        prepared = self._prepare(arrays, slopes, ranges, starts, tolerance=2.0**-10)
        _, lse = run(*prepared, "auto", True)
        return lse.unflatten(0, (p.B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :n].double()

    def _own_sums(self, rows: slice) -> Tensor:
        """[B, H, rows]: at most lse, from the own keys, where these have positions."""
        return self._sums_of_share[:, :, rows]

    @cached_property
    def _sums_of_share(self) -> Tensor:
        p = self.problem
        ranges = torch.tensor([[0, p.T]] * p.B)
        if self.key_range is not None:
            ranges = (self.key_range - self.offset).clamp(0, p.T)
        starts = torch.zeros(p.B, dtype=torch.int64, device=self.q.device)
        arrays = self.q, self.k, self.k[..., :1]
        own = slice(self.offset, self.offset + p.T)
        prepared = self._prepare(arrays, self.slopes, ranges, starts, 2.0**-10, own)
        return run(*prepared, "auto", True)[1].double()

    # What is computed

    def given(self, halo: int | Sequence[int], lengths: Sequence[int] | None) -> Plan:
        """The plan of numbers that all processes know."""
        p = self.problem
        if self.within and self.key_range is not None:
            raise ValueError(
                f"{_NAME}: halo must be 'negotiate' where a mask marks padding, got {halo}"
            )
        numbers = [halo] * p.G if isinstance(halo, int) else [int(n) for n in halo]
        if len(numbers) != p.G or any(n < 0 for n in numbers):
            raise ValueError(
                f"{_NAME}: halo must be a number, or one for each of {p.G} key/value heads,"
                f" at least 0, got {halo}"
            )
        lengths = [p.T] * self.size if lengths is None else [int(n) for n in lengths]
        if len(lengths) != self.size or lengths[self.rank] != p.T:
            raise ValueError(
                f"{_NAME}: lengths must be those of the pieces on {self.size} processes,"
                f" {p.T} on rank {self.rank}, got {lengths}"
            )
        self.offset = sum(lengths[: self.rank])
        self.gather_places(lengths)
        before = [sum(lengths[:rank]) for rank in range(self.size)]
        after = [sum(lengths[rank + 1 :]) for rank in range(self.size)]
        counts = [
            [[min(n, left) for n in numbers], [0 if p.causal else min(n, right) for n in numbers]]
            for left, right in zip(before, after, strict=True)
        ]
        seed = 0
        if self.seed is not None:
            drawn = self.seed.clone()
            with named_failures():
                dist.broadcast(drawn, group=process_group(self.group), group_src=0)
            seed = int(drawn)
        return Plan(self.rank, lengths, counts, seed)

    def fetch(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values [B, G, left halo + n + right halo, size], and the slopes."""
        summed = [None if self.within else s for s in self.given_slopes]
        *halos, left, right = Fetch.apply(self.k, self.v, *summed, plan, self.group)
        k, v = (torch.cat([halos[i], x, halos[i + 2]], 2) for i, x in enumerate((self.k, self.v)))
        if self.within:
            left, right = self.given_slopes
        return k, v, left, right

    def attend(self, plan: Plan, implementation: str) -> tuple[Tensor, Tensor]:
        """Out and lse of the own queries, over the own keys and those that are fetched."""
        p = self.problem
        width, _ = plan.widths()
        k, v, *slopes = self.fetch(plan)
        left, right = (torch.tensor(counts) for counts in plan.counts[self.rank])
        ranges = torch.stack([width - left, width + p.T + right], -1).expand(p.B, -1, -1)
        if self.key_range is not None:
            given = (self.key_range - (self.offset - width))[:, None]
            first = ranges[..., 0].maximum(given[..., 0])
            ranges = torch.stack([first, ranges[..., 1].minimum(given[..., 1]).maximum(first)], -1)
            ranges = ranges.clamp(max=k.shape[2])
        starts = torch.full((p.B,), width, device=k.device)
        own = slice(self.offset - width, self.offset - width + k.shape[2])
        inputs, problem = self._prepare(
            (self.q, k, v), slopes, ranges, starts, p.tolerance / 2, own
        )
        if p.dropout:
            # The mask counts queries and keys in the whole sequence.
            seed = torch.tensor([plan.seed, self.offset, self.offset - width], device=k.device)
            inputs = inputs._replace(seed=seed, dropout=p.dropout)
            problem = replace(problem, dropout=p.dropout)
        out, lse = run(inputs, problem, implementation, True)
        return out, lse

    def _prepare(
        self,
        arrays: tuple[Tensor, Tensor, Tensor],
        slopes: Sequence[Tensor | None],
        ranges: Tensor,
        starts: Tensor,
        tolerance: float,
        keys: slice | None = None,
    ) -> tuple[Inputs, _request.Problem]:
        """A call among the own keys, and those that were fetched: `keys` of the whole sequence."""
        placed = {}
        if self.places is not None and keys is not None:
            x = self.places[..., keys]
            placed["positions"] = x if x.shape[1] == self.problem.H else x[:, 0]
        return prepare(
            _NAME,
            *arrays,
            slopes[LEFT],
            right_slopes=slopes[RIGHT],
            causal=self.problem.causal,
            scale=self.problem.scale,
            key_range=ranges.to(starts.device),
            query_start=starts,
            tolerance=tolerance,
            window=self.window,
            lse=True,
            **placed,
        )

    def attend_documents(self, plan: Plan, implementation: str) -> tuple[Tensor, Tensor]:
        """`attend` within documents: out [n, H, E] and lse [n, H]."""
        p, (left, right) = self.problem, plan.widths()
        assert self.documents is not None
        k, v, *slopes = self.fetch(plan)
        edges = np.unique((self.documents - self.offset).clip(0, p.T))  # those of the own rows
        lengths = np.diff(edges)
        ranges = np.repeat(np.stack([0 * lengths, lengths], -1)[:, None], p.G, 1)
        starts = 0 * lengths
        # What is fetched belongs to the documents at the edges.
        if len(lengths):
            counts = np.array(plan.counts[self.rank])
            lengths[0] += left
            starts[0] = left
            ranges[0] += left
            ranges[0, :, 0] -= counts[LEFT]
            lengths[-1] += right
            ranges[-1, :, 1] += counts[RIGHT]
        keys = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
        q, k, v = (x[0].transpose(0, 1) for x in (self.q, k, v))
        out, lse = _attention_varlen(
            q,
            k,
            v,
            torch.from_numpy(edges if p.T else edges[:1]),
            keys,
            slopes[LEFT],
            right_slopes=slopes[RIGHT],
            causal=p.causal,
            scale=p.scale,
            key_range=torch.from_numpy(ranges),
            query_start=torch.from_numpy(starts),
            window=self.window,
            tolerance=p.tolerance / 2,
            implementation=implementation,
            return_lse=True,
        )
        return out, lse

    def refuse_too_few(self, plan: Plan, lse: Tensor) -> None:
        """Raise on all processes if a head of one should have fetched more."""
        table = self.meet()
        needs = self.agree(table, self.needs(table, lse.detach())).counts
        for rank, (needed, fetched) in enumerate(zip(needs, plan.counts, strict=True)):
            for side, most, had in zip(("left", "right"), needed, fetched, strict=True):
                for g, (n, m) in enumerate(zip(most, had, strict=True)):
                    if n > m:
                        raise ValueError(
                            f"{_NAME}: halo must be at least {n} for key/value head {g} on the"
                            f" {side} of rank {rank}, got {m}"
                        )


def _told(name: str, number: float) -> str:
    if name == "positions":
        kind = _request.HOLDS["positions"][0][int(number) // 2]
        return "none" if number < 0 else f"{kind} of {'each head' if number % 2 else 'all heads'}"
    if name == "dtype":
        return _request.FLOATS[int(number)]
    is_checksum = name in ("slopes", "right_slopes", "key_range", "cu_seqlens")
    return f"{'checksum ' if is_checksum else ''}{number:.10g}"


def _checksum(x: Tensor | None) -> int:
    return -1 if x is None else zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes())
