"""MPT: the slopes of the next power of two, every second one first, down to 2^-alibi_bias_max.

Transformers 5.23 takes 2^-8 whatever the configuration says, and its bias ends at `max_seq_len`;
the code that MPT was trained with, and ours, does neither. Its bias counts the places of a row, so
that keys which a mask hides between others take up distance.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache, MptConfig
from transformers.models.mpt import modeling_mpt as reference
from transformers.utils import logging

from linbias.models.decoder.cache import CACHE, takes_cache
from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused.family import Attended, Bias, Family, FusedAttention, Options
from linbias.schedules import slopes

logger = logging.get_logger(__name__)


class FusedMptAttention(FusedAttention, reference.MptAttention):
    """Returns what the layer adds [B, T, hidden size], and the weights."""

    @takes_cache
    def fused_forward(
        self,
        layout: TokenLayout,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> Attended:
        qkv = self.Wqkv(hidden_states)
        gathered, weights = self.gather(qkv, layout, past_key_values, self.attn_dropout_p)
        return self.out_proj(gathered), weights

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.clip_qkv:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        # Fewer heads of keys and values, and norms, are those of `LinbiasMptForCausalLM`.
        shared = getattr(self, "kv_n_heads", self.n_heads)
        by_head = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = by_head.split([self.n_heads, shared, shared], dim=1)
        if hasattr(self, "q_ln"):
            q, k = _norm(self.q_ln, q), _norm(self.k_ln, k)
        return q, k, v


class FusedMptBlock(reference.MptBlock):
    """That of Transformers does not tell its attention that its weights are wanted."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("attention_mask")
        if kwargs.get("output_attentions") and isinstance(layout, TokenLayout):
            kwargs["attention_mask"] = replace(layout, need_weights=True)
        return super().forward(*args, **kwargs)


FusedMptBlock.__name__ = "MptBlock"  # by which sharding and device maps look for blocks


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Of [B, heads, T, D], over all heads at once or over each, as wide as the norm is."""
    x = x.transpose(1, 2)  # [B, T, heads, D]
    normed = norm(x.reshape(*x.shape[:2], -1, norm.normalized_shape[0]))
    return normed.view(x.shape).transpose(1, 2)


# What neither class computes, and which values say that a model does without.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "attn_config.prefix_lm": (False,),
    "attn_config.rope": (False,),
    "attn_config.nope": (False,),
    "attn_config.sliding_window_size": (-1, None),
    "attn_config.attn_logit_softcapping": (None,),
    "attn_config.attn_temperature_tuning.attn_scale": (0,),
    "attn_config.kv_dim": (None,),
    "attn_config.fused_qkv": (True,),
    "ffn_config.ffn_type": ("mptmlp",),
    "ffn_config.ffn_hidden_size": (None,),
    "ffn_config.ffn_act_fn": (None, {"name": "gelu", "approximate": "none"}),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "block_overrides": (None,),
    "final_logit_softcapping": (None,),
}
# What Transformers leaves out, mostly without a word, and `LinbiasMptForCausalLM` has.
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "attn_config.qk_ln": (False,),
    "attn_config.qk_gn": (False,),
    "attn_config.attn_type": ("multihead_attention",),
    "no_bias": (True,),
    "logit_scale": (None,),
    "expansion_ratio": (4,),
    "norm_eps": (1e-5,),
}


def check_supported(config: Any, caller: str) -> None:
    """Check that a configuration asks for ALiBi and for nothing that is not built."""
    if not config.attn_config.alibi:
        raise ValueError(f"{caller}: an MPT model must have attn_config.alibi = True, got False")
    _check(config, caller, _NOT_BUILT, "all else is not built")


def check_whole(config: MptConfig, caller: str) -> None:
    """Check that Transformers' class leaves out nothing that a configuration asks for."""
    reason = "the MPT of Transformers leaves it out, linbias.models.load(folder) does not"
    _check(config, caller, _LEFT_OUT, reason)


def always_fused(config: Any) -> bool:
    """Whether a configuration is one of `LinbiasMptForCausalLM`, which Transformers cannot run."""
    return hasattr(config, "num_key_value_heads")


def _check(config: Any, caller: str, allowed: dict[str, tuple[Any, ...]], reason: str) -> None:
    for path, values in allowed.items():
        value = config
        for name in path.split("."):
            get = value.get if isinstance(value, dict) else partial(getattr, value)
            value = get(name, values[0])
        if value not in values:
            got = f"must be {values[0]!r}, got {value!r:.60}"
            raise ValueError(f"{caller}: {path} of an MPT model {got}; {reason}")


def bias(config: MptConfig, options: Options) -> Bias:
    attention = config.attn_config
    check_supported(config, "fuse")
    if not always_fused(config):
        check_whole(config, "fuse")
        if attention.alibi_bias_max != 8:
            logger.warning_once(
                f"fuse: this MPT model has alibi_bias_max={attention.alibi_bias_max}. Its fused "
                "attention honours it; that of Transformers computes with 8 instead."
            )
    return options.bias(
        slopes(config.n_heads, "mpt", attention.alibi_bias_max),
        scale=attention.softmax_scale or (config.hidden_size / config.n_heads) ** -0.5,
        train_length=config.max_seq_len,
        counts_hidden=True,
    )


FAMILY = Family(
    body=reference.MptModel,
    attention=reference.MptAttention,
    arguments=f"self hidden_states position_bias {CACHE} attention_mask kwargs",
    fused={
        reference.MptAttention: FusedMptAttention,
        reference.MptBlock: FusedMptBlock,
    },
    bias=bias,
    num_heads_name="n_heads",
)
