"""Sequences of lengths of their own in one call of the compiled core or of the Triton kernels, by
the offsets of their rows or by tables of their pages.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias import _request
from linbias._request import Described, Problem, Request
from linbias.kernels import core
from linbias.torch.addresses import DTYPES, address, threads
from linbias.torch.call import autocast, check_slopes
from linbias.torch.constant import default_slopes
from linbias.torch.dropout import draw_seed
from linbias.torch.impl import cpu, triton
from linbias.torch.operators.direct import unobserved
from linbias.torch.operators.operator import Results
from linbias.torch.packed import by_triton, placing
from linbias.torch.packed.placing import Placed
from linbias.torch.packed.sequences import Packed


class Sequences(NamedTuple):
    """B sequences as the core takes them, checked; their offsets and lengths lie on the CPU."""

    q: Tensor  # [total_q, H, D]
    k: Tensor  # [total_k, G, D], or with a block_table pages [num_pages, page_size, G, D]
    v: Tensor  # [total_k, G, E], or pages
    left: Tensor  # [B, H], wide
    right: Tensor | None  # likewise; None: causal
    num_keys: int  # of all sequences
    query_offsets: Tensor  # [B + 1]
    key_offsets: Tensor | None = None  # [B + 1]; None: pages
    block_table: Tensor | None = None  # [B, pages of a sequence]
    seq_lens: Tensor | None = None  # [B], keys in the pages
    page_norms: Tensor | None = None  # [num_pages, G], wide
    key_range: Tensor | None = None  # [B, G, 2]
    query_start: Tensor | None = None  # [B]
    query_range: Tensor | None = None  # [total_q, 2]
    seed: Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    tolerance: float = 0.0
    precise: bool = False  # the result will be differentiated
    few: bool = False  # no sequence has more queries than the core takes one by one
    implementation: str = cpu.NAME  # or triton.NAME


class Pages(NamedTuple):
    """What says where the keys of sequences lie in pages."""

    block_table: Tensor  # [B, pages of a sequence]
    seq_lens: Tensor  # [B]
    norms: Tensor | None  # [num_pages, G]


def run(
    call: Packed, placed: Placed, pages: Pages | None = None, with_lse: bool = True
) -> tuple[Tensor, Tensor] | None:
    """out [total_q, H, E] and lse [total_q, H] of all sequences in one call; None where no
    implementation that may take them can take them so.

    Args:
        pages: k and v of the call are pages, [num_pages, page_size, G, size].
        with_lse: Otherwise lse is empty.
    """
    asked = prepare(call, placed, pages)
    return None if asked is None else compute(asked, with_lse)


def compute(asked: Sequences, with_lse: bool = True) -> tuple[Tensor, Tensor]:
    """out and lse as of `run`; differentiable where q, k, v or slopes ask for it."""
    if asked.precise:
        return _Direct.apply(asked.q, asked.k, asked.v, asked.left, asked.right, asked)
    results = forward(asked, only_out=not with_lse and asked.few)
    if asked.implementation == triton.NAME:
        return by_triton.shown(results)
    lse = results.row_max + results.log_sum if with_lse else results.row_max
    return results.out.to(asked.q.dtype), lse


def prepare(call: Packed, placed: Placed, pages: Pages | None) -> Sequences | None:
    """Check the arrays of a call, and fill in what it leaves open."""
    q, k, v, left, right, x, _ = call[:7]
    B = len(placed.lengths_k)
    by = call.implementation
    if by == "auto":
        by = cpu.NAME if q.is_cpu else triton.NAME
    if by not in (cpu.NAME, triton.NAME) or x is not None or B == 0:
        return None
    # In the operator's kernels, which draw from its seed, forward and backward take the same way.
    if call.seed is None and not unobserved(q, k, v, left, right):
        return None
    if pages is None:
        q, k, v = autocast(q, k, v)
    sizes = [(*x.shape[-2:], x.shape[:-2].numel(), x.dtype, x.device) for x in (q, k, v)]
    options = right is not None, call.causal, call.scale, call.dropout, call.tolerance
    try:
        problem = _pose(*sizes, *options)
    except TypeError:  # a wrong argument may be no key, and is refused by name
        problem = _pose.__wrapped__(*sizes, *options)
    if (cpu if by == cpu.NAME else triton).why_not(problem):
        return None
    num_keys = int(placed.lengths_k.sum())
    if by == triton.NAME and num_keys >= 2**31:  # its offsets have 32 bits; pages may be shared
        return None
    _request.warn_of_layout("attention", problem, depth=6)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if left is None:
        left = default_slopes(problem.H, wide, q.device)
    else:
        check_slopes("attention", "slopes", left)
    left = left.expand(B, problem.H)
    if right is not None:
        check_slopes("attention", "right_slopes", right)
        right = right.expand(B, problem.H)
    elif not problem.causal:
        right = left
    where: dict[str, Any]
    if pages is None:
        where = {"key_offsets": placing.ends(placed.lengths_k)}
    else:
        norms = pages.norms if pages.norms is None else pages.norms.to(wide)
        where = {"block_table": pages.block_table, "seq_lens": pages.seq_lens, "page_norms": norms}
    gradients = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, left, right)
    )
    if gradients:  # backward must find them as they are now, whatever their owner does
        placed = placed.copy()
    return Sequences(
        q=q,
        k=k,
        v=v,
        left=left,
        right=right,
        num_keys=num_keys,
        query_offsets=placed.offsets,
        **where,
        key_range=placed.key_range,
        query_start=placed.query_start,
        query_range=placing.ranges_of_queries(call, placed),
        seed=draw_seed(q.device) if problem.dropout and call.seed is None else call.seed,
        scale=problem.scale,
        dropout=problem.dropout,
        tolerance=problem.tolerance,
        precise=gradients,
        few=int(placed.offsets.diff().max()) <= core.FEW_QUERIES,
        implementation=by,
    )


_NOTHING = torch.empty(0, 0, 0)
Sizes = tuple[int, int, int, torch.dtype, torch.device]


@functools.lru_cache(maxsize=256, typed=True)
def _pose(
    q: Sizes,
    k: Sizes,
    v: Sizes,
    two_sided: bool,
    causal: bool,
    scale: float | None,
    dropout: float,
    tolerance: float | None,
) -> Problem:
    """The checked problem of arrays of so many heads, numbers a head, and rows."""
    arrays = [
        Described((1, heads, rows, size), str(dtype).removeprefix("torch."), str(device))
        for heads, size, rows, dtype, device in (q, k, v)
    ]
    slopes = Described((q[0],), "float32") if two_sided else None
    request: Request[Any] = Request(
        right_slopes=slopes,
        q=arrays[0],
        k=arrays[1],
        v=arrays[2],
        causal=causal,
        scale=scale,
        dropout=dropout,
        tolerance=tolerance,
    )
    return _request.check("attention", request, lse=True)


def forward(asked: Sequences, only_out: bool = False) -> Results:
    """The results of all sequences, by the core rows before heads: out [total_q, H, E], row_max
    and log_sum [total_q, H]; the tiles in `visited` [H, tiles, 2] as csrc/include/linbias says.

    With `only_out`, which few queries allow, the others are empty.
    """
    if asked.implementation == triton.NAME:
        return by_triton.forward(asked)
    results = _empty(asked, only_out)
    call, sequences, alive = _describe(asked)
    core.forward(call, sequences, _saved(results))
    del alive
    return results


class Layers:
    """Calls of the core that differ in nothing but where their arrays lie, described once.

    For one token to describe a call takes longer than to compute it.
    """

    def __init__(self, asked: Sequences) -> None:
        self.num_sequences = len(asked.left)
        self._results = _empty(asked, only_out=asked.few)
        self._call, self._sequences, self._alive = _describe(asked)
        self._saved = _saved(self._results)

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, left: Tensor, norms: Tensor | None, out: Tensor
    ) -> None:
        """Fill `out` [total_q, H, E]; all arrays are as those that were described, and contiguous
        where the core wants it.
        """
        computed = self._results.out if self._results.out.dtype != out.dtype else out
        addresses = [0 if x is None else x.data_ptr() for x in (q, k, v, left, norms, computed)]
        core.forward_layer(self._call, self._sequences, self._saved, *addresses)
        if computed is not out:
            out.copy_(computed)


class Writer:
    """Writes of new tokens to slots of pages, described once for all arrays of one form."""

    def __init__(self, slots: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor):
        self._slots = slots.to("cpu", torch.int64).contiguous()
        (T, G, D), copies = k.shape, list[Tensor]()
        rows = [_rows(x, copies) for x in (k_pages, v_pages, k, v)]
        self._call = core.Call(
            dtype=DTYPES[k.dtype],
            B=1,
            H=G,
            G=G,
            T=T,
            S=0,
            D=D,
            E=v.shape[2],
            left=0,
            q=core.Array(0, 0, 0, 0),
            k=rows[0],
            v=rows[1],
            scale=1.0,
            tolerance=0.0,
            num_pages=k_pages.shape[0],
            page_keys=k_pages.shape[1],
        )
        self._tokens = core.NewTokens(k=rows[2], v=rows[3], key_bound=0)

    def __call__(
        self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_norms: Tensor | None
    ) -> None:
        addresses = (
            0 if x is None else x.data_ptr()
            for x in (self._slots, k, v, k_pages, v_pages, page_norms)
        )
        core.write(self._call, self._tokens, *addresses)


def takes_as_they_lie(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_norms: Tensor | None
) -> bool:
    """Whether the core reads and writes these arrays without a copy, and nobody looks on."""
    arrays = k, v, k_pages, v_pages
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    return (
        core.WHY_MISSING is None
        and all(x.is_cpu and x.stride(-1) == 1 for x in arrays)
        and (page_norms is None or (page_norms.dtype == wide and page_norms.is_contiguous()))
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in arrays))
        and unobserved(*arrays, page_norms)
    )


def _empty(asked: Sequences, only_out: bool) -> Results:
    q, v, left = asked.q, asked.v, asked.left
    total, H, _ = q.shape
    narrow = q.dtype == torch.bfloat16 and not asked.precise  # written in it at once
    out = (q if narrow else left).new_empty(total, H, v.shape[-1])
    if only_out:
        return Results(out, *[_NOTHING] * 3)
    rows, tiles = (total, H), 2 * (total // core.TILE_ROWS + len(left))
    visited = torch.zeros(H, tiles, 2, dtype=torch.int32)
    return Results(out, left.new_empty(rows), left.new_empty(rows), visited)


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        # `asked` holds those before, too, which are arguments for autograd to see.
        *_arrays, asked = given
        results = forward(asked)
        ctx.save_for_backward(*asked[:5], *results)
        ctx.rest = asked[5:]
        if asked.implementation == triton.NAME:
            return by_triton.shown(results)
        return results.out.to(asked.q.dtype), results.row_max + results.log_sum

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        given: tuple[Any, ...] = (dout, dlse, *ctx.saved_tensors, ctx.rest)
        compute = _gradients if unobserved(dout, dlse) else _gradients_by_operator
        gradients = _Once.apply(compute, *given) if torch.is_grad_enabled() else compute(*given)
        asked = zip(gradients, ctx.needs_input_grad[:5], strict=True)
        return *(x if wanted else None for x, wanted in asked), None


class _Once(torch.autograd.Function):
    """Gradients whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *given: Any) -> tuple[Tensor, ...]:
        ctx.implementation = given[-1][-1]
        return compute(*given)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError(
            f"attention_varlen: {ctx.implementation} gives first derivatives only;"
            " implementation='dense' gives all"
        )


