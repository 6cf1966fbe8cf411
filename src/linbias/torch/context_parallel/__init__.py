"""Attention over a sequence in shards on several processes: a head fetches what it can reach.

First `needed_halo` finds how many keys beyond its shard each head needs; then attention runs once
over [halo, own shard, halo]. docs/guides/many-machines.md says what that sends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

from torch import Tensor

from linbias._request import keywords
from linbias.torch.call import Slopes, describe
from linbias.torch.context_parallel.call import NAME, Shard
from linbias.torch.context_parallel.needed import needed_halo
from linbias.torch.context_parallel.processes import Group, heard_by_all, rank_and_size
from linbias.torch.shard import put_in_place
from linbias.torch.standing import Positions


class Packed(TypedDict, total=False):
    """The keywords of `linbias.torch.attention` that documents in shards have too."""

    causal: bool
    right_slopes: Slopes | None
    scale: float | None
    tolerance: float | None
    window: tuple[int, int] | None


class Options(Packed, total=False):
    """The keywords of `linbias.torch.attention` that a sequence in shards has too."""

    key_range: Tensor | None
    positions: Positions | None
    dropout: float


@keywords.show_keywords(Options)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    group: Group = None,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `linbias.torch.attention` on a sequence whose shards lie on processes, by rank.

    Each process gives its own shard, of any length, also 0, and gets the results of its own
    queries: those of the whole sequence, up to rounding and the tolerance. Differentiable in q, k,
    v and the slopes, whose gradients are those of the whole sequence on every process. A repeated
    call gives the same bits. Each query stands at the key of its own number.

    Args:
        q: [B, H, n, D], the shard's n tokens; B, H, dtype and options alike on all processes.
        k: [B, G, n, D].
        v: [B, G, n, E].
        slopes, causal, right_slopes, scale, window, implementation, return_lse: As for
            `linbias.torch.attention`. No more is fetched than a window shows.
        key_range: [B, 2], likewise, counted in the whole sequence.
        positions: [n], [B, n] or [B, H, n], likewise: where the shard's keys stand, and its
            queries; they never fall from shard to shard either. Every process gets those of all.
        dropout: Likewise; its mask is that of one process with the seed of rank 0.
        tolerance: Likewise; half of it for keys that are not fetched, half for those not read.
        group: A process group, or a mesh of one dimension; None is the group of all processes.

    Returns:
        [B, H, n, E] in q's dtype; with return_lse also lse [B, H, n], float32 (float64 for
        float64 inputs).

    Raises:
        TypeError, ValueError, NotImplementedError: As `linbias.torch.attention`; or q, k and v are
            not equally long, or the processes' calls differ.
        RuntimeError: Another process refused its arguments, named by rank, or died or was too
            late.

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
    with heard_by_all(k, group):
        if not options.keys() <= Options.__annotations__.keys():
            keywords.refuse_unknown(NAME, options, attention)
        shard = Shard(q, k, v, slopes, group, **options)
    shard.meet()
    out, lse = shard.attend(needed_halo(shard), implementation)
    return (out, lse) if return_lse else out


@keywords.show_keywords(Packed)
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
    """Run `linbias.torch.attention_varlen` on packed documents, cut into shards anywhere.

    Otherwise as `attention`; only documents at the edges fetch keys.

    Args:
        q: [n, H, D], the shard's n tokens.
        k: [n, G, D], finite, as v is, or other documents see it.
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
    function = f"{NAME}_varlen"
    with heard_by_all(k, group):
        if not options.keys() <= Packed.__annotations__.keys():
            keywords.refuse_unknown(function, options, attention_varlen)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if len(shape := describe(name, x, function).shape) != 3:
                raise ValueError(
                    f"{function}: {name} must have 3 axes, n, heads, size, got {list(shape)}"
                )
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        shard = Shard(q, k, v, slopes, group, documents=cu_seqlens, **options)
    shard.meet()
    out, lse = shard.attend(needed_halo(shard), implementation)
    out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return (out, lse) if return_lse else out


@contextmanager
def use(group: Group = None) -> Iterator[None]:
    """Within the block `linbias.torch.attention` takes what this thread gives it for a shard.

    A model that attends by that function, as those of `linbias.models`, is called on each process
    with its shard (`context_parallel.shard(ids, dim=1)`) of the tokens, of the attention mask, and
    of labels that are already those of the next tokens; without a cache. Gradients of weights and
    slopes are the own shard's, to be added up, as FSDP does. Where checkpoints of activations are
    recomputed, the block must hold backward as well.

    Args:
        group: As for `attention`.

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
    shared = _InShards(group)
    with put_in_place(shared):
        yield
    if not shared.num_calls:
        raise RuntimeError(
            "context_parallel.use: linbias.torch.attention must run within the block, but nothing"
            " called it: the model attends in another way, on each process to its own shard alone"
            " (linbias.models.load gives models that call it)"
        )


class _InShards:
    """What `use` puts in the place of `linbias.torch.attention`."""

    begins: int | None = None  # the number of the shard's first token, if it was told
    in_order = True  # whether its tokens' numbers follow each other

    def __init__(self, group: Group) -> None:
        self.group, self.num_calls = group, 0

    def expect(self, position_ids: Tensor | None) -> None:
        """Take the numbers of a shard's tokens."""
        self.begins, self.in_order = None, True
        if position_ids is not None and position_ids.numel():
            self.begins = int(position_ids.min())
            self.in_order = bool((position_ids.diff(dim=-1) == 1).all())

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
        query_range: Tensor | None = None,
        positions: Tensor | None = None,
        key_bound: Tensor | None = None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.num_calls += 1
        with heard_by_all(k, self.group):
            if not self.in_order:
                raise ValueError(
                    "context_parallel.use: position_ids of a shard must count on from token to"
                    " token: shards are contiguous (context_parallel.shard), not made of head and"
                    " tail"
                )
            if positions is not None:
                raise NotImplementedError(
                    "attention: positions of a model, which count from the start of its shard, are"
                    " not built yet for a sequence in shards; context_parallel.attention takes"
                    " those of the whole sequence"
                )
            if mask is not None or query_range is not None:
                raise ValueError(
                    "context_parallel.use: mask and query_range must be None, got one: shards take"
                    " key_range and window"
                )
            if q.shape[2] != k.shape[2] or (query_start is not None and query_start.any()):
                raise ValueError(
                    "context_parallel.use: queries and keys must be those of one shard, so that"
                    f" there is no cache (use_cache=False), got {q.shape[2]} queries and"
                    f" {k.shape[2]} keys"
                )
            of_model: dict[str, Any] = {"of_model": True, "begins": self.begins}
            shard = Shard(q, k, v, slopes, self.group, **of_model, **options)
        shard.meet()
        out, lse = shard.attend(needed_halo(shard), implementation)
        return (out, lse) if return_lse else out


def shard(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This process's shard, a view, of a tensor x that all processes have; dim: of the sequence.

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
