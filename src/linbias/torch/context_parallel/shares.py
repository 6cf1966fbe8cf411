"""A process's share of a sequence: what it tells the others, how many of their keys it needs, and attention over them.

`linbias.torch.context_parallel` is what programs call, and tells the steps.
"""

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

from linbias import _request
from linbias.torch.call import Slopes, as_slopes, autocast, prepare, run
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
from linbias.torch.packed.varlen import attention_varlen as _attention_varlen

_NAME = "context_parallel.attention"
_BLOCK = 64  # queries that are compared with the keys around them for a first idea of their sums
_ROWS = 1 << 14  # queries that are asked at once what they need
OUT_OF_ORDER = -2  # the number of a first token, where those of a share do not follow each other


@dataclass(frozen=True)
class Table:
    """What the first gather tells of all shares: lengths, rank 0's seed of dropout, and balls that keys lie in.

    Attributes:
        centers: [ranks, G, D], float64.
        radii: [ranks, G].
    """

    lengths: list[int]
    seed: int
    centers: Tensor
    radii: Tensor

    def ball(self, ranks: range) -> tuple[Tensor, Tensor]:
        """Center [G, D] and radius [G] of a ball around the keys of some shares."""
        some = [rank for rank in ranks if self.lengths[rank]]
        centers = self.centers[some]
        center = centers.mean(0)
        radius = ((centers - center).norm(dim=-1) * (1 + 1e-9) + self.radii[some]).amax(0)
        return center, radius


