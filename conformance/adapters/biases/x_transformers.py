"""x-transformers: the bias of AlibiPositionalBias."""

import torch
from x_transformers.x_transformers import AlibiPositionalBias

from adapters import parts

NAME, PACKAGE, RUNS = "x-transformers", "x-transformers", "its bias; attention in NumPy"


def attention(q, k, v, *, slopes, causal, scale, query_start=None, schedule="paper", max_bias=8.0):
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    if slopes is not None and slopes.ndim == 2:
        raise NotImplementedError("one list of slopes")
    if slopes is None:
        parts.only(slopes, schedule, max_bias, H)
    build = AlibiPositionalBias(heads=H, slopes=None if slopes is None else slopes.tolist())
    parts.enough_keys(q, k)
    if query_start is None:
        return parts.attend(q, k, v, build(T, S), scale, causal)
    positions = torch.arange(T) + int(query_start[0])
    hidden = causal & (torch.arange(S) > positions[:, None]).numpy()
    bias = build.forward_custom_pos(positions, torch.arange(S))
    if len(q) > 1:
        raise NotImplementedError("the adapter places one row")
    return parts.attend(q, k, v, bias, scale, False, hidden)
