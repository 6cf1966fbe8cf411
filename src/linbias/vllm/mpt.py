"""MPT, which vLLM knew until 0.28, out of its parallel layers."""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import AutoWeightsLoader, make_layers, maybe_prefix
from vllm.sequence import IntermediateTensors

from linbias.schedules import slopes
from linbias.vllm.groups import MPT, group_heads

# What is not built here, and which values say that a model does without.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "attn_config.alibi": (True,),
    "attn_config.attn_type": ("multihead_attention",),
    "attn_config.kv_n_heads": (None,),
    "attn_config.prefix_lm": (False,),
    "attn_config.qk_gn": (False,),
    "attn_config.qk_ln": (False,),
    "attn_config.rope": (False,),
    "attn_config.sliding_window_size": (-1, None),
    "logit_scale": (None,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}


def _check(config: Any) -> None:
    for path, values in _NOT_BUILT.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name, values[0])
        if value not in values:
            raise ValueError(f"MPT in vLLM: {path} must be {values[0]!r}, got {value!r}")


class MptAttention(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        asked, rest = config.attn_config, _rest(config, vllm_config)
        width, size, self.clip = config.d_model, config.d_model // config.n_heads, asked.clip_qkv
        self.Wqkv = QKVParallelLinear(width, size, config.n_heads, prefix=f"{prefix}.Wqkv", **rest)
        self.out_proj = RowParallelLinear(width, width, prefix=f"{prefix}.out_proj", **rest)
        num_heads = self.Wqkv.num_heads  # of this rank
        first = self.Wqkv.tp_rank * num_heads
        steps = slopes(config.n_heads, "mpt", asked.alibi_bias_max)
        self.attn = Attention(
            num_heads,
            size,
            size**-0.5 if asked.softmax_scale is None else asked.softmax_scale,
            alibi_slopes=steps[first : first + num_heads].tolist(),
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.Wqkv(x)
        qkv = qkv.clamp(-self.clip, self.clip) if self.clip else qkv
        return self.out_proj(self.attn(*qkv.chunk(3, dim=-1)))


def _rest(config: Any, vllm_config: VllmConfig) -> dict[str, Any]:
    quantized = {"quant_config": vllm_config.quant_config}
    return {"bias": not config.no_bias, "return_bias": False, **quantized}


class MptFeedForward(nn.Sequential):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        width, inner = config.d_model, config.expansion_ratio * config.d_model
        rest = _rest(config, vllm_config)
        up = ColumnParallelLinear(width, inner, prefix=f"{prefix}.up_proj", **rest)
        down = RowParallelLinear(inner, width, prefix=f"{prefix}.down_proj", **rest)
        super().__init__(OrderedDict(up_proj=up, act=get_act_fn("gelu"), down_proj=down))


class MptBlock(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(config), _norm(config)
        self.attn = MptAttention(config, vllm_config, f"{prefix}.attn")
        self.ffn = MptFeedForward(config, vllm_config, f"{prefix}.ffn")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


def _norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon, bias=not config.no_bias)


@support_torch_compile
class MptModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.wte = VocabParallelEmbedding(config.vocab_size, config.d_model)
        block = partial(MptBlock, config, vllm_config)
        _, _, self.blocks = make_layers(config.n_layers, block, f"{prefix}.blocks")
        self.norm_f = _norm(config)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x)


class MptForCausalLM(nn.Module, SupportsQuant):
    """MPT as Transformers keeps its weights, in one stage of a pipeline.

    Raises a ValueError where the configuration asks for what is not built here.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        _check(config)
        named = maybe_prefix(prefix, "transformer")
        self.transformer = MptModel(vllm_config=vllm_config, prefix=named)
        self.lm_head = self.transformer.wte  # whose weights it has
        self.logits_processor = LogitsProcessor(config.vocab_size)
        if not config.attn_config.clip_qkv:  # what is clipped is not linear
            group_heads(self, vllm_config, MPT)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.transformer.wte(input_ids)

    def forward(self, input_ids: Tensor | None, positions: Tensor, **rest: Any) -> Tensor:
        return self.transformer(input_ids, positions, **rest)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = (
            (f"transformer.{name.removeprefix('transformer.')}", weight)
            for name, weight in weights
            if not name.startswith("lm_head.")
        )
        return AutoWeightsLoader(self).load_weights(named)
