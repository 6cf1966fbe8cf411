"""AXLearn: ALiBiAttentionLogitBiasLayer as its PyTorch adapter has it."""

import numpy as np
import torch

from adapters import parts

NAME, PACKAGE, RUNS = "AXLearn", "axlearn", "its bias and masks (PyTorch); attention in NumPy"
theirs = parts.file_of("axlearn", "axlearn/common/adapter_torch.py")


@parts.square
def attention(
    q, k, v, *, slopes, causal, scale, segments=None, key_range=None, schedule="paper",
    max_bias=8.0,
):  # fmt: skip
    parts.one_sided(causal)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    S = k.shape[2]
    real = parts.padding_mask(k, key_range)
    segments = real if segments is None else segments + 1  # 0 is padding there
    positions = torch.arange(S)[None].expand(len(q), S)
    bias = theirs.ALiBiAttentionLogitBiasLayer(q.shape[1])(
        segment_ids=torch.tensor(segments), positions=positions
    )
    bias = np.where(bias.numpy() < -1e8, -np.inf, bias.numpy())
    return parts.attend(q, k, v, bias, scale, False)
