"""TransformerLens: build_alibi_tensor, for its BLOOM and Falcon."""

import torch

from adapters import parts

NAME, PACKAGE, RUNS = "TransformerLens", "transformer-lens", "its bias; attention in NumPy"
theirs = parts.file_of(
    "transformer-lens", "transformer_lens/model_bridge/generalized_components/alibi_utils.py"
)


def attention(q, k, v, *, slopes, causal, scale, key_range=None, schedule="paper", max_bias=8.0):
    parts.one_sided(causal)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    mask = parts.padding_mask(k, key_range)
    bias = theirs.build_alibi_tensor(torch.tensor(mask), q.shape[1], torch.float32)
    return parts.attend(q, k, v, bias.numpy(), scale, causal, ~mask.astype(bool)[:, None, None])
