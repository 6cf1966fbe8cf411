"""What the paper's repository adds to fairseq."""

from linbias import _extras

_extras.require("linbias.compat.fairseq")

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linbias.compat._rules import check_count
from linbias.schedules import slopes

__all__ = ["buffered_future_mask", "calc_alibi_bias", "get_slopes"]


def get_slopes(n: int) -> list[float]:
    """Give each of n heads its slope: `linbias.slopes(n)` as a list.

    Args:
        n: Number of heads, at least 1.

    Raises:
        TypeError, ValueError: n is not an integer of at least 1.

    Example:
        >>> get_slopes(6)
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]

    Source: the repository of "Train Short, Test Long", `fairseq/models/transformer.py`.
    """
    return slopes(check_count("get_slopes", "n", n)).tolist()


def calc_alibi_bias(seq_len: int, heads: int) -> Tensor:
    """Multiply each slope by the number of the key: one row for all queries.

    Under a causal mask the softmax is that with -slope * distance, since the two differ by one
    number for each query. Without such a mask it rewards later keys, and is no ALiBi.

    Args:
        seq_len: Number of keys S, at least 1.
        heads: Number of heads H, at least 1.

    Returns:
        [H, 1, S], float32, on the CPU.

    Raises:
        TypeError, ValueError: A number is not an integer of at least 1.

    Example:
        >>> calc_alibi_bias(4, 2)
        tensor([[[0.0000, 0.0625, 0.1250, 0.1875]],
        <BLANKLINE>
                [[0.0000, 0.0039, 0.0078, 0.0117]]])

    Source: the repository of "Train Short, Test Long", discussion "ALiBi in Parallel Attention".
    """
    length = check_count("calc_alibi_bias", "seq_len", seq_len)
    steep = torch.tensor(slopes(check_count("calc_alibi_bias", "heads", heads)))
    return (steep[:, None, None] * torch.arange(length)).float()


def buffered_future_mask(tensor: Tensor, heads: int) -> Tensor:
    """Join the mask of later keys and the bias in one matrix to add to scores.

        slope[h] * j    for j <= i        -inf    for j > i

    The original, a method of the decoder, keeps [B * H, T, T]; this one is made afresh, and adds
    to scores [B, H, T, T] by broadcasting. `linbias.torch.attention` needs no such matrix.

    Args:
        tensor: [B, T, ...]: its length, dtype and device are taken, its values are not read.
        heads: Number of heads H, at least 1.

    Returns:
        [H, T, T] in the dtype and on the device of tensor.

    Raises:
        TypeError: tensor is not a tensor of floating point, or heads not an integer.
        ValueError: tensor has less than 2 axes, or a number is less than 1.

    Example:
        >>> buffered_future_mask(torch.zeros(1, 3, 8), heads=8)[0]
        tensor([[0.0000,   -inf,   -inf],
                [0.0000, 0.5000,   -inf],
                [0.0000, 0.5000, 1.0000]])

    Source: the repository of "Train Short, Test Long", `fairseq/models/transformer.py`.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
        raise TypeError(f"buffered_future_mask: tensor must hold floating point, got {kind}")
    if tensor.dim() < 2 or not tensor.shape[1]:
        raise ValueError(
            "buffered_future_mask: tensor must have shape [B, T, ...] with T at least 1,"
            f" got {list(tensor.shape)}"
        )
    length = tensor.shape[1]
    row = calc_alibi_bias(length, check_count("buffered_future_mask", "heads", heads)).to(tensor)
    place = torch.arange(length, device=tensor.device)
    return row.masked_fill(place > place[:, None], -torch.inf)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "ParallelAttentionBlock":
            raise ImportError(
                f"linbias.compat.fairseq: {name} went; LinbiasConfig(block='parallel_fused') of "
                "linbias.models has that block"
            )
        raise AttributeError(f"module 'linbias.compat.fairseq' has no attribute {name!r}")
