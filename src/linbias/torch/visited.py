"""`visited`: which keys a near-to-far implementation reads, and how much work that leaves."""

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from linbias import _dispatch
from linbias._request import keywords
from linbias.kernels import core
from linbias.torch import standing
from linbias.torch.call import Slopes, prepare
from linbias.torch.choice import asked_in_turn
from linbias.torch.functional import Options
from linbias.torch.impl import cpu
from linbias.torch.operators.operator import Inputs
from linbias.torch.packed import offsets
from linbias.torch.packed.paged import check
from linbias.torch.packed.varlen import Shared


class Visited(NamedTuple):
    """What `visited` gives: tile i holds query rows from i * tile_rows on.

    Attributes:
        first: [B, H, tiles], int64, on the CPU.
        end: Likewise, one past the last; equal to first where a tile reads nothing.
        tile_rows: Query rows of a tile.
        work_kept: [B, H], float64: the share of visible pairs of query and key that is read.
        precise_first, precise_end: As first and end, of the keys that forward computes in full:
            on a matrix unit float32 takes fewer digits of far ones (docs/math.md, section 11).
    """

    first: Tensor
    end: Tensor
    tile_rows: int
    work_kept: Tensor
    precise_first: Tensor
    precise_end: Tensor


@keywords.show_keywords(Options)
def visited(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    **options: Unpack[Options],
) -> Visited:
    """Find out which keys `attention` reads for these inputs, by running it.

    Args:
        q, k, v, slopes, options: As for `attention`.
        implementation: One that leaves keys out, `triton`, `cpu` or `blocked`, or "auto".

    Raises:
        TypeError, ValueError, NotImplementedError: As `attention`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 1024, 16)
        >>> visited(q, k, v, [0.5, 0.0], implementation="blocked").work_kept[0, 1].item()
        1.0
    """
    if not options.keys() <= Options.__annotations__.keys():
        keywords.refuse_unknown("visited", options, visited)
    inputs, problem = prepare("visited", q, k, v, slopes, **options)
    if problem.any_order:
        raise ValueError(
            "visited: keys, and queries among them, must come in the order of their positions"
        )
    near_to_far = [module for module in asked_in_turn(problem) if hasattr(module, "operators")]
    chosen = _dispatch.choose("visited", implementation, problem, near_to_far)
    if problem.query_positions:
        inputs, _ = standing.stand_near(inputs)
    # Decoding keeps no account of what it reads: what will be differentiated is never decoded.
    return _told(chosen, inputs, chosen.operators.forward(*inputs._replace(precise=True))[3])


