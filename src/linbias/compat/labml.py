"""The names of `labml_nn.transformers.alibi`, the annotated implementation, on our attention.

Source: labml.ai, annotated deep learning paper implementations, `transformers/alibi` and `mha`.
"""

from linbias import _extras

_extras.require("linbias.compat.labml")

import torch
from torch import Tensor, nn

from linbias import _request
from linbias.compat._rules import check_count
from linbias.schedules import slopes
from linbias.torch import attention

__all__ = ["AlibiMultiHeadAttention", "get_alibi_biases", "get_slopes"]

# Rows of a mask that are compared with a causal one at a time.
_ROWS = 256


def get_slopes(n_heads: int) -> Tensor:
    """Give each head its slope, [H], float32, as the paper's authors do.

    They are rounded once, where the original takes powers in float32: last digits may differ.

    Args:
        n_heads: Number of heads H, at least 1.

    Raises:
        TypeError, ValueError: n_heads is not an integer of at least 1.

    Example:
        >>> get_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    heads = check_count("get_slopes", "n_heads", n_heads)
    return torch.tensor(slopes(heads), dtype=torch.float32)


@torch.no_grad()
def get_alibi_biases(n_heads: int, mask: Tensor) -> Tensor:
    """Multiply slopes by distances counted by a mask: slope[h] * (sum of mask[q, :k + 1]).

    The bias grows towards later keys instead of falling towards earlier ones; softmax does not see
    the difference, which is one number for each row.

    Args:
        n_heads: Number of heads H, at least 1.
        mask: [q, k], bool or numbers: not 0 where query q may see key k.

    Returns:
        [q, k, H], float32 (the dtype of mask where that is wider), on the device of mask.

    Raises:
        TypeError: mask is not a tensor, or n_heads not an integer.
        ValueError: n_heads is less than 1, or mask has not 2 axes.

    Example:
        >>> get_alibi_biases(8, torch.ones(3, 3).tril())[:, :, 0]
        tensor([[0.5000, 0.5000, 0.5000],
                [0.5000, 1.0000, 1.0000],
                [0.5000, 1.0000, 1.5000]])
    """
    _check_mask("get_alibi_biases", mask, 2, "[q, k]")
    steep = get_slopes(check_count("get_alibi_biases", "n_heads", n_heads)).to(mask.device)
    return mask.cumsum(-1)[:, :, None] * steep


class AlibiMultiHeadAttention(nn.Module):
    """Multi-head attention whose scores grow with the number of keys that the mask shows.

        score[q, k, h] = query[q, h] . key[k, h] / sqrt(d_k) + biases[q, k, h]
        biases = get_alibi_biases(heads, mask)

    Under a causal mask without holes this is the attention of the paper, near to far and without a
    matrix of scores; with holes, a mask of heads x length x length numbers is made. Weights of the
    original load, and the other way round. What differs:

    - Biases are those of the mask of the call, where the original keeps those of its first mask.
    - Each row of the batch may have a mask of its own, [T, T, B].
    - A query that may see no key gets the bias of the output layer instead of NaN.
    - Dropout draws its mask otherwise. `attn`, the weights kept for logging, is not there.

    Args:
        heads: Number of heads.
        d_model: Number of features of query, key, value and output; a multiple of heads.
        dropout_prob: Probability that a weight is dropped in training, in [0, 1 - 2^-32].

    Raises:
        TypeError, ValueError: A size is not an integer of at least 1, heads do not divide d_model,
            or dropout_prob is out of its range.

    Example:
        >>> layer = AlibiMultiHeadAttention(heads=2, d_model=8)
        >>> x, mask = torch.randn(5, 3, 8), torch.ones(5, 5).tril()[..., None]
        >>> layer(query=x, key=x, value=x, mask=mask).shape
        torch.Size([5, 3, 8])
    """

    def __init__(self, heads: int, d_model: int, dropout_prob: float = 0.1) -> None:
        super().__init__()
        width, self.heads = (
            check_count("AlibiMultiHeadAttention", name, number)
            for name, number in (("d_model", d_model), ("heads", heads))
        )
        if width % self.heads:
            raise ValueError(
                "AlibiMultiHeadAttention: d_model must be a multiple of heads ="
                f" {self.heads}, got {width}"
            )
        self.d_k = width // self.heads
        self.scale = self.d_k**-0.5
        _request.check_dropout("AlibiMultiHeadAttention", dropout_prob, "dropout_prob")
        self.query, self.key, self.value = (_Projection(heads, d_model) for _ in range(3))
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend: query, key and value [T, B, d_model] -> [T, B, d_model].

        Args:
            mask: [T, T, 1] or [T, T, B], not 0 where query i may see key j. It must be given.
        """
        mask = self._checked(query, key, value, mask)
        q, k, v = (
            heads(x).permute(1, 2, 0, 3)
            for heads, x in ((self.query, query), (self.key, key), (self.value, value))
        )
        dropout = self.dropout.p if self.training else 0.0
        if _is_causal(mask):
            x = attention(q, k, v, get_slopes(self.heads), dropout=dropout)
        else:
            none = [0.0] * self.heads
            added = self._added(mask).to(torch.promote_types(q.dtype, torch.float32))
            x = attention(q, k, v, none, causal=False, mask=added, dropout=dropout)
        return self.output(x.permute(2, 0, 1, 3).flatten(2))

    @torch.no_grad()
    def _added(self, mask: Tensor) -> Tensor:
        """[1 or B, H, T, T]: added to scores; 0 at the last visible key, -inf at hidden ones."""
        seen = mask.cumsum(1, dtype=torch.float32).permute(2, 0, 1)[:, None]
        steep = get_slopes(self.heads).to(mask.device)[:, None, None]
        biases = (seen - seen[..., -1:]) * steep
        return biases.masked_fill((mask == 0).permute(2, 0, 1)[:, None], -torch.inf)

    def _checked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        name, width = "AlibiMultiHeadAttention", self.heads * self.d_k
        if query.dim() != 3 or query.shape[2] != width:
            raise ValueError(
                f"{name}: query must have shape [T, B, d_model = {width}], got {list(query.shape)}"
            )
        for argument, x in (("key", key), ("value", value)):
            if x.shape != query.shape:
                raise ValueError(
                    f"{name}: {argument} must have the shape of query, {list(query.shape)},"
                    f" got {list(x.shape)}"
                )
        _check_mask(name, mask, 3, "[T, T, 1] or [T, T, B]")
        assert mask is not None
        T, B, _ = query.shape
        if not _request.has_shape(mask, (T, T, 1), (T, T, B)):
            raise ValueError(
                f"{name}: mask must have shape [T, T, 1] = {[T, T, 1]} or [T, T, B] = {[T, T, B]},"
                f" got {list(mask.shape)}"
            )
        return mask


class _Projection(nn.Module):
    """A linear layer whose output is split into heads; its weights have the original's name."""

    def __init__(self, heads: int, d_model: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(-1, (self.heads, -1))


def _check_mask(function: str, mask: object, axes: int, shape: str) -> None:
    if not isinstance(mask, Tensor):
        kind = "None" if mask is None else type(mask).__name__
        raise TypeError(f"{function}: mask must be a torch.Tensor {shape}, got {kind}")
    if mask.dim() != axes:
        raise ValueError(f"{function}: mask must have shape {shape}, got {list(mask.shape)}")


def _is_causal(mask: Tensor) -> bool:
    """Whether query i may see the keys 0 .. i and no others, each counted once."""
    place = torch.arange(mask.shape[0], device=mask.device)
    return all(
        torch.equal(rows, (place <= queries[:, None])[..., None].expand_as(rows).to(mask.dtype))
        for rows, queries in zip(mask.split(_ROWS), place.split(_ROWS), strict=True)
    )
