"""FlexAttention, compiled, in `plain.py`: Transformers refuses it for ALiBi."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import decoding
import plain
from worker import Job

PACKAGES = ("torch",)
compiled = torch.compile(flex_attention, dynamic=True)


def bias(slopes: Tensor, T: int, S: int, causal: bool, like: Tensor) -> Any:
    """What changes scores, and which blocks there are."""
    start = torch.tensor(S - T)

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * (q + start - k).abs()

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + start >= k

    blocks = create_block_mask(visible, None, None, T, S, "cpu") if causal and T > 1 else None
    return change, blocks


def attend(q: Tensor, k: Tensor, v: Tensor, made: Any) -> Tensor:
    change, blocks = made
    arrays = (x.contiguous() for x in (q, k, v))
    return compiled(*arrays, score_mod=change, block_mask=blocks)


class Engine(decoding.Plain):
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        super().__init__(plain.load(job.folder, job.dtype, attend, bias), job)
