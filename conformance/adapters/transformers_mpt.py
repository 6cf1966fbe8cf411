"""Transformers: an MPT model of one layer, with its own masks and cache; max_seq_len is its
default, 2,048.
"""

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
    if slopes is None and schedule == "mpt":
        pass  # with any alibi_bias_max
    else:
        parts.only(slopes, schedule, max_bias, q.shape[1])
    if q.shape[2] > k.shape[2]:
        raise NotImplementedError("no more queries than keys")
    config = MptConfig(
        d_model=q.shape[1] * q.shape[3], n_layers=1, n_heads=q.shape[1], vocab_size=8,
        attn_config={"alibi": True, "alibi_bias_max": int(max_bias)},
    )  # fmt: skip
    model = MptModel(config).eval().to(getattr(torch, dtype))

    def fuse(*qkv):  # [B, T, 3 * H * D]
        return torch.cat([x.transpose(1, 2).flatten(2) for x in qkv], 2)

    out = parts.through(
        model, model.blocks[0].attn, "Wqkv", "out_proj", fuse, q, k, v,
        parts.padding_mask(k, key_range),
    )  # fmt: skip
    return out.float().numpy().astype(q.dtype)
