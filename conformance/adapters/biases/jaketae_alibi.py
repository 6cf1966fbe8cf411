"""jaketae/alibi, to which others refer: the formula of its attention, which divides by the root of
the whole width.
"""

import numpy as np

import linbias
from adapters import parts

NAME, PACKAGE, RUNS = "jaketae/alibi", None, "formula as published; attention in NumPy"


@parts.square
def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    parts.equal_heads(q, k)
    H, S = q.shape[1], k.shape[2]
    parts.only(slopes, schedule, max_bias, H, "geometric")
    distance = np.arange(S) - np.arange(S)[:, None]
    bias = linbias.slopes(H, "geometric")[:, None, None] * distance
    return parts.attend(q, k, v, bias, (H * q.shape[3]) ** -0.5, causal)
