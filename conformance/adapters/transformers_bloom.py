"""Transformers: a BLOOM model of one layer, with its own masks and cache."""

import torch
from transformers import BloomConfig, BloomModel

from adapters import parts

NAME, PACKAGE, RUNS = (
    "Transformers, BLOOM",
    "transformers",
    "the model's attention, masks and cache",
)
DTYPES = ("float32", "bfloat16")


def attention(
    q, k, v, *, slopes, causal, scale, dtype, key_range=None, schedule="paper", max_bias=8.0
):
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    if q.shape[2] > k.shape[2]:
        raise NotImplementedError("no more queries than keys")
    config = BloomConfig(
        hidden_size=q.shape[1] * q.shape[3], n_layer=1, n_head=q.shape[1], vocab_size=8
    )
    model = BloomModel(config).eval().to(getattr(torch, dtype))

    def fuse(*qkv):  # [B, T, H * 3 * D]
        return torch.stack(qkv, 3).transpose(1, 2).flatten(2)

    out = parts.through(
        model, model.h[0].self_attention, "query_key_value", "dense", fuse, q, k, v,
        parts.padding_mask(k, key_range),
    )  # fmt: skip
    return out.float().numpy().astype(q.dtype)
