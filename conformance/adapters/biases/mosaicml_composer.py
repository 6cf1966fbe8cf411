"""MosaicML's Composer: the bias that its ALiBi algorithm gives to GPT-2 (causal) and BERT (both
sides).
"""

import torch

from adapters import parts

NAME, PACKAGE, RUNS = "MosaicML Composer", "mosaicml", "its bias; attention in NumPy"
theirs = parts.file_of(
    "mosaicml", "composer/algorithms/alibi/attention_surgery_functions/utils.py"
)


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    (_, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    if T > S or (not causal and T != S):
        raise NotImplementedError("no more queries than keys; as many on both sides")
    layer = theirs.register_alibi(torch.nn.Linear(1, 1), H, S, causal)
    return parts.attend(q, k, v, layer.alibi.numpy(), scale, causal)