def _gradients(dout: Tensor, dlse: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Those of q, k, v, left and right."""
    *tensors, rest = given
    asked = Sequences(*tensors[:5], *rest)
    saved = Results._make(x.contiguous() for x in tensors[5:])  # alive as long as the call
    # Where slopes ask for none, blocks may be computed in fewer digits.
    asks = any(x is not None and x.requires_grad for x in tensors[3:5])
    if asked.implementation == triton.NAME:
        return by_triton.gradients(asked, saved, dout, dlse, asks)
    wide, arrays = asked.left.dtype, [asked.q, asked.k, asked.v]
    computed = [x.new_empty(x.shape, dtype=wide) for x in arrays]
    sides = [asked.left.new_empty(asked.left.shape) for _ in range(2 if asks else 0)]
    call, sequences, alive = _describe(asked)
    core.backward(
        call,
        sequences,
        core.Backward(
            dout=address(dout.resolve_neg().to(wide), alive),
            dlse=address(dlse.resolve_neg(), alive),
            saved=_saved(saved),
            **{f"d{name}": x.data_ptr() for name, x in zip("qkv", computed, strict=True)},
            **{
                f"d{name}": x.data_ptr() for name, x in zip(("left", "right"), sides, strict=False)
            },
        ),
    )
    del alive
    for side, slope in zip(sides, (asked.left, asked.right), strict=False):
        if slope is not None:  # an infinite one hides its side, and has no gradient
            side.masked_fill_(slope == torch.inf, 0.0)
    of_slopes = sides or [asked.left.new_empty(0)] * 2
    return *(d.to(x.dtype) for x, d in zip(arrays, computed, strict=True)), *of_slopes


def _gradients_by_operator(dout: Tensor, dlse: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """As `_gradients`, where somebody looks on: forward runs once more."""
    *tensors, rest = given
    asked = Sequences(*tensors[:5], *rest)
    assert asked.key_offsets is not None, "pages have no gradients"
    call = Packed(
        *asked[:5],
        positions=None,
        query_positions=None,
        cu_seqlens_q=asked.query_offsets,
        cu_seqlens_k=asked.key_offsets,
        seed=asked.seed,
        key_range=asked.key_range,
        query_start=asked.query_start,
        query_range=asked.query_range,
        causal=asked.right is None,
        scale=asked.scale,
        dropout=asked.dropout,
        tolerance=asked.tolerance,
        implementation=asked.implementation,
    )
    computed = torch.ops.linbias.varlen_backward(dout.contiguous(), dlse.contiguous(), *call)
    return tuple(computed[:5])


def _saved(results: Results) -> "core.Forward":
    return core.Forward(
        out=results.out.data_ptr(),
        row_max=results.row_max.data_ptr(),
        log_sum=results.log_sum.data_ptr(),
        visited=results.visited.data_ptr(),
        visited_tiles=results.visited.shape[-2],
        narrow=results.out.dtype == torch.bfloat16,
    )


def _describe(asked: Sequences) -> tuple["core.Call", "core.Sequences", list[Tensor]]:
    """The call in addresses, and the copies of its arrays that have to live as long."""
    (T, H, D), B, table = asked.q.shape, len(asked.left), asked.block_table
    G, E = asked.k.shape[-2], asked.v.shape[-1]
    alive: list[Tensor] = []

    def numbers(x: Tensor | None, dtype: torch.dtype = torch.int64) -> int:
        if x is not None and (x.dtype != dtype or not x.is_cpu):
            x = x.to("cpu", dtype)
        return address(x, alive)

    pages: dict[str, Any] = {}
    if table is not None:
        pages = {
            "pages": numbers(table, torch.int32),
            "pages_row": table.shape[1],
            "page_keys": asked.k.shape[1],
            "num_pages": asked.k.shape[0],
        }
    mean = -(-T // max(1, B)), -(-asked.num_keys // max(1, B))
    call = core.Call(
        dtype=DTYPES[asked.q.dtype],
        B=1,
        H=H,
        G=G,
        T=T,
        S=asked.num_keys,
        D=D,
        E=E,
        q=_rows(asked.q, alive),
        k=_rows(asked.k, alive),
        v=_rows(asked.v, alive),
        left=address(asked.left, alive),
        right=address(asked.right, alive),
        key_range=numbers(asked.key_range),
        query_start=numbers(asked.query_start),
        query_range=numbers(asked.query_range),
        scale=asked.scale,
        dropout=asked.dropout,
        tolerance=asked.tolerance,
        seed=0 if asked.seed is None else int(asked.seed) % 2**32,
        precise=asked.precise,
        **threads((B, H, G, *mean, D, E)),
        **pages,
    )
    sequences = core.Sequences(
        count=B,
        query_offsets=numbers(asked.query_offsets),
        key_offsets=numbers(asked.key_offsets),
        key_counts=numbers(asked.seq_lens, torch.int32),
        page_norms=address(asked.page_norms, alive),
    )
    return call, sequences, alive


def _rows(x: Tensor, alive: list[Tensor]) -> "core.Array":
    """[total, heads, size] or pages [num_pages, page_size, heads, size], of any strides but the
    last.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
        alive.append(x)
    page = x.stride(0) if x.dim() == 4 else 0
    return core.Array(x.data_ptr(), page, x.stride(-2), x.stride(-3))
