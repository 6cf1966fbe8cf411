"""The paper's own code, a fork of fairseq: its formula, slope * key index in a causal mask, in
float32.
"""

import numpy as np

import linbias
from adapters import parts

NAME, PACKAGE, RUNS = "the paper's fairseq", None, "formula as published; attention in NumPy"


@parts.square
def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    H, S = q.shape[1], k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    bias = (linbias.slopes(H)[:, None, None] * np.arange(S)).astype(np.float32)
    return parts.attend(q, k, v, bias, scale, causal)
