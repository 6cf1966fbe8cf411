"""What the paper's repository adds to fairseq, and the parallel block of its discussions."""

from linbias import _extras

_extras.require("linbias.compat.fairseq")

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from linbias.compat._rules import check_count
from linbias.schedules import slopes
from linbias.torch import attention

__all__ = ["ParallelAttentionBlock", "buffered_future_mask", "calc_alibi_bias", "get_slopes"]


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


class ParallelAttentionBlock(nn.Module):
    """A decoder block whose attention and feed-forward share one projection of their input.

        q, k, v, ff = fused_attn_ff_proj(norm(x))
        out = attn_out(attention(q, k, v)) + ff_out(ff)

    All query heads share one key/value head. The attention is causal, with the paper's slopes. The
    model adds the input. Norm and activation, which the discussion leaves out, are those of its
    library: RMSNorm, x / sqrt(mean(x^2) + 1e-5) * gamma, and SwiGLU, x * silu(gate) of two halves.
    What differs: no mask and no bias of length x length is made, and slopes are not rounded.

    Args:
        dim: Number of features of input and output.
        dim_head: Size of a head.
        heads: Number of query heads.
        ff_mult: The feed-forward has dim * ff_mult inner features.

    Raises:
        TypeError, ValueError: A number is not an integer of at least 1.

    Example:
        >>> block = ParallelAttentionBlock(dim=16, dim_head=8, heads=4)
        >>> x = torch.randn(2, 5, 16)
        >>> (x + block(x)).shape
        torch.Size([2, 5, 16])
        >>> [*block.state_dict()]
        ['norm.gamma', 'fused_attn_ff_proj.weight', 'attn_out.weight', 'ff_out.1.weight']

    Source: the repository of "Train Short, Test Long", discussion "ALiBi in Parallel Attention";
    norm and activation from PaLM-jax and PaLM-pytorch (P. Wang).
    """

    def __init__(self, dim: int, dim_head: int = 64, heads: int = 8, ff_mult: int = 4) -> None:
        super().__init__()
        given = {"dim": dim, "dim_head": dim_head, "heads": heads, "ff_mult": ff_mult}
        for name, number in given.items():
            check_count("ParallelAttentionBlock", name, number)
        self.heads, self.dim_head, self.scale = heads, dim_head, dim_head**-0.5
        inner = dim * ff_mult
        self.fused_dims = (dim_head * heads, dim_head, dim_head, 2 * inner)
        self.norm = _RMSNorm(dim)
        self.fused_attn_ff_proj = nn.Linear(dim, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(dim_head * heads, dim, bias=False)
        self.ff_out = nn.Sequential(_SwiGLU(), nn.Linear(inner, dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]."""
        width = self.fused_attn_ff_proj.in_features
        if x.dim() != 3 or x.shape[2] != width:
            raise ValueError(
                f"ParallelAttentionBlock: x must have shape [B, T, dim = {width}],"
                f" got {list(x.shape)}"
            )
        q, k, v, ff = self.fused_attn_ff_proj(self.norm(x)).split(self.fused_dims, dim=-1)
        q = q.unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2)
        out = attention(q, k[:, None], v[:, None], scale=self.scale)
        return self.attn_out(out.transpose(1, 2).flatten(2)) + self.ff_out(ff)


class _RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gamma)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.gamma, 1e-5)


class _SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * silu(gate)
