"""Transformers: an MPT model of one layer, with its own masks and cache; max_seq_len is 2,048."""

import torch
from transformers import MptConfig, MptModel

from adapters import parts

NAME, PACKAGE, RUNS = "Transformers, MPT", "transformers", "the model's attention, masks and cache"
DTYPES = ("float32", "bfloat16")


def attention(
    q, k, v, *, slopes, causal, scale, dtype, key_range=None, schedule="mpt", max_bias=8.0
):
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    (_, H, _, D) = q.shape
    parts.only(slopes, schedule, max_bias, H, "mpt")
    parts.enough_keys(q, k)
    biases = {"alibi": True, "alibi_bias_max": int(max_bias)}
    config = MptConfig(d_model=H * D, n_layers=1, n_heads=H, vocab_size=8, attn_config=biases)
    model = MptModel(config)

    def fuse(*qkv):  # [B, T, 3 * H * D]
        return torch.cat([x.transpose(1, 2).flatten(2) for x in qkv], 2)

    names = (model.blocks[0].attn, "Wqkv", "out_proj", fuse)
    return parts.through(model, *names, q, k, v, key_range, dtype)
