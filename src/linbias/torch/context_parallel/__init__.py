"""Attention over a sequence in shares on several processes: a head fetches what it can reach.

It attends over [halo, own share, halo]. docs/guides/many-machines.md says how a halo is found, and
`impl.certificate` how many keys a head cannot do without.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from torch import Tensor

from linbias import _names, _request, _values
from linbias.torch.call import Slopes, describe
from linbias.torch.context_parallel.halo import Group, rank_and_size
from linbias.torch.context_parallel.shares import OUT_OF_ORDER, Share
from linbias.torch.share import put_in_place
from linbias.torch.standing import Positions

_NAME = "context_parallel.attention"


class Packed(TypedDict, total=False):
    """The keywords of `linbias.torch.attention` that documents in shares have too."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    tolerance: float | None
    window: tuple[int, int] | None


class Options(Packed, total=False):
    """The keywords of `linbias.torch.attention` that a sequence in shares has too."""

    key_range: Tensor | None
    positions: Positions | None
    dropout: float


@_names.show_keywords(Options)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    group: Group = None,
    halo: Literal["negotiate"] | int | Sequence[int] = "negotiate",
    lengths: Sequence[int] | None = None,
    check: bool = True,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `linbias.torch.attention` on a sequence whose shares lie on processes, by rank.

    Each process gives its own share, of any length, also 0, and gets the results of its own
    queries: those of the whole sequence, up to rounding and the tolerance. Differentiable in q, k,
    v and the slopes, whose gradients are those of the whole sequence on every process. A repeated
    call gives the same bits. Each query stands at the key of its own number.

    Args:
        q: [B, H, n, D], the share's n tokens; B, H, dtype and options alike on all processes.
        k: [B, G, n, D].
        v: [B, G, n, E].
        slopes, causal, right_slopes, scale, window, implementation, return_lse: As for
            `linbias.torch.attention`. No more is fetched than a window shows.
        key_range: [B, 2], likewise, counted in the whole sequence.
        positions: [n], [B, n] or [B, H, n], likewise: where the share's keys stand, and its
            queries; they never fall from share to share either. Every process gets those of all.
        dropout: Likewise; its mask is that of one process with the seed of rank 0.
        tolerance: Likewise; half of it for keys that are not fetched, half for those not read.
        group: A process group, or a mesh of one dimension; None is the group of all processes.
        halo: "negotiate": as many keys as the certificate asks for. Numbers, one for all key/value
            heads or for each: fetch so many from each open side, without asking the others.
        lengths: With numbers as halo, those of all shares; None: all are as long as this one.
        check: With numbers as halo, look afterwards whether they were enough.

    Returns:
        [B, H, n, E] in q's dtype; with return_lse also lse [B, H, n], float32 (float64 for
        float64 inputs).

    Raises:
        TypeError, ValueError, NotImplementedError: As `linbias.torch.attention`; or q, k and v are
            not equally long, or the halo was too small, or breaks a rule.
        RuntimeError: The processes' calls differ, named by rank, or one died or was too late.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
        >>> out = attention(q, k, v)
        >>> dist.destroy_process_group()
        >>> from linbias.torch import attention as whole
        >>> torch.testing.assert_close(out, whole(q, k, v))

    Source: Press, Smith and Lewis, ICLR 2022, section 3, for the bias; the halo is this project's.
    """
    if not options.keys() <= Options.__annotations__.keys():
        _names.refuse_unknown(_NAME, options, attention)
    share = Share(q, k, v, slopes, group, **options)
    out, lse = _run(share, implementation, halo, lengths, check)
    return (out, lse) if return_lse else out


def _run(
    share: Share,
    implementation: str,
    halo: str | int | Sequence[int],
    lengths: Sequence[int] | None,
    check: bool,
) -> tuple[Tensor, Tensor]:
    if isinstance(halo, str):
        if halo != "negotiate":
            raise ValueError(f"{_NAME}: halo must be 'negotiate' or numbers, got {halo!r}")
        table = share.meet()
        return share.attend(share.agree(table, share.needs(table)), implementation)
    plan = share.given(halo, lengths)
    out, lse = share.attend(plan, implementation)
    if check:
        share.refuse_too_few(plan, lse)
    return out, lse


@_names.show_keywords(Packed)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    group: Group = None,
    **options: Unpack[Packed],
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `linbias.torch.attention_varlen` on packed documents, cut into shares anywhere.

    Otherwise as `attention`, with halo="negotiate": only documents at the edges fetch keys.

    Args:
        q: [n, H, D], the share's n tokens.
        k: [n, G, D].
        v: [n, G, E].
        cu_seqlens: [documents + 1], integers from 0 to the sum of all n that do not fall, alike on
            all processes: where documents begin and end in the whole sequence.
        slopes: [H].
        All others: As for `attention`.

    Returns:
        [n, H, E]; with return_lse also lse [n, H].

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: As `attention`.

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
    if not options.keys() <= Packed.__annotations__.keys():
        _names.refuse_unknown(f"{_NAME}_varlen", options, attention_varlen)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(
                f"{_NAME}_varlen: {name} must have 3 axes, n, heads, size, got {list(x.shape)}"
            )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    share = Share(q, k, v, slopes, group, **options)
    described = describe("cu_seqlens", cu_seqlens, f"{_NAME}_varlen")
    _request.check_holds(f"{_NAME}_varlen", "cu_seqlens", described.dtype, "integers")
    share.documents = _values.as_int64(cu_seqlens.cpu().numpy())
    table = share.meet()
    total, edges = sum(table.lengths), share.documents
    row = edges.ndim == 1 and len(edges)
    if not row or edges[0] != 0 or edges[-1] != total or (np.diff(edges) < 0).any():
        raise ValueError(
            f"{_NAME}_varlen: cu_seqlens must start at 0, never fall and end at {total}, the"
            f" tokens of all pieces, got {edges.tolist()}"
        )
    out, lse = share.attend_documents(share.agree(table, share.needs(table)), implementation)
    return (out, lse) if return_lse else out


@contextmanager
def use(
    group: Group = None,
    *,
    halo: Literal["negotiate"] | int | Sequence[int] = "negotiate",
    lengths: Sequence[int] | None = None,
    check: bool = True,
) -> Iterator[None]:
    """Within the block `linbias.torch.attention` takes what this thread gives it for a share.

    A model that attends by that function, as those of `linbias.models`, is called on each process
    with its share (`context_parallel.shard(ids, dim=1)`) of the tokens, of the attention mask, and
    of labels that are already those of the next tokens; without a cache. Gradients of weights and
    slopes are the own share's, to be added up, as FSDP does. Where checkpoints of activations are
    recomputed, the block must hold backward as well.

    Args:
        group, halo, lengths, check: As for `attention`; padding needs halo="negotiate".

    Raises:
        RuntimeError: Nothing within the block called `linbias.torch.attention`.

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
    rank_and_size(group)
    shared = _InShares(group, halo, lengths, check)
    with put_in_place(shared):
        yield
    if not shared.num_calls:
        raise RuntimeError(
            "context_parallel.use: linbias.torch.attention must run within the block, but nothing"
            " called it: the model attends in another way, on each process to its own piece alone"
            " (linbias.models.load gives models that call it)"
        )


