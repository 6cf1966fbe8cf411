"""flash-attn 2: the formulas of its kernels, which need CUDA, written down from its sources.

With causal=True they add slope * key index, and otherwise -slope * |i + S - T - j|; softmax_lse is
of these scores."""

import numpy as np

from adapters import parts

NAME, PACKAGE, RUNS = "flash-attn 2", None, "formula as published; attention in NumPy"
CONVENTIONS = {"lse": "softmax_lse counts the bias from key 0 where causal"}


def attention(q, k, v, *, slopes, causal, scale, return_lse=False):
    (_, H, T, _), S = q.shape, k.shape[2]
    slopes = slopes.reshape(-1, H, 1, 1)
    keys = np.arange(S)
    bias = slopes * keys if causal else -slopes * np.abs(np.arange(T)[:, None] + S - T - keys)
    out = parts.attend(q, k, v, bias, scale, causal)
    if not return_lse:
        return out
    scores = scale * q.astype(float) @ k.swapaxes(-1, -2) + bias
    if causal:
        scores = np.where(keys > np.arange(T)[:, None] + S - T, -np.inf, scores)
    return out, np.logaddexp.reduce(scores, -1)
