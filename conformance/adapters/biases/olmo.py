"""ai2-olmo: alibi_attention_bias, which OLMo has as an option; its released models are trained
without.
"""

from types import SimpleNamespace

import torch
from olmo.model import alibi_attention_bias

from adapters import parts

NAME, PACKAGE, RUNS = "OLMo", "ai2-olmo", "its bias; attention in NumPy"
CONVENTIONS = parts.GEOMETRIC


def attention(q, k, v, *, slopes, causal, scale, schedule="geometric", max_bias=8.0):
    parts.one_sided(causal)
    (_, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H, "geometric")
    parts.enough_keys(q, k)
    config = SimpleNamespace(n_heads=H, alibi_bias_max=max_bias)
    bias = alibi_attention_bias(S, config, torch.device("cpu"))[:, :, S - T :]
    return parts.attend(q, k, v, bias.numpy(), scale, causal)
