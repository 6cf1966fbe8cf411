"""keras-hub: the layer AlibiBias on PyTorch."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras_hub
import torch

from adapters import parts

NAME, PACKAGE, RUNS = "keras-hub", "keras-hub", "its bias; attention in NumPy"


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    parts.one_sided(causal)
    (B, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H, "mpt")
    bias = keras_hub.layers.AlibiBias(alibi_bias_max=int(max_bias))(torch.zeros(B, H, T, S))
    return parts.attend(q, k, v, bias.detach().cpu().numpy(), scale, causal)
