"""PyTorch's FlexAttention with the score_mod of its ALiBi example: slope * (key - query), behind a
causal mask.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from adapters import parts

NAME, PACKAGE, RUNS = "FlexAttention", "torch", "its attention, uncompiled; score_mod as published"


@parts.square
def attention(q, k, v, *, slopes, causal, scale, segments=None, return_lse=False):
    parts.one_sided(causal)
    if slopes.ndim == 2:
        raise NotImplementedError("one list of slopes")
    q, k, v = (torch.tensor(x) for x in (q, k, v))
    m = torch.tensor(slopes, dtype=torch.float32)
    text = None if segments is None else torch.tensor(segments)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + m[h] * (kv_idx - q_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        seen = q_idx >= kv_idx
        return seen if text is None else seen & (text[b, q_idx] == text[b, kv_idx])

    mask = create_block_mask(mask_mod, len(q), None, q.shape[2], k.shape[2], device="cpu")
    out, lse = flex_attention(
        q, k, v, score_mod, mask, scale, enable_gqa=q.shape[1] != k.shape[1], return_lse=True
    )
    return (out.numpy(), lse.numpy()) if return_lse else out.numpy()
