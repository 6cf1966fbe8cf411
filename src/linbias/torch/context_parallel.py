"""Attention over a sequence that lies in pieces on several processes: a head fetches its window from the neighbours, and no more.

With linear biases a key weighs the less the farther away it is, so a process needs few keys of other pieces: those that the
certificate (`linbias.torch.certificate`) cannot do without. A call is, on each process,

    1. a gather of a few numbers of each piece: how long it is, and a ball that its keys lie in
    2. from these and from its own queries, how many keys beyond its edges each head needs; a gather of these numbers
    3. one exchange of exactly those keys and values, over as many neighbours as a window reaches
    4. attention of its own queries over [halo, own piece, halo], by the kernels of `linbias.torch.attention`

and backward one exchange of the gradients of what was fetched.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linbias import _checks
from linbias.torch.call import Slopes, as_slopes, autocast, in_pieces, prepare, run
from linbias.torch.varlen import attention_varlen as _attention_varlen

Group = dist.ProcessGroup | DeviceMesh | None

_NAME = "context_parallel.attention"
_BLOCK = 64  # queries that are compared with the keys around them for a first idea of their sums
_ROWS = 1 << 14  # queries that are asked at once what they need
_LEFT, _RIGHT = 0, 1
_OUT_OF_ORDER = -2


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    key_range: Tensor | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
    group: Group = None,
    halo: Literal["negotiate"] | int | Sequence[int] = "negotiate",
    lengths: Sequence[int] | None = None,
    check: bool = True,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `linbias.torch.attention` on a sequence whose pieces lie on the processes of a group, in the order of their ranks.

    Each process calls it with its own piece and gets the results of its own queries: those that one process would get
    for the whole sequence, up to rounding and the tolerance. Pieces may be of any length, also empty. Differentiable in
    q, k, v and the slopes, whose gradients are those of the whole sequence on every process. A repeated call gives the same bits.
    Each query stands at the key of its own number.

    Args:
        q: [B, H, n, D], the piece's n tokens; B, H, dtype and all options alike on all processes.
        k: [B, G, n, D].
        v: [B, G, n, E].
        slopes, causal, right_slopes, scale, dropout, implementation, return_lse: As for `linbias.torch.attention`. The mask
            of dropout is that of one process with the seed of rank 0.
        key_range: [B, 2], integers, alike on all processes: as for `linbias.torch.attention`, counted in the whole sequence.
        tolerance: As for `linbias.torch.attention`: half of it for keys that are not fetched, half for those not read.
        group: A process group, or a mesh of one dimension; None is the group of all processes.
        halo: "negotiate": as many keys as the certificate asks for at this call. Numbers, one for all key/value heads or
            one for each: fetch so many from each open side, for which no process waits for another's numbers.
        lengths: With numbers as halo, the lengths of all pieces; None: all are as long as this one.
        check: With numbers as halo, look afterwards, by the gathers of "negotiate", whether they were enough.

    Returns:
        [B, H, n, E] in q's dtype; with return_lse also lse [B, H, n], float32 (float64 for float64 inputs).

    Raises:
        TypeError, ValueError, NotImplementedError: As `linbias.torch.attention`; q, k and v are not equally long; the halo was too
            small, or breaks a rule above.
        RuntimeError: The processes' calls differ, named by rank; or a process died, or did not come within the
            timeout of the group.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # torchrun starts more
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
        >>> out = attention(q, k, v)
        >>> dist.destroy_process_group()
        >>> from linbias.torch import attention as whole
        >>> torch.testing.assert_close(out, whole(q, k, v))

    Source: Press, Smith and Lewis, ICLR 2022, section 3, for the bias; the halo is this project's.
    """
    if unknown:
        _checks.refuse_unknown(_NAME, unknown, attention)
    piece = _Piece(
        q, k, v, slopes, right_slopes, group, causal=causal, scale=scale,
        key_range=key_range, dropout=dropout, tolerance=tolerance,
    )  # fmt: skip
    out, lse = _run(piece, implementation, halo, lengths, check)
    return (out, lse) if return_lse else out


