"""Transformers: a Falcon model of one layer, `eager`. Falcon divides the bias by sqrt(D), which
its checkpoints are trained with: the adapter multiplies it back, so that rows say what else is
different."""

import torch
from transformers import FalconConfig, FalconModel
from transformers.models.falcon import modeling_falcon

from adapters import parts

NAME, PACKAGE, RUNS = (
    "Transformers, Falcon (eager)",
    "transformers",
    "the model's attention, masks and cache; its bias times sqrt(D)",
)
DTYPES = ("float32", "bfloat16")
build = modeling_falcon.build_alibi_tensor


def attention(
    q, k, v, *, slopes, causal, scale, dtype, key_range=None, schedule="paper", max_bias=8.0,
    implementation="eager",
):  # fmt: skip
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    if q.shape[2] > k.shape[2]:
        raise NotImplementedError("no more queries than keys")
    config = FalconConfig(
        hidden_size=q.shape[1] * q.shape[3], num_hidden_layers=1, num_attention_heads=q.shape[1],
        vocab_size=8, alibi=True, multi_query=False, new_decoder_architecture=False,
        attn_implementation=implementation,
    )  # fmt: skip
    modeling_falcon.build_alibi_tensor = lambda *args, **kw: build(*args, **kw) / scale
    model = FalconModel(config).eval().to(getattr(torch, dtype))

    def fuse(*qkv):  # [B, T, H * 3 * D]
        return torch.stack(qkv, 3).transpose(1, 2).flatten(2)

    out = parts.through(
        model, model.h[0].self_attention, "query_key_value", "dense", fuse, q, k, v,
        parts.padding_mask(k, key_range),
    )  # fmt: skip
    return out.float().numpy().astype(q.dtype)
