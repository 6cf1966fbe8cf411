"""`ALiBiAttention` as the book chapter on ALiBi has it in PyTorch: slopes 1/2, 1/4, ..."""

from linbias import _extras

_extras.require("linbias.compat.chapter_torch")

import math

import torch
from torch import Tensor, nn

from linbias import _request
from linbias.compat._rules import check_head_size
from linbias.schedules import slopes
from linbias.torch import attention_weights

__all__ = ["ALiBiAttention"]


class ALiBiAttention(nn.Module):
    """Attention with linear biases over the rows of three matrices, head by head.

        weights[h] = softmax(Q_h K_h^T / sqrt(d_k) - slopes[h] * |i - j|)
        output_h = weights[h] V_h

    Head h has the columns h * d_k to (h + 1) * d_k. A query sees keys on both sides that no mask
    hides. The slopes are a buffer, and there are no parameters. What differs from the chapter: a
    query whose keys are all hidden gets zeros instead of NaN; weights of 16-bit matrices are
    float32; matrices of unlike shapes are refused. Weights cost memory, length x length;
    `linbias.torch.attention` makes none.

    Args:
        d_model: Number of columns of Q, K and V.
        n_heads: Number of heads, a divisor of d_model.

    Attributes:
        d_k: Size of a head, d_model // n_heads.
        scale: sqrt(d_k), by which scores are divided.
        slopes: [n_heads], float32, 1 / 2^(h + 1).

    Raises:
        TypeError, ValueError: A number is no integer of at least 1, or n_heads no divisor.

    Example:
        >>> alibi = ALiBiAttention(d_model=4, n_heads=2)
        >>> later = torch.ones(3, 3, dtype=torch.bool).triu(1)
        >>> ones = torch.ones(3, 4)
        >>> output, weights = alibi(ones, ones, torch.eye(3, 4), mask=later)
        >>> weights[0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.3775, 0.6225, 0.0000],
                [0.1863, 0.3072, 0.5065]])

    Source: the book chapter on ALiBi, "PyTorch implementation" (see docs/ideas/definition.md).
    """

    slopes: Tensor

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.d_k = check_head_size("ALiBiAttention", d_model, "n_heads", n_heads)
        self.d_model, self.n_heads = d_model, n_heads
        self.scale = math.sqrt(self.d_k)
        self.register_buffer("slopes", torch.empty(n_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.slopes.copy_(torch.tensor(slopes(self.n_heads, "halving")))

    def forward(
        self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Attend, for Q, K and V [N, d_model]: output [N, d_model], and weights [N, N] by head.

        Args:
            mask: [N, N], bool: True hides a key from a query, as in `masked_fill`.

        Raises:
            TypeError, ValueError: A dtype or shape breaks a rule above.
        """
        for name, x in (("Q", Q), ("K", K), ("V", V)):
            if x.dim() != 2 or not _request.has_shape(x, (len(Q), self.d_model)):
                raise ValueError(
                    f"ALiBiAttention: {name} must have shape [N, d_model = {self.d_model}],"
                    f" the same N for all, got {list(x.shape)}"
                )
        if mask is not None and mask.dtype != torch.bool:
            kind = str(mask.dtype).removeprefix("torch.")
            raise TypeError(
                f"ALiBiAttention: mask must hold bool, True for what is hidden, got {kind}"
            )
        q, k, v = (x.unflatten(1, (self.n_heads, -1)).transpose(0, 1) for x in (Q, K, V))
        weights = attention_weights(
            q[None],
            k[None],
            self.slopes,
            causal=False,
            scale=1 / self.scale,
            mask=None if mask is None else ~mask,
        )[0]
        output = weights.to(v.dtype) @ v
        return output.transpose(0, 1).flatten(1), list(weights)
