"""A call on a shard of a sequence: its arguments checked, what all tell each other, attention."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linbias import _request
from linbias._request import checks, seen
from linbias.torch.call import Slopes, as_int64, as_slopes, autocast, describe, prepare, run
from linbias.torch.context_parallel.halo import LEFT, RIGHT, Fetch, Halo
from linbias.torch.context_parallel.processes import Group, gather, gather_told, rank_and_size
from linbias.torch.operators.operator import Inputs
from linbias.torch.standing import Positions, as_tensors, of_rows

NAME = "context_parallel.attention"


class Shard:
    """The arguments of one process, checked; `meet` adds what all processes have to know.

    Args:
        documents: [documents + 1], where those begin and end in the whole sequence.
        of_model: Whether a model runs on shards: key_range and gradients of slopes are those of
            the shard.
        begins: The number that the first token must have; None for any.
    """

    lengths: list[int]  # [ranks], of all shards
    first: int  # the first own token, in the sequence
    seed: int  # of dropout, that of rank 0
    # Balls around the keys of each shard, float64: [ranks, G, D] and [ranks, G]
    centers: Tensor
    radii: Tensor

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
        documents: Tensor | None = None,
        of_model: bool = False,
        begins: int | None = None,
        **options: Any,
    ) -> None:
        self.group, self.of_model, self.begins = group, of_model, begins
        self.rank, self.size = rank_and_size(group)
        self.q, self.k, self.v = q, k, v = autocast(q, k, v)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.given_slopes = [
            None if x is None else as_slopes(NAME, name, x, wide, q.device)
            for name, x in (("slopes", slopes), ("right_slopes", right_slopes))
        ]
        placed: dict[str, Any] = {} if positions is None else {"positions": positions}
        as_tensors(NAME, placed, q.device)
        left, right = self.given_slopes
        inputs, self.problem = prepare(
            NAME, q, k, v, left, right_slopes=right, **placed, **options
        )
        p = self.problem
        self.window = seen.check_window(NAME, window, p.causal)
        if p.any_order:
            raise ValueError(f"{NAME}: positions must not fall; sort the whole sequence by them")
        if p.T != p.S:
            raise ValueError(f"{NAME}: q and k must be equally long, got {p.T} and {p.S}")
        if key_range is not None and tuple(key_range.shape) != (p.B, 2):
            raise ValueError(
                f"{NAME}: key_range must have shape [B, 2] = {[p.B, 2]},"
                f" got {list(key_range.shape)}"
            )
        self.key_range = _integers("key_range", key_range)
        self.documents = _integers("cu_seqlens", documents)
        self.positions = None  # [B, 1 or H, own keys, and from `meet` on those of all]
        if positions is not None:
            x = of_rows(placed["positions"], p.B)
            self.positions = x if x.is_floating_point() else x.long()
        self.slopes = [x if x is None else x.detach() for x in (inputs.left, inputs.right)]
        self.seed = 0 if inputs.seed is None else int(inputs.seed)

    @property
    def own(self) -> slice:
        """The own tokens, in the sequence."""
        return slice(self.first, self.first + self.problem.T)

    # What the processes tell each other

    @torch.no_grad()
    def meet(self) -> None:
        """Check that all calls are alike, and learn where and around what the keys of all lie."""
        p = self.problem
        alike = {
            **{name: getattr(p, name) for name in (*"BHGDE", "dtype", "causal", "scale")},
            **{"tolerance": p.tolerance, "dropout": p.dropout, "window": self.window},
            "slopes": self.slopes[LEFT],
            "right_slopes": self.slopes[RIGHT],
            "key_range": None if self.of_model else self.key_range,
            "cu_seqlens": self.documents,
            "positions": None if self.positions is None else self.positions.dtype,
            "heads of positions": None if self.positions is None else self.positions.shape[1],
        }
        own = [p.T, self.seed, -1 if self.begins is None else self.begins]
        numbers = torch.tensor(
            [*own, *map(_checksum, alike.values())], dtype=torch.float64, device=self.k.device
        )
        center, radius = _ball(self.k, self.v)
        ranges = torch.tensor([[0, p.T]] * p.B) if self.key_range is None else self.key_range
        told = [numbers, radius, center.flatten(), ranges.flatten().to(numbers)]
        rows = gather_told(torch.cat(told), self.k, self.group)
        of_ranks, self.radii, centers, ranges = rows.split([len(x) for x in told], 1)
        self.centers = centers.unflatten(1, (p.G, p.D))
        for name, row in zip(alike, of_ranks.T[len(own) :].tolist(), strict=True):
            others = [str(rank) for rank, x in enumerate(row) if x != row[0]]
            if others:
                raise ValueError(
                    f"{NAME}: {name} must be the same on all processes, but differs between rank 0"
                    f" and rank {', '.join(others)}; got {alike[name]} on rank {self.rank}"
                )
        lengths, seeds, begins = of_ranks.T[: len(own)].long().tolist()
        self.lengths, self.seed = lengths, seeds[0]
        starts = [sum(lengths[:rank]) for rank in range(self.size)]
        self.first = starts[self.rank]
        for rank, (begin, start) in enumerate(zip(begins, starts, strict=True)):
            if begin not in (-1, start) and lengths[rank]:
                raise ValueError(
                    f"{NAME}: shards must lie in the order of ranks, got position {begin} at the"
                    f" start of that on rank {rank}, before which there are {start} tokens"
                )
        if self.of_model:
            self._join_ranges(ranges.long().cpu().unflatten(1, (p.B, 2)), starts)
        total = sum(lengths)
        if self.key_range is not None:
            checks.check_ranges(NAME, "key_range", self.key_range.numpy(), total)
        edges = [0, total] if self.documents is None else self.documents.flatten().tolist()
        if edges[:1] != [0] or edges[-1] != total or edges != sorted(edges):
            raise ValueError(
                f"{NAME}_varlen: cu_seqlens must start at 0, never fall and end at {total}, the"
                f" tokens of all shards, got {edges}"
            )
        if self.positions is not None and total:
            self._gather_positions(self.positions)

    def _gather_positions(self, own: Tensor) -> None:
        """Let each process have the positions of all, of which its own stay differentiable."""
        padded = torch.nn.functional.pad(own.detach(), (0, max(self.lengths) - own.shape[2]))
        rows = gather(padded.contiguous(), self.group)
        parts = [x[..., :n] for x, n in zip(rows, self.lengths, strict=True)]
        x = torch.cat(parts, 2)
        falls = (~(x[..., 1:] >= x[..., :-1])).any(0).any(0).nonzero().flatten().tolist()
        if falls:
            raise ValueError(
                f"{NAME}: positions must not fall from shard to shard, but token {falls[0] + 1}"
                " of the whole sequence stands before its neighbour"
            )
        parts[self.rank] = own
        with torch.enable_grad():
            self.positions = torch.cat(parts, 2)

    def _join_ranges(self, ranges: Tensor, starts: Sequence[int]) -> None:
        """Make a key range of the whole sequence of those of the shards [ranks, B, 2]."""
        counts = (ranges[..., 1] - ranges[..., 0]).clamp(min=0)
        if bool((counts == torch.tensor(self.lengths)[:, None]).all()):
            self.key_range = None
            return
        whole = ranges + torch.tensor(starts)[:, None, None]
        empty = (counts == 0)[..., None]
        end = whole.masked_fill(empty, 0)[..., 1].amax(0)
        first = whole.masked_fill(empty, sum(self.lengths))[..., 0].amin(0).minimum(end)
        broken = (counts.sum(0) != end - first).nonzero().flatten().tolist()
        if broken:
            raise ValueError(
                f"{NAME}: attention_mask must mark one unbroken run of tokens per row, also"
                f" across shards, got a gap in row {broken[0]}"
            )
        self.key_range = torch.stack([first, end], -1)

    # Attention with a halo

    def attend(self, halo: Halo, implementation: str) -> tuple[Tensor, Tensor]:
        """Out and lse of the own queries, over the own keys and those of the halo."""
        p, here = self.problem, halo.here
        summed = [None if self.of_model else s for s in self.given_slopes]
        k, v, *slopes, places = Fetch.apply(
            halo, self.group, self.k, self.v, *summed, self.positions
        )
        slopes = self.given_slopes if self.of_model else slopes
        left, right = (torch.tensor(counts) for counts in halo.counts[self.rank])
        ranges = torch.stack([self.first - left, self.own.stop + right], -1).expand(p.B, -1, -1)
        inputs, problem = self.prepare_among(
            here, (self.q, k, v), slopes, ranges, self.own, p.tolerance / 2, places
        )
        if p.dropout:
            # The mask counts queries and keys in the whole sequence.
            seed = torch.tensor([self.seed, self.first, here.start], device=k.device)
            inputs = inputs._replace(seed=seed, dropout=p.dropout)
            problem = replace(problem, dropout=p.dropout)
        out, lse = run(inputs, problem, implementation, True)
        return out, lse

    def prepare_among(
        self,
        keys: slice,
        arrays: tuple[Tensor, Tensor, Tensor],
        slopes: Sequence[Tensor | None],
        ranges: Tensor,
        queries: slice,
        tolerance: float,
        places: Tensor | None,
        **options: Any,
    ) -> tuple[Inputs, _request.Problem]:
        """A call of some own queries among some keys, whose ranges [B, G, 2] and all else are
        counted in the whole sequence.
        """
        p, device = self.problem, self.q.device
        if self.key_range is not None:
            first, end = (x[:, None] for x in self.key_range.unbind(-1))
            first = ranges[..., 0].maximum(first)
            ranges = torch.stack([first, ranges[..., 1].minimum(end).maximum(first)], -1)
        ranges = (ranges - keys.start).clamp(0, keys.stop - keys.start)
        placed: dict[str, Any] = {"window": self.window, **options}
        if places is not None:
            x = places[..., keys]
            placed["positions"] = x if x.shape[1] == p.H else x[:, 0]
        if self.documents is not None:
            rows = torch.arange(queries.start, queries.stop)
            document = torch.searchsorted(self.documents, rows, right=True)
            seen = torch.stack([self.documents[document - 1], self.documents[document]], -1)
            seen = (seen - keys.start).clamp(0, keys.stop - keys.start)
            placed["query_range"] = seen.to(device)
        return prepare(
            NAME,
            *arrays,
            slopes[LEFT],
            right_slopes=slopes[RIGHT],
            causal=p.causal,
            scale=p.scale,
            key_range=ranges.to(device),
            query_start=torch.full((p.B,), queries.start - keys.start, device=device),
            tolerance=tolerance,
            lse=True,
            **placed,
        )


def _integers(name: str, x: Tensor | None) -> Tensor | None:
    """On the CPU, int64."""
    if x is None:
        return None
    _request.check_holds(NAME, name, describe(name, x, NAME).dtype, "integers")
    return as_int64(x.cpu())


def _ball(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Center [G, D] and radius [G], float64, of a ball that the keys lie in.

    A key or value that is not finite lies in none, so that all processes fetch it.
    """
    k = k.double()
    if not k.shape[0] * k.shape[2]:
        return k.new_zeros(k.shape[1], k.shape[3]), k.new_zeros(k.shape[1])
    center = k.mean((0, 2)).nan_to_num(0.0, 0.0, 0.0)
    distance = (k - center[:, None]).norm(dim=-1) * (1 + 1e-9) + 0.0 * v.double().sum(-1)
    return center, distance.amax((0, 2)).nan_to_num(torch.inf, torch.inf)


def _checksum(x: Any) -> int:
    is_array = isinstance(x, Tensor)
    return zlib.crc32(x.cpu().contiguous().numpy().tobytes() if is_array else repr(x).encode())
