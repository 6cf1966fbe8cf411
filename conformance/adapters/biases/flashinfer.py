"""FlashInfer: the formula of its kernels, which need CUDA: slope * (key - query)."""

import numpy as np

from adapters import parts

NAME, PACKAGE, RUNS = "FlashInfer", None, "formula as published; attention in NumPy"
DTYPES = ("float32",)


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    import linbias

    (_, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    if T > S:
        raise NotImplementedError("no more queries than keys")
    distance = np.arange(S) - np.arange(T)[:, None]
    return parts.attend(q, k, v, linbias.slopes(H)[:, None, None] * distance, scale, causal)