class Share:
    """A process's arguments, checked, and what the processes tell each other before and after they exchange keys.

    Attributes:
        within: Whether a model runs on shares (`use`): key_range counts within the share, and gradients of slopes
            are those of the share.
        begins: The number that the first token must have; None for any.
        documents: [documents + 1], where documents begin and end in the whole sequence, none of which sees another;
            None for one.
    """

    within = False
    begins: int | None = None
    documents: np.ndarray[Any, Any] | None = None

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
        inputs, self.problem = prepare(
            _NAME, q, k, v, self.given_slopes[0], right_slopes=self.given_slopes[1], **options
        )
        p = self.problem
        if p.T != p.S:
            raise ValueError(f"{_NAME}: q and k must be equally long, got {p.T} and {p.S}")
        if key_range is not None and tuple(key_range.shape) != (p.B, 2):
            raise ValueError(
                f"{_NAME}: key_range must have shape [B, 2] = {[p.B, 2]}, got {list(key_range.shape)}"
            )
        self.key_range = None if key_range is None else key_range.to("cpu", torch.int64)
        self.slopes = inputs.left.detach(), None if inputs.right is None else inputs.right.detach()
        self.seed = inputs.seed
        # Half of the tolerance for what is not fetched, the same for each open side; half for the kernel.
        share = p.tolerance / 2 / (1 if p.causal else 2)
        self.log_share = math.log(share) if share else -math.inf

    # What the processes tell each other

    @torch.no_grad()
    def meet(self) -> Table:
        """The first gather: lengths, and for each head a ball that the keys of a share lie in. All calls must be alike."""
        p, k = self.problem, self.k.double()
        center = k.mean((0, 2)) if p.B * p.S else k.new_zeros(p.G, p.D)
        center = center.nan_to_num(0.0, 0.0, 0.0)
        radius = k.new_zeros(p.G)
        if p.B * p.S:
            # A key or value that is not finite lies in no ball: all fetch it, and it shows as it would in one process.
            distances = (k - center[:, None]).norm(dim=-1) * (
                1 + 1e-9
            ) + 0.0 * self.v.double().sum(-1)
            radius = distances.amax((0, 2)).nan_to_num(math.inf, math.inf)
        alike = {
            **{name: getattr(p, name) for name in "BHGDE"},
            "dtype": _request.FLOATS.index(p.dtype),
            **{name: getattr(p, name) for name in ("causal", "scale", "tolerance", "dropout")},
            "slopes": _checksum(self.slopes[LEFT]),
            "right_slopes": _checksum(self.slopes[RIGHT]),
            "key_range": 0 if self.within else _checksum(self.key_range),
            "cu_seqlens": 0 if self.documents is None else zlib.crc32(self.documents.tobytes()),
        }
        seed = 0 if self.seed is None else int(self.seed)
        own = [p.T, seed, -1 if self.begins is None else self.begins, *alike.values()]
        ranges = torch.tensor([[0, p.T]] * p.B) if self.key_range is None else self.key_range
        told = torch.cat([k.new_tensor([float(x) for x in own]), radius, center.flatten(), ranges.flatten().to(k)])  # fmt: skip
        # Of one size for most shapes, so that processes whose shapes differ still understand each other.
        size = max(1024, 1 << (len(told) - 1).bit_length())
        rows = self._gather(torch.nn.functional.pad(told, (0, size - len(told))))
        numbers = rows[:, : len(own)].tolist()
        for i, name in enumerate(alike, len(own) - len(alike)):
            for rank, row in enumerate(numbers):
                if row[i] != numbers[0][i]:
                    here, there = (_told(name, numbers[r][i]) for r in (0, rank))
                    raise ValueError(
                        f"{_NAME}: {name} must be the same on all processes, got {here} on rank 0 and {there} on rank {rank}"
                    )
        lengths = [int(row[0]) for row in numbers]
        offsets = [sum(lengths[:rank]) for rank in range(self.size)]
        self.offset = offsets[self.rank]
        for rank, row in enumerate(numbers):
            if row[2] == OUT_OF_ORDER:
                raise ValueError(
                    f"{_NAME}: position_ids of a piece must count on from token to token, but those on rank {rank} do not: pieces are "
                    "contiguous (context_parallel.shard), not made of head and tail"
                )
            if row[2] not in (-1, offsets[rank]) and lengths[rank]:
                raise ValueError(
                    f"{_NAME}: pieces must lie in the order of ranks, got position {row[2]:.0f} at the start of that on rank {rank}, "
                    f"before which there are {offsets[rank]} tokens"
                )
        radii, centers, ranges = rows[:, len(own) : len(told)].split([p.G, p.G * p.D, 2 * p.B], 1)
        if self.within:
            self._join_ranges(ranges.long().cpu().unflatten(1, (p.B, 2)), lengths, offsets)
        return Table(lengths, int(numbers[0][1]), centers.unflatten(1, (p.G, p.D)), radii)

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
                f"{_NAME}: attention_mask must mark one unbroken run of tokens per row, also across pieces, got a gap in row {broken[0]}"
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
        """[2][G]: how many keys beyond each edge some query cannot do without.

        Args:
            lse: [B, H, n], of all queries; None: at least what the keys around them in the own share make it.
        """
        found = np.zeros((2, self.problem.G), np.int64)
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
                found[side] = np.maximum(found[side], needed)
        return found.tolist()

    def own_document(self, side: int) -> slice:
        """The own rows of the document that lies at an edge: all rows, where there are no documents."""
        rows = slice(0, self.problem.T)
        if self.documents is None or not self.problem.T:
            return rows
        begin, end = (x - self.offset for x in self._document_at(side))
        return slice(max(begin, 0), min(end, rows.stop))

    def _document_at(self, side: int) -> tuple[int, int]:
        """Begin and end, in the whole sequence, of the document that the first or last own row belongs to."""
        assert self.documents is not None
        row = self.offset if side == LEFT else self.offset + self.problem.T - 1
        at = int(np.searchsorted(self.documents, row, "right"))
        return int(self.documents[at - 1]), int(self.documents[at])

    def _within_reach(self, table: Table, side: int) -> np.ndarray[Any, Any]:
        """[B]: keys between an edge and the far end of the key range, of the document there, or of the sequence."""
        total = sum(table.lengths)
        if not self.problem.T:
            return np.zeros(self.problem.B, np.int64)
        ranges = np.array([[0, total]] * self.problem.B).reshape(-1, 2)
        if self.documents is not None:
            ranges[:] = self._document_at(side)
        if self.key_range is not None:
            ranges = self.key_range.numpy()
            _request.check_key_range_values(_NAME, ranges, total)
        first, end = ranges.T
        beyond = self.offset - first if side == LEFT else end - (self.offset + self.problem.T)
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
        """[G]: how many keys some rows need of those in balls around center [G, D] with radius [G] beyond an edge.

        The rows begin, or on the right end, `inwards` from the edge, beyond which at most `most` [B] are visible.
        All keys from a distance d on weigh at most exp(scale q . c + |scale q| r - m d) / (1 - exp(-m)).
        """
        p, m = self.problem, slopes.double()[..., None]  # [H, 1] or [B, H, 1]
        q = self.q[:, :, rows].double()
        aligned = p.scale * torch.einsum(
            "bghtd,gd->bght", q.unflatten(1, (p.G, -1)), center
        ).flatten(1, 2)
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
            keys = ((best + count - lse.double() - self.log_share) / m).ceil() - 1 - between
            # What cannot be bounded is fetched; a hidden side needs nothing.
            keys = torch.where(keys.isnan() | (m == 0), math.inf, keys).clamp(min=0)
            return torch.where(m.isinf(), 0.0, torch.minimum(keys, limit))

        if lse is None:
            # Each query's own key is a first idea of its sum. Those for which it is not enough ask their neighbours.
            keys = beyond(self._own_scores(rows))
            asking = (keys > 0).any(0).any(0).nonzero().flatten()
            if len(asking):
                some = slice(int(asking[0]), int(asking[-1]) + 1)
                lse = torch.full_like(keys, -math.inf)
                lse[:, :, some] = self._sums_around(slice(rows.start + some.start, rows.start + some.stop))  # fmt: skip
                keys = torch.minimum(keys, beyond(lse))
        else:
            keys = beyond(lse[:, :, rows])
        most_of_head: np.ndarray[Any, Any] = keys.amax((0, 2)).unflatten(0, (p.G, -1)).amax(1).long().cpu().numpy()  # fmt: skip
        return most_of_head

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
        """[B, H, rows]: at most lse, from the keys of the share that lie within a block of each query."""
        p = self.problem
        q, k = self.q[:, :, rows], self.k[:, :, rows]
        n = q.shape[2]
        blocks, after = -(-n // _BLOCK), 0 if p.causal else _BLOCK
        more = blocks * _BLOCK - n
        pad = torch.nn.functional.pad
        queries = (
            pad(q, (0, 0, 0, more)).unflatten(2, (blocks, _BLOCK)).transpose(1, 2).flatten(0, 1)
        )
        keys = pad(k, (0, 0, _BLOCK, more + after)).unfold(2, 2 * _BLOCK + after, _BLOCK)
        keys = keys.permute(0, 2, 1, 4, 3).flatten(0, 1)
        # The keys of block j are rows j * _BLOCK and on of the padded ones, of which n after the first _BLOCK are real.
        ranges = torch.tensor([[0, n]] * p.B)
        if self.key_range is not None:
            ranges = (self.key_range - self.offset - rows.start).clamp(0, n)
        starts = torch.arange(blocks) * _BLOCK
        ranges = (ranges[:, None] + _BLOCK - starts[:, None]).clamp(0, keys.shape[2]).flatten(0, 1)
        ranges[:, 1] = ranges[:, 1].maximum(ranges[:, 0])
        slopes = [
            s if s is None or s.dim() == 1 else s.repeat_interleave(blocks, 0) for s in self.slopes
        ]
        _, lse = run(
            *prepare(
                _NAME, queries, keys, keys[..., :1], slopes[0], causal=p.causal, right_slopes=slopes[1], scale=p.scale,
                key_range=ranges.to(q.device), query_start=torch.full((p.B * blocks,), _BLOCK, device=q.device),
                tolerance=2.0**-10, lse=True,
            ), "auto", True,
        )  # fmt: skip
        return lse.unflatten(0, (p.B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :n].double()

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
                f"{_NAME}: halo must be a number, or one for each of {p.G} key/value heads, at least 0, got {halo}"
            )
        lengths = [p.T] * self.size if lengths is None else [int(n) for n in lengths]
        if len(lengths) != self.size or lengths[self.rank] != p.T:
            raise ValueError(
                f"{_NAME}: lengths must be those of the pieces on {self.size} processes, {p.T} on rank {self.rank}, got {lengths}"
            )
        self.offset = sum(lengths[: self.rank])
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
        """Keys and values [B, G, left halo + n + right halo, size], and the slopes as they were given."""
        summed = [None if self.within else s for s in self.given_slopes]
        found = Fetch.apply(self.k, self.v, *summed, plan, self.group)
        k, v = (torch.cat([found[i], x, found[i + 2]], 2) for i, x in enumerate((self.k, self.v)))
        left, right = self.given_slopes if self.within else found[4:]
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
        inputs, problem = prepare(
            _NAME, self.q, k, v, slopes[LEFT], right_slopes=slopes[RIGHT], causal=p.causal, scale=p.scale,
            key_range=ranges.to(k.device), query_start=torch.full((p.B,), width, device=k.device),
            tolerance=p.tolerance / 2, lse=True,
        )  # fmt: skip
        if p.dropout:
            # The mask counts queries and keys in the whole sequence.
            seed = torch.tensor([plan.seed, self.offset, self.offset - width], device=k.device)
            inputs = inputs._replace(seed=seed, dropout=p.dropout)
            problem = replace(problem, dropout=p.dropout)
        out, lse = run(inputs, problem, implementation, True)
        return out, lse

    def attend_documents(self, plan: Plan, implementation: str) -> tuple[Tensor, Tensor]:
        """`attend`, where queries see the keys of their own document: out [n, H, E] and lse [n, H]."""
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
        found = _attention_varlen(
            self.q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), torch.from_numpy(edges if p.T else edges[:1]), keys,
            slopes[LEFT], right_slopes=slopes[RIGHT], causal=p.causal, scale=p.scale, key_range=torch.from_numpy(ranges),
            query_start=torch.from_numpy(starts), tolerance=p.tolerance / 2, implementation=implementation, return_lse=True,
        )  # fmt: skip
        return found[0], found[1]

    def refuse_too_few(self, plan: Plan, lse: Tensor) -> None:
        """Raise on all processes if a head of one should have fetched more."""
        table = self.meet()
        needs = self.agree(table, self.needs(table, lse.detach())).counts
        for rank, (needed, fetched) in enumerate(zip(needs, plan.counts, strict=True)):
            for side, most, had in zip(("left", "right"), needed, fetched, strict=True):
                for g, (n, m) in enumerate(zip(most, had, strict=True)):
                    if n > m:
                        raise ValueError(
                            f"{_NAME}: halo must be at least {n} for key/value head {g} on the {side} of rank {rank}, got {m}"
                        )


def _told(name: str, number: float) -> str:
    if name == "dtype":
        return _request.FLOATS[int(number)]
    is_checksum = name in ("slopes", "right_slopes", "key_range", "cu_seqlens")
    return f"{'checksum ' if is_checksum else ''}{number:.10g}"


def _checksum(x: Tensor | None) -> int:
    return -1 if x is None else zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes())
