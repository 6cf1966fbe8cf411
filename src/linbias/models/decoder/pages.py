"""Keys in pages: how models run in Transformers' continuous batching, behind `generate_batch`.

The engine lays the new tokens of many requests side by side in one row, and keeps their keys in
pages that requests share and that it copies and hands on. The attention implementations that it
admits are a fixed list, none of which knows a bias. `Manager` leaves a model its own, whose layers
write and read the pages themselves. Made for the engine of Transformers 5.21 to 5.24.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.generation.continuous_batching import PagedAttentionCache

from linbias.models.decoder.positions import NO_OPTIONS, LinearBias, Position, Stepped
from linbias.torch import attention_paged, write_pages
from linbias.torch.packed.paged import norms_of

Method = Position | LinearBias


class Manager(ContinuousBatchingManager):
    """That of Transformers, for models whose own attention reads pages."""

    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """Keep the attention of the model: Transformers' own knows no bias."""


def init_continuous_batching(
    model: Any,
    methods: Iterable[Method],
    generation_config: Any = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> ContinuousBatchingManager:
    """As the method of this name of Transformers' models, for layers that attend by `methods`.

    What cannot work is refused here: later it would fail in a thread of its own.
    """
    for method in methods:
        _check(model, method)
    if (kept := getattr(model, "_cached_continuous_batching_manager", None)) is not None:
        return kept  # that of generate_batch(..., persistent_manager=True)
    generation_config = copy(generation_config or model.generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # as the engine says it
    asked = continuous_batching_config or ContinuousBatchingConfig()
    manager = Manager(model, generation_config, asked, workload_hints)
    resolved = manager.continuous_batching_config
    compiled = resolved.varlen_compile_config or resolved.decode_compile_config
    if compiled or any(resolved.cuda_graph_booleans):
        refuse_pages(
            model,
            "continuous_batching_config must ask for neither compilation nor CUDA graphs, since "
            f"tables of pages are read, got {compiled or resolved.use_cuda_graph}",
        )
    return manager


def _check(model: Any, method: Method) -> None:
    if isinstance(method, Stepped):
        refuse_pages(
            model,
            "the position method must need keys and values alone, which is all that pages hold, "
            f"got {type(method).__name__}, whose tokens have steps of their own",
        )
    if getattr(getattr(method, "slopes", None), "follows_length", False):
        refuse_pages(
            model,
            "slope_scale must be None or a number, since prompts are read in parts, which have "
            "lengths of their own, got 'interpolate'",
        )


def refuse_pages(model: Any, why: str) -> None:
    raise ValueError(f"{type(model).__name__}.generate_batch: {why}")


@dataclass(frozen=True)
class Pages:
    """New tokens of B requests in one row, and where their keys lie in the engine's pages.

    Rows of pages have numbers, page * page_size + row, that are the same in every layer.
    """

    positions: Tensor  # [1, T]
    cache: PagedAttentionCache
    new_rows: Tensor  # [T], where the keys of the new tokens go
    rows: Tensor  # [S], where all keys are, request by request
    cu_seqlens_q: Tensor  # [B + 1], into the T new tokens
    cu_seqlens_k: Tensor  # [B + 1], into the S keys
    block_table: Tensor  # [B, pages of the longest]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, method: Method, layer: int) -> Tensor:
        """Write k, v [1, G, T, D] into pages; return what the queries gather, [1, H, T, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        k_pages, v_pages = self.cache.layer_to_allocator[layer].get_cache_for_block_table(layer)
        # For Falcon the engine has as many heads of keys as of queries, whatever it shares.
        copies = k_pages.shape[2] // k.shape[1]
        k, v = (x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (k, v))
        write_pages(k, v, k_pages, v_pages, self.new_rows)
        if not isinstance(method, LinearBias):
            return self._attend_one_by_one(q, k_pages, v_pages, method)
        out = attention_paged(
            q,
            k_pages,
            v_pages,
            self.block_table,
            self.cu_seqlens_k.diff(),
            cu_seqlens_q=self.cu_seqlens_q,
            page_norms=self._page_norms(k, v, layer, len(k_pages)),
            implementation=method.implementation,
            return_lse=False,
            **method.fall(q, len(self.rows), NO_OPTIONS),
        )
        assert isinstance(out, Tensor)
        return out.transpose(0, 1)[None]

    def _attend_one_by_one(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, method: Method
    ) -> Tensor:
        """For what is more than slopes: the keys of each request out of their pages."""
        gathered, new, old = [], 0, 0  # where a request begins among tokens, and among keys
        ends = zip(self.cu_seqlens_q.tolist()[1:], self.cu_seqlens_k.tolist()[1:], strict=True)
        for end, last in ends:
            rows = self.rows[old:last]
            of_one = q[new:end], k_pages.flatten(0, 1)[rows], v_pages.flatten(0, 1)[rows]
            one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in of_one)
            gathered.append(method.attend(one_q, one_k, one_v, NO_OPTIONS))
            new, old = end, last
        return torch.cat(gathered, dim=2)

    def _page_norms(self, k: Tensor, v: Tensor, layer: int, num_pages: int) -> Tensor:
        """[num_pages, G], in every row a bound on all keys that the layer ever wrote: the engine
        copies pages without a word.
        """
        bounds, wide = (
            _BOUNDS.setdefault(self.cache, {}),
            torch.promote_types(k.dtype, torch.float32),
        )
        new = norms_of(k, v, wide).amax(0)
        if layer not in bounds:
            bounds[layer] = new.new_zeros(num_pages, len(new))
        norms = bounds[layer]
        if not bool((new <= norms[0]).all()):  # NaN, too
            norms.copy_(torch.maximum(new, norms[0]).expand_as(norms))
        return norms


_BOUNDS: WeakKeyDictionary[PagedAttentionCache, dict[int, Tensor]] = WeakKeyDictionary()
# What the engine gives a model beside ids, and what a model without its cache does not take.
_GIVEN = (
    *("cache", "position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"),
    *("max_length_k", "write_index", "read_index", "block_table", "logits_indices"),
    *("logits_processor_args", "is_causal"),
)


def take_pages(given: dict[str, Any]) -> Pages | None:
    """Take what the engine gives out of the named arguments of a call; None: it does not call."""
    if not isinstance(cache := given.get("cache"), PagedAttentionCache):
        return None
    taken = {name: given.pop(name, None) for name in _GIVEN}
    (allocator,) = cache.cache_allocators.values()  # one kind of layers
    size, cu_seqlens_k = allocator.tokens_per_page, taken["cu_seq_lens_k"][allocator.layer_type]
    (new_rows,), (rows,) = taken["write_index"], taken["read_index"]
    rows = rows if len(rows) else new_rows  # where no request has older keys, none are named
    num_pages = -(-int(cu_seqlens_k.diff().max()) // size)
    first = cu_seqlens_k[:-1, None] + size * torch.arange(num_pages, device=rows.device)
    return Pages(
        positions=taken["position_ids"],
        cache=cache,
        new_rows=new_rows,
        rows=rows,
        cu_seqlens_q=taken["cu_seq_lens_q"],
        cu_seqlens_k=cu_seqlens_k,
        block_table=rows[first.clamp(max=len(rows) - 1)] // size,
    )
