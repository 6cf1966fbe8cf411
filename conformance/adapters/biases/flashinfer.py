"""FlashInfer: the formula of its kernels, which need CUDA: slope * (key - query)."""

import numpy as np

import linbias
from adapters import parts

NAME, PACKAGE, RUNS = "FlashInfer", None, "formula as published; attention in NumPy"


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    (_, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    parts.enough_keys(q, k)
    distance = np.arange(S) - np.arange(T)[:, None]
    return parts.attend(q, k, v, linbias.slopes(H)[:, None, None] * distance, scale, causal)
