"""linbias' own definition in NumPy: the vectors are made with it, so this checks the checker."""

import numpy as np

import linbias

NAME, PACKAGE, RUNS = "linbias, NumPy", "linbias", "all"
DTYPES = ("float64",)


def attention(
    q, k, v, *, slopes, causal, scale, right_slopes=None, key_range=None, query_start=None, segments=None,
    schedule="paper", max_bias=8.0, return_lse=False,
):  # fmt: skip
    if slopes is None:
        slopes = linbias.slopes(q.shape[1], schedule, max_bias)
    mask = None
    if segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None, :]
    if query_start is None:
        query_start = np.full(len(q), k.shape[2] - q.shape[2])
    return linbias.attention(
        q, k, v, slopes, causal=causal, right_slopes=right_slopes, scale=scale, key_range=key_range,
        query_start=query_start, mask=mask, return_lse=return_lse,
    )  # fmt: skip
