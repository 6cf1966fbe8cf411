"""linbias.torch.attention, with the implementation that it takes by itself."""

import numpy as np
import torch

import linbias
from linbias.torch import attention as ours

NAME, PACKAGE, RUNS = "linbias, PyTorch", "linbias", "all"
DTYPES = ("float32", "bfloat16")


def attention(
    q, k, v, *, slopes, causal, scale, dtype, right_slopes=None, key_range=None, query_start=None, segments=None,
    schedule="paper", max_bias=8.0, return_lse=False,
):  # fmt: skip
    if slopes is None:
        slopes = linbias.slopes(q.shape[1], schedule, max_bias)
    if query_start is None:
        query_start = np.full(len(q), k.shape[2] - q.shape[2])
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None]
    placed = {
        "right_slopes": right_slopes,
        "key_range": key_range,
        "query_start": query_start,
        "mask": mask,
    }
    out, lse = ours(
        *(torch.tensor(x).to(getattr(torch, dtype)) for x in (q, k, v)), torch.tensor(slopes), causal=causal,
        scale=scale, return_lse=True, **{n: None if x is None else torch.tensor(x) for n, x in placed.items()},
    )  # fmt: skip
    out = out.to(torch.float64 if dtype == "float64" else torch.float32).numpy()
    return (out, lse.numpy()) if return_lse else out