class _InShares:
    """What `use` puts in the place of `linbias.torch.attention`."""

    def __init__(self, group: Group, *options: Any) -> None:
        self.group, self.options = group, options
        self.num_calls = 0
        self.begins: int | None = None  # the number of the share's first token, if it was told

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Slopes | None,
        *,
        implementation: str,
        return_lse: bool,
        query_start: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        key_bound: Tensor | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if positions is not None:
            raise NotImplementedError(
                "attention: positions of a model, which count from the start of its piece, are"
                " not built yet for a sequence in pieces; context_parallel.attention takes those"
                " of the whole sequence"
            )
        self.num_calls += 1
        if mask is not None or options.pop("query_range", None) is not None:
            raise ValueError(
                "context_parallel.use: mask and query_range must be None, got one: pieces take"
                " key_range and window"
            )
        if q.shape[2] != k.shape[2] or (query_start is not None and query_start.any()):
            raise ValueError(
                "context_parallel.use: queries and keys must be those of one piece, so that there"
                f" is no cache (use_cache=False), got {q.shape[2]} queries and {k.shape[2]} keys"
            )
        share = Share(q, k, v, slopes, self.group, **options)
        share.within, share.begins = True, self.begins
        out, lse = _run(share, implementation, *self.options)
        return (out, lse) if return_lse else out

    def expect(self, position_ids: Tensor | None) -> None:
        """Take the numbers of a share's tokens; all processes hear of a wrong order."""
        self.begins = None
        if position_ids is not None and position_ids.numel():
            in_order = bool((position_ids.diff(dim=-1) == 1).all())
            self.begins = int(position_ids.min()) if in_order else OUT_OF_ORDER


def shard(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This process's share, a view, of a tensor x that all processes have; dim: of the sequence.

    Raises:
        ValueError: There are fewer tokens than processes.
    """
    rank, size = rank_and_size(group)
    if x.shape[dim] < size:
        raise ValueError(
            f"context_parallel.shard: x must have a token for each of {size} processes,"
            f" got {x.shape[dim]}"
        )
    return x.tensor_split(size, dim)[rank]
