"""MLX: the bias of nn.ALiBi, on the CPU."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from adapters import parts

NAME, PACKAGE, RUNS = "MLX", "mlx", "its bias; attention in NumPy"


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    (B, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    parts.enough_keys(q, k)
    bias = nn.ALiBi()(mx.zeros((B, H, T, S)), offset=S - T)
    return parts.attend(q, k, v, np.array(bias), scale, causal)
