"""`MultiheadAttention`: projections around `attention`, for self- and cross-attention in every variant."""

from typing import Any

import torch
from torch import Tensor, nn

from linbias import _checks
from linbias.torch.constant import constant
from linbias.torch.functional import Placement, attention, attention_weights
from linbias.variants import is_causal, variant_slopes


class MultiheadAttention(nn.Module):
    """Multi-head attention with linear biases, named and called like `torch.nn.MultiheadAttention`.

    | variant       | slopes (left, right)                                 | for                             |
    |---------------|------------------------------------------------------|---------------------------------|
    | `causal`      | (m, inf)                                             | language models (the paper)     |
    | `symmetric`   | (m, m)                                               | encoders                        |
    | `directional` | (m', inf) for the first half of the heads, (inf, m') | encoders whose heads look one   |
    |               | for the second; m' are the slopes of H/2 heads       | way only                        |
    | `asymmetric`  | (m, m) to begin with, apart and learned              | encoders                        |
    | `none`        | (0, 0)                                               | cross-attention                 |
    | `none_causal` | (0, inf)                                             | comparison                      |

    m is `linbias.slopes(H, schedule, max_bias)`. Cross-attention has no bias by default: positions of two
    sequences have no distance, and the author of the method recommends none there.

    The state dict holds `q_proj`, `k_proj`, `v_proj`, `out_proj` (`.weight` [out, in], and `.bias`), and for
    learned slopes `log_left` and, unless causal, `log_right`, each [H]: the slope is exp(log_slope), always
    positive (in `directional`, a hidden side stays hidden). Fixed slopes are not saved: `variant`, `schedule`
    and `max_bias` determine them.

    Args:
        embed_dim: Width of query and output.
        num_heads: Query heads H; head size D = embed_dim // num_heads unless head_dim is given.
        dropout: Probability that an attention weight is dropped in training, in [0, 1 - 2^-32].
        bias: Give the projections a bias.
        kdim: Width of key; None means embed_dim.
        vdim: Width of value; None means embed_dim.
        batch_first: Sequences are [B, T, width]; by default [T, B, width], as in PyTorch.
        num_kv_heads: Key/value heads G, a divisor of H; None means H.
        head_dim: Size D of a head; None means embed_dim // num_heads.
        variant: See above; None means `none` with cross_attention and `causal` without.
        cross_attention: key and value come from another sequence.
        learned: Train the slopes; None means only for `asymmetric`.
        schedule: As for `linbias.slopes`.
        max_bias: As for `linbias.slopes`.
        implementation: As for `linbias.torch.attention`.
        device: Of the parameters.
        dtype: Of the parameters; `log_left` and `log_right` are at least float32.

    Raises:
        ValueError: Sizes do not divide, or the variant is unknown or cannot be learned.

    Example:
        >>> layer = MultiheadAttention(12, 3, variant="symmetric", batch_first=True)
        >>> x = torch.ones(2, 5, 12)
        >>> out, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 3, 5, 5]))

    Source: Press, Smith and Lewis, ICLR 2022; encoder and cross-attention variants: the discussion "Modifying ALiBi
    for Encoder-Attention or Cross-Attention" in the paper's repository.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        variant: str | None = None,
        cross_attention: bool = False,
        learned: bool | None = None,
        schedule: str = "paper",
        max_bias: float = 8.0,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        variant = variant or ("none" if cross_attention else "causal")
        _check_settings(embed_dim, num_heads, num_kv_heads, head_dim, dropout)
        sides = variant_slopes("MultiheadAttention", variant, num_heads, schedule, max_bias)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.variant = variant
        self.learned = variant == "asymmetric" if learned is None else learned
        self.implementation = implementation
        if self.learned and variant.startswith("none"):
            raise ValueError(f"MultiheadAttention: variant {variant!r} has no slopes to learn")

        # Four projections; fewer key/value heads than query heads make those of keys and values narrower.
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        inner, inner_kv = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, **options)
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, inner_kv, **options)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, inner_kv, **options)
        self.out_proj = nn.Linear(inner, embed_dim, **options)
        # Fixed slopes stay numbers: `module.bfloat16()` would round a buffer.
        self._fixed = dict(zip(("left", "right"), sides, strict=True))
        if self.learned:
            self._register_slopes()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as `torch.nn.MultiheadAttention` does: Xavier uniform, biases 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @property
    def causal(self) -> bool:
        return is_causal(self.variant)

    @property
    def left(self) -> Tensor:
        """[H]: slopes towards earlier keys."""
        return self._slopes("left")

    @property
    def right(self) -> Tensor | None:
        """[H]: slopes towards later keys; None for causal attention."""
        return None if self.causal else self._slopes("right")

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key.

        Args:
            query: [T, B, embed_dim], or [B, T, embed_dim] with batch_first, or [T, embed_dim] without a batch.
            key: [S, B, kdim] (likewise); None means query.
            value: [S, B, vdim] (likewise); None means key.
            key_padding_mask: [B, S] (or [S]), bool, True where a key is padding. The real keys of a row must be
                contiguous. Padding may lie on the left or, where T = S or there is no bias, on the right.
            need_weights: Also return the weights [B, T, S] ([B, H, T, S] without averaging), before dropout.
            average_attn_weights: Average the weights over the heads.

        Returns:
            The output in the shape of query, and the weights or None. Outputs at padded queries mean nothing.

        Raises:
            ValueError: A shape breaks a rule above, or padding lies inside a sequence.

        Example:
            >>> layer = MultiheadAttention(8, 2, cross_attention=True, kdim=6, vdim=6, batch_first=True)
            >>> layer(torch.ones(1, 3, 8), torch.ones(1, 5, 6))[0].shape
            torch.Size([1, 3, 8])
        """
        key = query if key is None else key
        value = key if value is None else value
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                "MultiheadAttention: query, key and value must all have 3 axes, or 2 without a batch,"
                f" got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
            )
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out, weights = self._attend(query, key, value, key_padding_mask, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f", num_kv_heads={self.num_kv_heads}"
        return f"{heads}, variant={self.variant!r}, learned={self.learned}"

    def _register_slopes(self) -> None:
        device, dtype = self.q_proj.weight.device, _at_least_float32(self.q_proj.weight.dtype)
        for side in ("left",) if self.causal else ("left", "right"):
            slope = torch.tensor(self._fixed[side], dtype=torch.float64, device=device)
            self.register_parameter(f"log_{side}", nn.Parameter(slope.log().to(dtype)))

    def _slopes(self, side: str) -> Tensor:
        if not self.learned:
            return constant(self._fixed[side], torch.float64, self.q_proj.weight.device)
        log_slope: Tensor = getattr(self, f"log_{side}")
        log_slope = log_slope.to(_at_least_float32(log_slope.dtype))
        # exp(inf) has no gradient to give: a hidden side passes 0 on.
        hidden = log_slope == torch.inf
        return log_slope.masked_fill(hidden, 0.0).exp().masked_fill(hidden, torch.inf)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # Project, and give each head its part: [B, length, heads * D] -> [B, heads, length, D].
        (B, T, _), S = query.shape, key.shape[1]
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, x in (
                (self.q_proj, query),
                (self.k_proj, key),
                (self.v_proj, value),
            )
        )
        # Attention itself: no bias is built, only slopes and places are handed on.
        placement: Placement = {"causal": self.causal, "right": self.right}
        if padding is not None:
            placement |= self._read_padding(padding, B, T, S)
        out = attention(
            q,
            k,
            v,
            self.left,
            dropout=self.dropout if self.training else 0.0,
            implementation=self.implementation,
            **placement,
        )
        # Weights are computed apart, and only if they are asked for: they are the one thing of size T x S.
        weights = attention_weights(q, k, self.left, **placement) if need_weights else None
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _read_padding(self, padding: Tensor, B: int, T: int, S: int) -> Placement:
        """Turn a padding mask into a key range; where T = S, query t stands at key t on whichever side padding lies."""
        if padding.shape != (B, S) or padding.dtype != torch.bool:
            raise ValueError(
                f"MultiheadAttention: key_padding_mask must be bool [B, S] = {[B, S]},"
                f" got {padding.dtype} {list(padding.shape)}"
            )
        real = ~padding
        first = real.int().argmax(1)
        end = first + real.sum(1)
        placement: Placement = {"key_range": torch.stack([first, end], dim=1)}
        if T == S:
            placement["query_start"] = torch.zeros_like(first)
        if torch.compiler.is_compiling():  # values are not to be read
            return placement
        keys = torch.arange(S, device=padding.device)
        if not torch.equal(real, (keys >= first[:, None]) & (keys < end[:, None])):
            raise ValueError(
                "MultiheadAttention: key_padding_mask must leave the real keys of a row contiguous"
            )
        if T != S and self.variant != "none" and (end < S).any():
            raise ValueError(
                "MultiheadAttention: padding on the right needs as many queries as keys"
                f" (T = {T}, S = {S}): where do the queries stand?"
            )
        return placement


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_settings(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None,
    dropout: float,
) -> None:
    for name, value in (
        ("embed_dim", embed_dim),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", 1 if head_dim is None else head_dim),
    ):
        if value < 1:
            raise ValueError(f"MultiheadAttention: {name} must be at least 1, got {value}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"MultiheadAttention: embed_dim {embed_dim} is no multiple of num_heads {num_heads}; give head_dim"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"MultiheadAttention: num_heads {num_heads} is no multiple of num_kv_heads {num_kv_heads}"
        )
    _checks.check_dropout("MultiheadAttention", dropout)
