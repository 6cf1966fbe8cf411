"""Attention dropout whose mask is a function of (seed, batch, head, query, key) and of nothing else.

Every implementation draws the same mask, whatever its tiles, and backward draws the mask of forward again
instead of storing it. The hash is 32-bit integer arithmetic, so that C++ and Triton can repeat it:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    row  = mix(mix(mix(seed) ^ (b * H + h)) ^ t)
    keep = mix(row ^ mix(s)) >= dropout * 2^32

A call that computes a piece of a longer sequence counts t and s from where its first query and key stand in it.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """Take a 31-bit seed, int64 [], from PyTorch's generator of the device.

    `torch.manual_seed` governs it, activation checkpointing restores it, and a CUDA graph draws anew at each replay.
    """
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor, dropout: float, batch_heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """Say which weights stay.

    Args:
        seed: [], int64; or [3]: the seed, and what row 0 of q and row 0 of k count as, modulo 2^32.
        dropout: Probability to drop, in [0, 1 - 2^-32], so that the threshold fits 32 bits.
        batch_heads: [...], int64, b * H + h.
        queries: [T], int64, row of q.
        keys: [S], int64, row of k.

    Returns:
        [..., T, S], bool.
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
