"""llm-foundry: the biases and the `torch` attention of MPT as it was trained."""

import sys
from unittest.mock import MagicMock

import torch

from adapters import parts

NAME, PACKAGE, RUNS = "llm-foundry", "llm-foundry", "its bias and its PyTorch attention"
DTYPES = ("float32", "bfloat16")
# What its file imports beside functions: registries and builders of layers.
for name in (
    "llmfoundry",
    "llmfoundry.layers_registry",
    "llmfoundry.models",
    "llmfoundry.models.layers",
    "llmfoundry.models.layers.layer_builders",
    "llmfoundry.models.utils",
    "llmfoundry.models.utils.config_defaults",
):
    sys.modules[name] = MagicMock()
theirs = parts.file_of("llm-foundry", "llmfoundry/models/layers/attention.py")


def attention(q, k, v, *, slopes, causal, scale, dtype, schedule="mpt", max_bias=8.0):
    (B, H, T, D), G, S = q.shape, k.shape[1], k.shape[2]
    parts.only(slopes, schedule, max_bias, H, "mpt")
    if T not in (1, S):
        raise NotImplementedError("as many queries as keys, or one")
    kind = getattr(torch, dtype)
    # MPT's model: a bias of [1, H, 1 or S, S] in the model's type, added to by the attention.
    zeros = torch.zeros(theirs.attn_bias_shape("torch", H, S, True, causal, False), dtype=kind)
    bias = theirs.build_attn_bias(
        "torch", zeros, H, S, causal=causal, alibi=True, alibi_bias_max=max_bias
    )
    flat = [torch.tensor(x).to(kind).transpose(1, 2).flatten(2) for x in (q, k, v)]
    out, *_ = theirs.scaled_multihead_dot_product_attention(
        *flat,
        H,
        G,
        softmax_scale=scale,
        attn_bias=bias,
        is_causal=theirs._reset_is_causal(T, S, causal),
    )
    return out.reshape(B, T, H, D).transpose(1, 2).float().numpy().astype(q.dtype)
