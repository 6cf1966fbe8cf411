"""`merge`: attention over parts of the keys, put together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from linbias import _request


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys, such as shards of a sequence, into that over all.

        lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

    As `linbias.merge`, and differentiable.

    Args:
        outs: Tensors [..., T, E], one for each part, on one device.
        lses: Tensors [..., T], one for each part.

    Returns:
        out [..., T, E] in the dtype of outs[0], and lse [..., T] in that of lses[0].

    Raises:
        ValueError: There is no part, or shapes differ.

    Example:
        >>> from linbias.torch import attention
        >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
        >>> where = {"query_start": torch.tensor([0]), "return_lse": True}
        >>> ranges = torch.tensor([[0, 3]]), torch.tensor([[3, 8]])
        >>> parts = [attention(q, k, v, key_range=part, **where) for part in ranges]
        >>> torch.testing.assert_close(merge(*zip(*parts))[0], attention(q, k, v))
    """
    _request.check_parts([tuple(out.shape) for out in outs], [tuple(lse.shape) for lse in lses])
    parts = torch.stack(tuple(lses))
    highest = parts.detach().amax(0)
    # Any finite number serves an empty row.
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = torch.exp(parts - highest)
    total = weights.sum(0)
    empty = total == 0
    divisor = total.masked_fill(empty, 1.0)
    share = (weights / divisor)[..., None]
    parts_of_out = [part.to(share.dtype) * s for part, s in zip(outs, share, strict=True)]
    out = torch.stack(parts_of_out).sum(0)
    return out.to(outs[0].dtype), (highest + divisor.log()).masked_fill(empty, -torch.inf)