def _run(
    piece: "_Piece",
    implementation: str,
    halo: str | int | Sequence[int],
    lengths: Sequence[int] | None,
    check: bool,
) -> tuple[Tensor, Tensor]:
    if isinstance(halo, str):
        if halo != "negotiate":
            raise ValueError(f"{_NAME}: halo must be 'negotiate' or numbers, got {halo!r}")
        table = piece.meet()
        return piece.attend(piece.agree(table, piece.needs(table)), implementation)
    plan = piece.given(halo, lengths)
    out, lse = piece.attend(plan, implementation)
    if check:
        piece.refuse_too_few(plan, lse)
    return out, lse


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    slopes: Slopes | None = None,
    *,
    causal: bool = True,
    right_slopes: Slopes | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
    group: Group = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `linbias.torch.attention_varlen` on documents packed end to end, cut into pieces anywhere, also within a document.

    Otherwise as `attention`, with halo="negotiate": only the documents at the edges of a piece fetch keys.

    Args:
        q: [n, H, D], the piece's n tokens.
        k: [n, G, D].
        v: [n, G, E].
        cu_seqlens: [documents + 1], integers, alike on all processes: where documents begin and end in the whole
            sequence; they start at 0, do not fall, and end at the sum of all n.
        slopes: [H].
        causal, right_slopes, scale, tolerance, implementation, return_lse, group: As for `attention`.

    Returns:
        [n, H, E]; with return_lse also lse [n, H].

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As `attention`; or cu_seqlens breaks the rule.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> q = k = v = torch.ones(5, 2, 4)
        >>> attention_varlen(q, k, v, torch.tensor([0, 2, 5])).shape
        torch.Size([5, 2, 4])
        >>> dist.destroy_process_group()
    """
    if unknown:
        _checks.refuse_unknown("context_parallel.attention_varlen", unknown, attention_varlen)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{_NAME}_varlen: {name} must have 3 axes, n, heads, size, got {list(x.shape)}")  # fmt: skip
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    piece = _Piece(q, k, v, slopes, right_slopes, group, key_range=None, causal=causal, scale=scale, tolerance=tolerance)  # fmt: skip
    piece.documents = cu_seqlens.cpu().numpy().astype(np.int64)
    table = piece.meet()
    total, edges = sum(table.lengths), piece.documents
    if edges.ndim != 1 or not len(edges) or edges[0] != 0 or edges[-1] != total or (np.diff(edges) < 0).any():  # fmt: skip
        raise ValueError(
            f"{_NAME}_varlen: cu_seqlens must start at 0, never fall and end at {total}, the tokens of all pieces, got {edges.tolist()}"
        )
    out, lse = piece.attend_documents(piece.agree(table, piece.needs(table)), implementation)
    return (out, lse) if return_lse else out


@contextmanager
def use(
    group: Group = None,
    *,
    halo: Literal["negotiate"] | int | Sequence[int] = "negotiate",
    lengths: Sequence[int] | None = None,
    check: bool = True,
) -> Iterator[None]:
    """Within the block `linbias.torch.attention` takes what it is given for a piece: whole models read pieces of a sequence.

    A model of `linbias.models`, or any that attends by that function, is called on each process with its piece of the
    tokens (`context_parallel.shard(ids, dim=1)`: as long as the others' or one longer), of the attention mask, and of labels that are already those of the next tokens. It has no cache.
    Gradients of weights, and of slopes, are those of the own piece: to be added up over the processes, which
    DistributedDataParallel and FSDP do as for pieces of a batch. The block must hold backward as well where checkpoints of
    activations are recomputed.

    Args:
        group, halo, lengths, check: As for `attention`. A mask with padding needs halo="negotiate".

    Raises:
        RuntimeError: Nothing within the block called `linbias.torch.attention`: the model attends in another way.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = LinbiasForCausalLM(LinbiasConfig(hidden_size=32, num_attention_heads=2)).eval()
        >>> ids = torch.arange(100)[None]
        >>> with use():
        ...     logits = model(shard(ids, 1)).logits
        >>> dist.destroy_process_group()
    """
    _rank_and_size(group)
    piece = _InPieces(group, halo, lengths, check)
    in_pieces.append(piece)
    try:
        yield
    finally:
        in_pieces.remove(piece)
    if not piece.num_calls:
        raise RuntimeError(
            "context_parallel.use: linbias.torch.attention must run within the block, but nothing called it: the model attends in another "
            "way, on each process to its own piece alone (linbias.models.load gives models that call it)"
        )


class _InPieces:
    """What `use` puts in the place of `linbias.torch.attention`."""

    def __init__(self, group: Group, *options: Any) -> None:
        self.group, self.options = group, options
        self.num_calls = 0
        self.begins: int | None = None  # the number of the piece's first token, if it was told

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Slopes | None,
        *,
        query_start: Tensor | None,
        mask: Tensor | None,
        implementation: str,
        return_lse: bool,
        **given: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.num_calls += 1
        if mask is not None:
            raise ValueError(
                "context_parallel.use: mask must be None, got one: pieces take key_range"
            )
        if q.shape[2] != k.shape[2] or (query_start is not None and query_start.any()):
            raise ValueError(
                "context_parallel.use: queries and keys must be those of one piece, so that there is no cache (use_cache=False), got "
                f"{q.shape[2]} queries and {k.shape[2]} keys"
            )
        piece = _Piece(q, k, v, slopes, given.pop("right_slopes"), self.group, **given)
        piece.within, piece.begins = True, self.begins
        out, lse = _run(piece, implementation, *self.options)
        return (out, lse) if return_lse else out

    def expect(self, position_ids: Tensor | None) -> None:
        """Take the numbers of a piece's tokens, which must follow each other: all processes hear of it if they do not."""
        self.begins = None
        if position_ids is not None and position_ids.numel():
            in_order = bool((position_ids.diff(dim=-1) == 1).all())
            self.begins = int(position_ids.min()) if in_order else _OUT_OF_ORDER


def shard(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This process's piece of a tensor that all processes have: contiguous, and as long as the others' or one longer.

    Args:
        x: Any shape.
        dim: The axis of the sequence.
        group: As for `attention`.

    Returns:
        A view of x.

    Raises:
        ValueError: There are fewer tokens than processes.
    """
    rank, size = _rank_and_size(group)
    if x.shape[dim] < size:
        raise ValueError(
            f"context_parallel.shard: x must have a token for each of {size} processes, got {x.shape[dim]}"
        )
    return x.tensor_split(size, dim)[rank]


@dataclass(frozen=True)
class _Plan:
    """Who fetches what, alike on all processes.

    Attributes:
        rank: Of this process.
        lengths: [ranks], of the pieces.
        counts: [ranks][2][G], keys that each fetches from beyond its left and its right edge.
        seed: Of dropout, rank 0's.
    """

    rank: int
    lengths: list[int]
    counts: list[list[list[int]]]
    seed: int

    def widths(self) -> tuple[int, int]:
        """The longest halo of the own heads on each side."""
        left, right = (max(counts, default=0) for counts in self.counts[self.rank])
        return left, right

    def parts(self, reader: int, owner: int) -> list["_Part"]:
        """What `reader` fetches from `owner`."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        begin, end = starts[reader], starts[reader + 1]
        found = []
        for side, counts in enumerate(self.counts[reader]):
            for g, count in enumerate(counts):
                wanted = (begin - count, begin) if side == _LEFT else (end, end + count)
                first = max(wanted[0], starts[owner])
                stop = min(wanted[1], starts[owner + 1])
                if first < stop:
                    outer = wanted[0] if side == _LEFT else end
                    found.append(
                        _Part(side, g, first - starts[owner], stop - first, first - outer)
                    )
        return found


@dataclass(frozen=True)
class _Part:
    """Some keys of one head: `count` of them, from `at` on in the owner's piece and from `into` on in the reader's halo."""

    side: int
    head: int
    at: int
    count: int
    into: int


class _Fetch(torch.autograd.Function):
    """Keys and values beyond the edges: k and v to halos [B, G, width, D] and [B, G, width, E] of both sides.

    A left halo ends at its last row, a right one begins at its first; what a head does not fetch is zeros. Slopes pass
    through: their gradients are added up over the processes, in one step with the exchange, so that all processes do
    both in one order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        plan: _Plan,
        group: Group,
    ) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.group, ctx.shapes = plan, group, (k.shape, v.shape)
        halos = _halos(plan, k, v)
        _exchange(plan, group, (k, v), halos, back=False)
        slopes = (s if s is None else s.view_as(s) for s in (left, right))
        return *halos[0], *halos[1], *slopes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        dk, dv = (gradients[0].new_zeros(shape) for shape in ctx.shapes)
        _exchange(ctx.plan, ctx.group, (dk, dv), (gradients[:2], gradients[2:4]), back=True)
        slopes = list(gradients[4:])
        for side, needed in enumerate(ctx.needs_input_grad[2:4]):
            if needed:
                # A copy: the gradient may be one number that is seen many times.
                total = slopes[side].double().clone(memory_format=torch.contiguous_format)
                with _named_failures():
                    dist.all_reduce(total, group=_process_group(ctx.group))
                slopes[side] = total.to(slopes[side].dtype)
        return dk, dv, *slopes, None, None


def _halos(plan: _Plan, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Zeros, of each side, for keys and for values."""
    return tuple(
        (
            k.new_zeros(*k.shape[:2], width, k.shape[3]),
            v.new_zeros(*v.shape[:2], width, v.shape[3]),
        )
        for width in plan.widths()
    )


def _exchange(
    plan: _Plan,
    group: Group,
    own: tuple[Tensor, Tensor],
    halos: Sequence[tuple[Tensor, Tensor]],
    back: bool,
) -> None:
    """Fill the halos from the owners' pieces; or, back, add what the halos hold to the owners' pieces, in a fixed order."""
    left_width = plan.widths()[_LEFT]
    others = [rank for rank in range(len(plan.lengths)) if rank != plan.rank]

    def in_halo(part: _Part) -> list[Tensor]:
        # The left halo ends at the edge: a head that fetches fewer begins later.
        shift = left_width - plan.counts[plan.rank][_LEFT][part.head] if part.side == _LEFT else 0
        rows = slice(part.into + shift, part.into + shift + part.count)
        return [x[:, part.head, rows] for x in halos[part.side]]

    def in_piece(part: _Part) -> list[Tensor]:
        return [x[:, part.head, part.at : part.at + part.count] for x in own]

    fetched = {rank: plan.parts(plan.rank, rank) for rank in others}
    lent = {rank: plan.parts(rank, plan.rank) for rank in others}
    views = {
        "halo": {rank: [x for part in fetched[rank] for x in in_halo(part)] for rank in others},
        "piece": {rank: [x for part in lent[rank] for x in in_piece(part)] for rank in others},
    }
    sources, targets = ("halo", "piece") if back else ("piece", "halo")
    ranks = range(len(plan.lengths))
    outgoing = [x.reshape(-1) for rank in others for x in views[sources][rank]]
    sent = torch.cat(outgoing) if outgoing else own[0].new_empty(0)
    sizes = {
        name: [sum(x.numel() for x in views[name].get(rank, [])) for rank in ranks]
        for name in views
    }
    received = own[0].new_empty(sum(sizes[targets]))
    width = received.element_size()
    with _named_failures():
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [n * width for n in sizes[targets]],
            [n * width for n in sizes[sources]],
            group=_process_group(group),
        )
    at = 0
    for rank in others:
        for target in views[targets][rank]:
            new = received[at : at + target.numel()].view(target.shape)
            at += target.numel()
            if back:
                target += new
            else:
                target.copy_(new)


class _Piece:
    """A process's arguments, checked, and what the processes tell each other before and after they exchange keys.

    Attributes:
        within: Whether a model runs on pieces (`use`): key_range counts within the piece, and gradients of slopes
            are those of the piece.
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
        right_slopes: Slopes | None,
        group: Group,
        *,
        key_range: Tensor | None,
        **options: Any,
    ) -> None:
        self.group, self.options = group, options
        self.rank, self.size = _rank_and_size(group)
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
    def meet(self) -> "_Table":
        """The first gather: lengths, and for each head a ball that the keys of a piece lie in. All calls must be alike."""
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
            "dtype": _checks.FLOATS.index(p.dtype),
            **{name: getattr(p, name) for name in ("causal", "scale", "tolerance", "dropout")},
            "slopes": _checksum(self.slopes[_LEFT]),
            "right_slopes": _checksum(self.slopes[_RIGHT]),
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
            if row[2] == _OUT_OF_ORDER:
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
        return _Table(lengths, int(numbers[0][1]), centers.unflatten(1, (p.G, p.D)), radii)

    def _join_ranges(self, ranges: Tensor, lengths: list[int], offsets: list[int]) -> None:
        """Make a key range of the whole sequence of those of the pieces [ranks, B, 2]."""
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

    def agree(self, table: "_Table", needs: list[list[int]]) -> _Plan:
        """The second gather: how many keys each process fetches."""
        rows = self._gather(torch.tensor(needs, dtype=torch.int64, device=self.k.device))
        return _Plan(self.rank, table.lengths, rows.tolist(), table.seed)

    def _gather(self, x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(self.size)]
        with _named_failures():
            dist.all_gather(rows, x, group=_process_group(self.group))
        return torch.stack(rows)

    # How many keys are needed

    @torch.no_grad()
    def needs(self, table: "_Table", lse: Tensor | None = None) -> list[list[int]]:
        """[2][G]: how many keys beyond each edge some query cannot do without.

        Args:
            lse: [B, H, n], of all queries; None: at least what the keys around them in the own piece make it.
        """
        found = np.zeros((2, self.problem.G), np.int64)
        for side, slopes in enumerate(self.slopes):
            others = range(self.rank) if side == _LEFT else range(self.rank + 1, self.size)
            most, looking = self._within_reach(table, side), self.own_document(side)
            if slopes is None or not most.max(initial=0):
                continue
            ball = table.ball(others)
            for start in range(looking.start, looking.stop, _ROWS):
                rows = slice(start, min(start + _ROWS, looking.stop))
                inwards = start if side == _LEFT else looking.stop - rows.stop
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
        row = self.offset if side == _LEFT else self.offset + self.problem.T - 1
        at = int(np.searchsorted(self.documents, row, "right"))
        return int(self.documents[at - 1]), int(self.documents[at])

    def _within_reach(self, table: "_Table", side: int) -> np.ndarray[Any, Any]:
        """[B]: keys between an edge and the far end of the key range, of the document there, or of the sequence."""
        total = sum(table.lengths)
        if not self.problem.T:
            return np.zeros(self.problem.B, np.int64)
        ranges = np.array([[0, total]] * self.problem.B).reshape(-1, 2)
        if self.documents is not None:
            ranges[:] = self._document_at(side)
        if self.key_range is not None:
            ranges = self.key_range.numpy()
            _checks.check_key_range_values(_NAME, ranges, total)
        first, end = ranges.T
        beyond = self.offset - first if side == _LEFT else end - (self.offset + self.problem.T)
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
        if side == _RIGHT:
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
        """[B, H, rows]: at most lse, from the keys of the piece that lie within a block of each query."""
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

    def given(self, halo: int | Sequence[int], lengths: Sequence[int] | None) -> _Plan:
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
            with _named_failures():
                dist.broadcast(drawn, group=_process_group(self.group), group_src=0)
            seed = int(drawn)
        return _Plan(self.rank, lengths, counts, seed)

    def fetch(self, plan: _Plan) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values [B, G, left halo + n + right halo, size], and the slopes as they were given."""
        summed = [None if self.within else s for s in self.given_slopes]
        found = _Fetch.apply(self.k, self.v, *summed, plan, self.group)
        k, v = (torch.cat([found[i], x, found[i + 2]], 2) for i, x in enumerate((self.k, self.v)))
        left, right = self.given_slopes if self.within else found[4:]
        return k, v, left, right

    def attend(self, plan: _Plan, implementation: str) -> tuple[Tensor, Tensor]:
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
            _NAME, self.q, k, v, slopes[_LEFT], right_slopes=slopes[_RIGHT], causal=p.causal, scale=p.scale,
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

    def attend_documents(self, plan: _Plan, implementation: str) -> tuple[Tensor, Tensor]:
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
            ranges[0, :, 0] -= counts[_LEFT]
            lengths[-1] += right
            ranges[-1, :, 1] += counts[_RIGHT]
        keys = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
        found = _attention_varlen(
            self.q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), torch.from_numpy(edges if p.T else edges[:1]), keys,
            slopes[_LEFT], right_slopes=slopes[_RIGHT], causal=p.causal, scale=p.scale, key_range=torch.from_numpy(ranges),
            query_start=torch.from_numpy(starts), tolerance=p.tolerance / 2, implementation=implementation, return_lse=True,
        )  # fmt: skip
        return found[0], found[1]

    def refuse_too_few(self, plan: _Plan, lse: Tensor) -> None:
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


