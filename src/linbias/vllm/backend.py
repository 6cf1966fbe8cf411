"""The attention of vLLM 0.32 on CPUs, with linear biases near to far: all that touches it.

The engine keeps keys and values of a layer in pages, [num_pages, G, page_size, 2 D] numbers. Its
own kernels order them within a page as their instructions like it; ours keeps plain rows, the keys
before the values. A layer is therefore ours altogether, or the engine's.
"""

from math import nan
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from linbias.torch.packed import step

_logger = init_logger("vllm.linbias")


class Backend(CPUAttentionBackend):
    """The engine's own, whose layers may be ours."""

    @staticmethod
    def get_impl_cls() -> type["Layer"]:
        return Layer


class Layer(CPUAttentionBackendImpl):
    """The attention of a layer: ours where it has linear biases, else the engine's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = self._why_not()
        self.near_to_far = reason is None
        ours = "linbias: layers with linear biases attend near to far"
        _logger.info_once(
            f"linbias: layers keep vLLM's own attention: {reason}" if reason else ours
        )
        # The norm of the longest key of each page, [num_pages, G]. Pages that something else than
        # a layer writes to, or copies, would have none: then each call looks at all its keys.
        config = get_current_vllm_config()
        self.keeps_norms = config.kv_transfer_config is None and not config.model_config.is_hybrid
        self.cache: Tensor | None = None

    def _why_not(self) -> str | None:
        reasons = {
            "they have no linear biases": self.alibi_slopes is None,
            f"linbias has no pages for {self.attn_type!r}": self.attn_type
            != AttentionType.DECODER,
            "linbias has no soft cap of scores": self.logits_soft_cap,
            f"linbias has no cache of {self.kv_cache_dtype}": self.is_fp8_kv_cache,
            "linbias has no sinks": self.sinks is not None,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is None and self.kv_sharing_target_layer_name is not None:
            raise NotImplementedError(
                "linbias: a layer with linear biases must keep its own keys in vLLM, got one that"
                f" reads those of {self.kv_sharing_target_layer_name}; LINBIAS_VLLM=0 gives all"
                " layers to the engine's own attention"
            )
        return reason

    def do_kv_cache_update(self, layer: Any, *arrays: Tensor) -> None:
        """The engine's, before `forward`; ours writes there, where it knows the step."""
        if not self.near_to_far:
            super().do_kv_cache_update(layer, *arrays)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        asked: CPUAttentionMetadata | None,
        output: Tensor,
        **scales: Any,
    ) -> Tensor:
        """Fill output [tokens, H, D]; rows behind the actual tokens are padding."""
        if not self.near_to_far or asked is None:  # None: the engine warms up
            return super().forward(layer, query, key, value, kv_cache, asked, output, **scales)
        if asked.causal is not True or asked.dynamic_causal is not None:
            raise NotImplementedError(
                "linbias: a layer with linear biases must be causal in vLLM, got a call that is"
                " not; LINBIAS_VLLM=0 gives it to the engine's own attention"
            )
        if kv_cache is not self.cache:
            # Of pages that nobody wrote yet nothing is known.
            self.cache, norms = kv_cache, kv_cache.new_full(kv_cache.shape[:2], nan).float()
            arrays = *_pages(kv_cache), self.alibi_slopes, norms if self.keeps_norms else None
            # The engine counts a query's own key as well.
            window = None if self.sliding_window == -1 else (self.sliding_window - 1, 0)
            self.near_layer = step.Layer(*arrays, scale=self.scale, window=window)
        here, tokens = _step(asked), asked.num_actual_tokens
        here.write(self.near_layer, key[:tokens], value[:tokens])
        here.attention(self.near_layer, query[:tokens], output[:tokens])
        return output


def _step(asked: CPUAttentionMetadata) -> step.Step:
    """What all layers that get this metadata have in common, kept with it."""
    here = getattr(asked, "near_to_far", None)
    if here is None:
        slots = asked.slot_mapping[: asked.num_actual_tokens]
        here = step.Step(asked.block_table, asked.seq_lens, asked.query_start_loc, slots)
        asked.near_to_far = here
    return here


def _pages(kv_cache: Tensor) -> tuple[Tensor, ...]:
    """Views of the engine's pages as keys and values, [num_pages, page_size, G, D]."""
    num_pages, num_key_heads, page_size, both = kv_cache.shape
    rows = kv_cache.view(num_pages, num_key_heads, 2, page_size, both // 2)
    return rows.transpose(1, 3).unbind(2)
