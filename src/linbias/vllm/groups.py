"""Heads in groups, so that vLLM takes back the pages that no head of a group can reach any more.

The engine frees a page once it lies outside the window of its layer. A layer with linear biases
has none, since its flattest head reads everything. With LINBIAS_VLLM_GROUPS=2 each two heads, the
steepest first, are a layer of their own for the engine, with the window that the weights prove for
every text (`linbias.streams`), the same in all layers. Each group is a call of its own, so groups
are off by default.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import bloom

from linbias.near_to_far import reach
from linbias.streams import largest_lead

_TOLERANCE = 2.0**-24  # the share of a row's weight that keys outside a window may hold
_logger = init_logger("vllm.linbias")


class Family(NamedTuple):
    """Where a family of models keeps the norm before attention and the projections behind it."""

    norm: str
    projections: str  # of queries, keys and values, in one matrix
    by_head: bool  # its rows: [H, 3, D], else [3, H, D]


BLOOM = Family("input_layernorm", "self_attention.query_key_value", by_head=True)
MPT = Family("norm_1", "attn.Wqkv", by_head=False)


class BloomForCausalLM(bloom.BloomForCausalLM):
    """The engine's BLOOM, its heads in groups."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        group_heads(self, vllm_config, BLOOM)


def group_heads(model: nn.Module, vllm_config: VllmConfig, family: Family) -> None:
    """Replace the attention layers of a model that is being built, where its weights allow it.

    Raises:
        ValueError: LINBIAS_VLLM_GROUPS is not a number.
    """
    layers = {name: x for name, x in model.named_modules() if isinstance(x, Attention)}
    first = next(iter(layers.values()))
    asked = os.environ.get("LINBIAS_VLLM_GROUPS", "0")
    if not asked.isdecimal():
        raise ValueError(f"LINBIAS_VLLM_GROUPS must be a number of heads, got {asked!r}")
    if (size := int(asked)) < 1 or not getattr(first.impl, "near_to_far", False):
        return
    reason = "groups need one rank"
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        slopes = first.impl.alibi_slopes.double().numpy()
        found = _leads(_weights(model, vllm_config, family), family, len(slopes), first.impl.scale)
        reason = "the weights say no windows" if found is None else ""
    if reason:
        _logger.warning_once("linbias: heads stay in one layer: %s", reason)
        return
    windows = np.ceil(reach(slopes, found, tolerance=_TOLERANCE)).clip(min=1)
    order = np.argsort(-slopes, kind="stable").tolist()
    heads = [order[i : i + size] for i in range(0, len(order), size)]
    longest = vllm_config.model_config.max_model_len
    most = [int(keys) if keys < longest else None for keys in (windows[x].max() for x in heads)]
    said = "linbias: heads in groups of %d keep so many keys, None for all: %s"
    _logger.info_once(said, size, str(most))
    for name, layer in layers.items():
        del vllm_config.compilation_config.static_forward_context[layer.layer_name]
        model.set_submodule(name, Groups(layer, heads, most, vllm_config))


class Groups(nn.Module):
    """In the place of a layer of attention: one for each group of its heads."""

    def __init__(
        self, layer: Attention, heads: list[list[int]], windows: list[int | None], of: VllmConfig
    ) -> None:
        super().__init__()
        self.head_size, self.sizes = layer.head_size, [len(group) for group in heads]
        slopes, alike = layer.impl.alibi_slopes.tolist(), (layer.head_size, layer.impl.scale)
        self.layers = nn.ModuleList(
            Attention(
                len(group),
                *alike,
                alibi_slopes=[slopes[head] for head in group],
                **{"cache_config": of.cache_config, "quant_config": of.quant_config},
                per_layer_sliding_window=window,
                prefix=f"{layer.layer_name}.group{i}",
            )
            for i, (group, window) in enumerate(zip(heads, windows, strict=True))
        )
        order = torch.tensor([head for group in heads for head in group])
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[tokens, H * D], as that of the layer."""
        given = (
            x.unflatten(-1, (-1, self.head_size))[:, self.order].split(self.sizes, dim=1)
            for x in (query, key, value)
        )
        parts = [layer(*of_group) for layer, *of_group in zip(self.layers, *given, strict=True)]
        out = torch.cat(parts, dim=-1).unflatten(-1, (-1, self.head_size))
        return out[:, self.back].flatten(1)


def _weights(
    model: nn.Module, vllm_config: VllmConfig, family: Family
) -> dict[int, dict[str, Tensor]]:
    """The norm and the projections of each layer, as they lie in the files."""
    read = getattr(get_model_loader(vllm_config.load_config), "get_all_weights", None)
    stored: Iterable[tuple[str, Tensor]] = read(vllm_config.model_config, model) if read else ()
    names = "|".join(re.escape(name) for name in (family.norm, family.projections))
    pattern = re.compile(rf"(\d+)\.((?:{names})\.(?:weight|bias))$")
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, weight in stored:
        if match := pattern.search(name):
            found[int(match[1])][match[2]] = weight.double()
    return found


def _leads(weights: dict[int, Any], family: Family, num_heads: int, scale: float) -> Any:
    """[H]: the most by which a key's score leads the query's own in any layer; None: unknown."""
    leads = []
    for layer in weights.values():
        gain = layer.get(f"{family.norm}.weight")
        rows = layer.get(f"{family.projections}.weight")
        if gain is None or rows is None or len(rows) != 3 * gain.numel():
            return None
        shift = layer.get(f"{family.norm}.bias", torch.zeros_like(gain))
        bias = layer.get(f"{family.projections}.bias", rows.new_zeros(len(rows))) + rows @ shift
        shape = (num_heads, 3, -1) if family.by_head else (3, num_heads, -1)
        F, f = (x.unflatten(0, shape) for x in (rows * gain, bias))
        if family.by_head:
            F, f = F.transpose(0, 1), f.transpose(0, 1)
        norm: Any = {"radius": math.sqrt(gain.numel()), "scale": scale, "centred": True}
        (q, k, _), f = F.numpy(), f[0].numpy()
        leads.append([largest_lead(q[h], k[h], f[h], **norm) for h in range(num_heads)])
    return np.array(leads).max(0) if leads else None