@dataclass(frozen=True)
class _Table:
    """What the first gather tells of all pieces: lengths, rank 0's seed of dropout, and balls that keys lie in.

    Attributes:
        centers: [ranks, G, D], float64.
        radii: [ranks, G].
    """

    lengths: list[int]
    seed: int
    centers: Tensor
    radii: Tensor

    def ball(self, ranks: range) -> tuple[Tensor, Tensor]:
        """Center [G, D] and radius [G] of a ball around the keys of some pieces."""
        some = [rank for rank in ranks if self.lengths[rank]]
        centers = self.centers[some]
        center = centers.mean(0)
        radius = ((centers - center).norm(dim=-1) * (1 + 1e-9) + self.radii[some]).amax(0)
        return center, radius


def _told(name: str, number: float) -> str:
    if name == "dtype":
        return _checks.FLOATS[int(number)]
    is_checksum = name in ("slopes", "right_slopes", "key_range", "cu_seqlens")
    return f"{'checksum ' if is_checksum else ''}{number:.10g}"


def _checksum(x: Tensor | None) -> int:
    return -1 if x is None else zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes())


def _process_group(group: Group) -> dist.ProcessGroup | None:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def _rank_and_size(group: Group) -> tuple[int, int]:
    """Of this process in a group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "context_parallel: group must be one of processes that have met: call torch.distributed.init_process_group first, "
            "in processes that torchrun starts"
        )
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(
            f"context_parallel: group must be a mesh of one dimension, such as mesh['cp'], got one of {group.ndim}"
        )
    found = _process_group(group)
    return dist.get_rank(found), dist.get_world_size(found)


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "context_parallel: the processes did not meet: one of them has died or raised an error, was given arrays of another size, "
            f"or did not come within the timeout of the group ({error})"
        ) from error
