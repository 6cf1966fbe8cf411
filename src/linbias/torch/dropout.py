"""Attention dropout whose mask is a function of (seed, batch, head, query, key) alone.

Every implementation, and backward again, draws the same mask by 32-bit integer arithmetic:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    row  = mix(mix(mix(seed) ^ (b * H + h)) ^ t)
    keep = mix(row ^ mix(s)) >= dropout * 2^32
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """Take a 31-bit seed, int64 [], from PyTorch's generator of the device."""
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor, dropout: float, batch_heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """[..., T, S], bool: which weights of some batch_heads [...], queries [T] and keys [S] stay.

    seed: [], int64, or [3]: with what row 0 of q and of k count as in a longer sequence.
    """
    if seed.dim():
        seed, first_query, first_key = seed
        queries, keys = (queries + first_query) & _WORD, (keys + first_key) & _WORD
    row = _mix(_mix(_mix(seed) ^ batch_heads)[..., None] ^ queries)
    return _mix(row[..., None] ^ _mix(keys)) >= round(dropout * 2**32)


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
