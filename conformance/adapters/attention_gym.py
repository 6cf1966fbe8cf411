"""attention-gym: the formula of generate_alibi_bias, in FlexAttention; its program offers both
causal and not.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from adapters import parts

NAME, PACKAGE, RUNS = "attention-gym", None, "formula as published, in FlexAttention"
CONVENTIONS = parts.GEOMETRIC


@parts.square
def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    H = q.shape[1]
    parts.only(slopes, schedule, max_bias, H, "geometric")
    q, k, v = (torch.tensor(x) for x in (q, k, v))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * torch.exp2(-8.0 * (h + 1) / H)

    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cpu")
    grouped = q.shape[1] != k.shape[1]
    return flex_attention(
        q, k, v, score_mod, mask if causal else None, scale, enable_gqa=grouped
    ).numpy()