@keywords.show_keywords(Shared)
def visited_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slopes: Slopes | None = None,
    *,
    cu_seqlens_q: Tensor,
    page_norms: Tensor | None = None,
    **options: Unpack[Shared],
) -> list[Visited]:
    """Find out which keys the compiled core reads for these arguments of `attention_paged`.

    Single tokens and drafts are answered for as prompts are, by tiles: they read no more.

    Args:
        All: As for `attention_paged`.

    Returns:
        Of each sequence what `visited` gives for a batch of one.

    Raises:
        TypeError, ValueError, NotImplementedError: As `attention_paged`; or the core cannot.

    Example:
        >>> k_pages, v_pages = torch.randn(2, 128, 16, 1, 8)
        >>> table, starts = torch.arange(128)[None], torch.tensor([0, 1])
        >>> lengths, q = torch.tensor([2048]), torch.randn(1, 1, 8)
        >>> given = {"slopes": [1.0], "cu_seqlens_q": starts}
        >>> visited_paged(q, k_pages, v_pages, table, lengths, **given)[0].first
        tensor([[[1984]]])
    """
    given = (q, k_pages, v_pages, block_table, seq_lens, slopes, cu_seqlens_q, page_norms)
    call, placed, pages = check("visited_paged", given, cpu.NAME, options)
    if len(seq_lens) == 0:
        return []
    asked = offsets.prepare(call, placed, pages)
    if asked is None:
        raise NotImplementedError(
            "visited_paged: the compiled core, which alone leaves pages out, cannot run this call;"
            " attention_paged(..., implementation='cpu') says why"
        )
    counts = offsets.forward(asked._replace(precise=True)).visited
    answers = []
    ends, G = asked.query_offsets.tolist(), k_pages.shape[2]
    for b, num_keys in enumerate(placed.lengths_k.tolist()):
        rows = slice(ends[b], ends[b + 1])
        keys = q.new_empty(1).expand(1, G, num_keys, 1)  # of which only the number says anything
        inputs = Inputs(
            q=q[rows].transpose(0, 1)[None],
            k=keys,
            v=keys,
            left=asked.left[b : b + 1],
            right=None if asked.right is None else asked.right[b : b + 1],
            key_range=None if asked.key_range is None else asked.key_range[b : b + 1],
            query_start=None if asked.query_start is None else asked.query_start[b : b + 1],
            query_range=None if asked.query_range is None else asked.query_range[None, rows],
        )
        first = 2 * (ends[b] // core.TILE_ROWS + b)
        tiles = 2 * core.num_tiles(ends[b + 1] - ends[b])
        answers.append(_told(cpu, inputs, counts[None, :, first : first + tiles]))
    return answers


def _told(chosen: Any, inputs: Inputs, counts: Tensor) -> Visited:
    """What the counts of an implementation say."""
    first, end, tile_rows = chosen.visited_keys(inputs, counts)
    keys = [first, end, first, end]
    if chosen.operators.counts_precise:
        keys[2:] = chosen.visited_keys(inputs, counts[:, :, first.shape[2] :])[:2]
    keys = [x.cpu() for x in keys]
    if inputs.query_range is not None:
        low, high = _seen_by_tiles(inputs.query_range.cpu(), tile_rows)
        keys = [torch.minimum(torch.maximum(x, low), torch.maximum(low, high)) for x in keys]
    first, end, *precise = keys
    return Visited(first, end, tile_rows, _work_kept(inputs, first, end, tile_rows), *precise)


def _seen_by_tiles(ranges: Tensor, tile_rows: int) -> tuple[Tensor, Tensor]:
    """The first and one past the last key in the ranges [B, T, 2] of each tile: [B, 1, tiles]."""
    if ranges.shape[1] == 0:
        return (ranges.new_zeros(len(ranges), 1, 0),) * 2
    tiles = []
    for rows in ranges.split(tile_rows, dim=1):
        first, end = rows.unbind(-1)
        empty = first >= end
        low = first.masked_fill(empty, torch.iinfo(torch.int64).max).amin(1)
        tiles.append((low, end.masked_fill(empty, 0).amax(1)))
    first, end = (torch.stack(x, -1)[:, None] for x in zip(*tiles, strict=True))
    return torch.minimum(first, end), end


def _work_kept(inputs: Inputs, first: Tensor, end: Tensor, tile_rows: int) -> Tensor:
    """The share of the visible pairs that lie within the tiles' keys; 1 where there are none."""
    (B, H, T, _), (G, S) = inputs.q.shape, inputs.k.shape[1:3]
    ranges = torch.tensor([0, S]) if inputs.key_range is None else inputs.key_range.cpu()
    ranges = ranges.expand(B, G, 2).repeat_interleave(H // max(1, G), dim=1)
    start = torch.tensor(S - T) if inputs.query_start is None else inputs.query_start.cpu()
    position = start.expand(B)[:, None, None] + torch.arange(T)
    low, high = ranges[..., :1].expand(B, H, T), ranges[..., 1:].expand(B, H, T)
    for slope, is_left in ((inputs.left, True), (inputs.right, False)):
        hidden = torch.tensor(True) if slope is None else slope.detach().isinf().cpu()[..., None]
        if is_left:
            low = torch.where(hidden, torch.maximum(low, position), low)
        else:
            high = torch.where(hidden, torch.minimum(high, position + 1), high)
    if inputs.query_range is not None:
        own_first, own_end = inputs.query_range.cpu()[:, None].unbind(-1)
        low, high = torch.maximum(low, own_first), torch.minimum(high, own_end)
    tile = torch.arange(T) // tile_rows
    first, end = first[..., tile], end[..., tile]
    read = torch.minimum(high, end) - torch.maximum(low, first)
    visible, kept = ((x.clamp(min=0)).sum(-1).double() for x in (high - low, read))
    return torch.where(visible > 0, kept / visible, 1.0)
