"""curated-transformers: AttentionLinearBiases."""

import torch
from curated_transformers.layers.attention import AttentionLinearBiases

from adapters import parts

NAME = PACKAGE = "curated-transformers"
RUNS = "its bias; attention in NumPy"


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    (B, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    if not causal and T != S:
        raise NotImplementedError("as many queries as keys on both sides")
    build = AttentionLinearBiases(n_attention_heads=H, is_causal=causal, is_inverted=False)
    bias = build(attention_scores=torch.zeros(B, H, T, S))
    return parts.attend(q, k, v, bias.numpy(), scale, causal)
