"""`MultiheadAttention`: projections around `attention`, in every variant."""

from typing import Any, Never

import torch
from torch import Tensor, nn

from linbias._request import keywords, seen
from linbias.schedules import is_causal
from linbias.torch.functional import attention, attention_weights
from linbias.torch.layers import masks
from linbias.torch.layers.from_pytorch import NoMatrix
from linbias.torch.layers.heads import Heads, Layout
from linbias.torch.packed import nested
from linbias.torch.standing import Positions, as_tensors


class MultiheadAttention(Heads):
    """Multi-head attention with linear biases, called like `torch.nn.MultiheadAttention`.

    It takes the place of one in PyTorch's Transformer layers; `replace_attention` does so for a
    whole model, and `from_torch` and `load_state_dict` take over the weights.

    | variant       | slopes, right_slopes                  | for                         |
    |---------------|---------------------------------------|-----------------------------|
    | `causal`      | (m, inf)                              | language models (the paper) |
    | `symmetric`   | (m, m)                                | encoders                    |
    | `directional` | (m', inf) for one half of the heads,  | encoders whose heads look   |
    |               | (inf, m') for the other, m' of H/2    | one way only                |
    | `asymmetric`  | (m, m), then each learned by itself   | encoders                    |
    | `none`        | (0, 0)                                | cross-attention             |
    | `none_causal` | (0, inf)                              | comparison                  |

    m is `linbias.slopes(H, schedule, max_bias)`. Masks of a call hide further keys: with a causal
    one, `symmetric` is `causal`, and the right slopes of `asymmetric` are not trained.

    The state dict holds `q_proj`, `k_proj`, `v_proj`, `out_proj` (each a weight [out, in] and a
    bias), and for learned slopes `log_left` and, unless causal, `log_right`, each [H], with slope
    = exp(log_slope), or with learned="sigmoid" `logit_left` and `logit_right`, with slope =
    sigmoid(logit). A hidden side stays hidden. Fixed slopes are not saved.

    A call may say at which `positions` on a line tokens stand; for points of a plane or space
    there is `PointAttention`.

    Tensor parallelism shares the heads: `ColwiseParallel` on q_proj, k_proj and v_proj, and
    `RowwiseParallel` on out_proj. Gradients of learned slopes are then of a process's own heads
    alone.

    Args:
        embed_dim: Width of query and output.
        num_heads: Query heads H.
        dropout: As for `linbias.torch.attention`, in training.
        bias: Give the projections a bias.
        kdim, vdim: Widths of key and value; None means embed_dim.
        batch_first: Sequences are [B, T, width]; by default [T, B, width], as in PyTorch.
        num_kv_heads: Key/value heads G, a divisor of H; None means H.
        head_dim: Size D of a head; None means embed_dim // num_heads.
        variant: See above; None means `none` with cross_attention and `causal` without.
        cross_attention: key and value come from another sequence.
        learned: Train the slopes: True or "sigmoid"; None means True for `asymmetric` only.
        schedule, max_bias: As for `linbias.slopes`.
        window, implementation: As for `linbias.torch.attention`.
        device, dtype: Of the parameters; those of learned slopes are at least float32.

    Raises:
        TypeError: There is no such argument (add_bias_kv and add_zero_attn are not built).
        ValueError: Sizes do not divide, or the variant is unknown or cannot be learned.

    Example:
        >>> layer = MultiheadAttention(12, 3, variant="symmetric", batch_first=True)
        >>> x = torch.ones(2, 5, 12)
        >>> out, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 3, 5, 5]))

    Source: Press, Smith and Lewis, ICLR 2022; other variants: the discussion "Modifying ALiBi for
    Encoder-Attention or Cross-Attention" in the paper's repository.
    """

    # What PyTorch's encoders ask for, before they leave attention to this layer.
    in_proj_weight = in_proj_bias = NoMatrix()
    _qkv_same_embed_dim = True

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
        learned: bool | str | None = None,
        schedule: str = "paper",
        max_bias: float = 8.0,
        window: tuple[int, int] | None = None,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            keywords.refuse_unknown("MultiheadAttention", unknown, MultiheadAttention)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            variant=variant or ("none" if cross_attention else "causal"),
            learned=learned,
            schedule=schedule,
            max_bias=max_bias,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        seen.check_window("MultiheadAttention", window, is_causal(self.variant))
        self.batch_first = batch_first
        self.window = window

    @classmethod
    def from_torch(
        cls, theirs: nn.MultiheadAttention, variant: str | None = None, **options: Any
    ) -> "MultiheadAttention":
        """Make a layer with the sizes, settings and weights of one of PyTorch's, on its device.

        Args:
            theirs: Without add_bias_kv and add_zero_attn.
            variant: As above; None means `none` with cross_attention and `symmetric` without.
            options: cross_attention, learned, schedule, max_bias or implementation, as above.

        Raises:
            ValueError: theirs has a key or value beside those of the sequence.

        Example:
            >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
            >>> layer, x = MultiheadAttention.from_torch(theirs, "none"), torch.randn(1, 3, 8)
            >>> torch.allclose(layer(x)[0], theirs(x, x, x)[0], atol=1e-6)
            True
        """
        added = {"add_bias_kv": theirs.bias_k is not None, "add_zero_attn": theirs.add_zero_attn}
        for name, has in added.items():
            if has:
                raise ValueError(f"from_torch: theirs must have no {name}, which is not built")
        weight = theirs.out_proj.weight
        variant = variant or ("none" if options.get("cross_attention") else "symmetric")
        layer = cls(
            theirs.embed_dim,
            theirs.num_heads,
            theirs.dropout,
            theirs.in_proj_bias is not None,
            kdim=theirs.kdim,
            vdim=theirs.vdim,
            batch_first=theirs.batch_first,
            variant=variant,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        layer.load_state_dict(theirs.state_dict())
        inner = theirs.q_proj_weight if theirs.in_proj_weight is None else theirs.in_proj_weight
        for part in (layer.q_proj, layer.k_proj, layer.v_proj):
            part.requires_grad_(inner.requires_grad)
        layer.out_proj.requires_grad_(weight.requires_grad)
        return layer.train(theirs.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Tensor | None = None,
        positions: Positions | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key.

        A causal attn_mask, and padding at the ends of rows, need no mask of scores in memory;
        other masks do, and run by `sdpa` (with dropout by `dense`). Under `torch.compile` say
        is_causal, since no attn_mask is recognised, and padding must lie at the ends of rows.

        Args:
            query: [T, B, embed_dim], or [B, T, embed_dim] with batch_first, or [T, embed_dim].
                Query, key and value may be nested tensors [B, lengths, width] with batch_first,
                without masks and weights.
            key: [S, B, kdim] (likewise); None means query.
            value: [S, B, vdim] (likewise); None means key.
            key_padding_mask: [B, S] (or [S]), bool, True for padding, or floating point, added to
                the scores. Where T != S, the last key of a row must be real, but for `none`.
            need_weights: Also return the weights [B, T, S], or [B, H, T, S], before dropout.
            attn_mask: [T, S] or [B * H, T, S], bool, True hides, or floating point, added.
            average_attn_weights: Average the weights over the heads.
            is_causal: Hide the keys after the query; attn_mask is not read unless T != S.
            mask: [T, S, B], where T and B may be 1, in the place of attn_mask: not 0 for what a
                query may see, as labml has it.
            positions: [S], [B, S] or [B, H, S] (without a batch [S] or [H, S]), where the keys
                stand, as for `linbias.torch.attention`; queries stand at the last T of them.

        Returns:
            The output in the shape of query, and the weights or None. A query that sees no key
            gathers zeros.

        Raises:
            TypeError: A mask has another dtype.
            ValueError: A shape, or what comes together, breaks a rule above.

        Example:
            >>> layer = MultiheadAttention(8, 2, cross_attention=True, kdim=6, vdim=6)
            >>> layer(torch.ones(3, 1, 8), torch.ones(5, 1, 6))[0].shape
            torch.Size([3, 1, 8])
        """
        key = query if key is None else key
        value = key if value is None else value
        layout = Layout.of("MultiheadAttention", self.batch_first, query, key, value)
        if nested.is_nested(query, key, value):
            beside = key_padding_mask, attn_mask, mask, positions, need_weights or None
            return self._attend_nested(query, key, value, beside, is_causal), None
        query, key, value = layout.rows(query, key, value)
        given: dict[str, Any] = {} if positions is None else {"positions": positions}
        as_tensors("MultiheadAttention", given, query.device)
        positions = layout.one_row(given.get("positions"))
        padding = layout.one_row(key_padding_mask)
        sizes = masks.Sizes(query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        seen = masks.read(sizes, attn_mask, is_causal, padding, mask, self.variant)
        q, k, v = self._project(query, key, value)
        heads = self._heads(q, k, v, need_weights)
        options = self._options(seen.causal, heads) | seen.options(sizes, heads)
        options["positions"] = masks.of_heads(positions, heads)
        out = self._join(self._run(q, k, v, **options))
        weights = attention_weights(q, k, **options) if need_weights else None
        return layout.back(out, weights, average_attn_weights)

    @property
    def right_slopes(self) -> Tensor | None:
        """[H]: slopes towards later keys; None for causal attention."""
        return None if self.causal else self._slopes("right")

    def _options(self, is_causal: bool, heads: slice | None) -> dict[str, Any]:
        """Keywords of `attention`, for some of the heads."""
        causal = is_causal or self.causal
        sides = self.slopes, None if causal else self.right_slopes
        left, right = (x if x is None or heads is None else x[heads] for x in sides)
        return {"slopes": left, "causal": causal, "right_slopes": right, "window": self.window}

    def _run(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, **options, dropout=dropout, implementation=self.implementation)

    def _attend_nested(
        self, query: Tensor, key: Tensor, value: Tensor, beside: tuple[Any, ...], causal: bool
    ) -> Tensor:
        """Attend within each sequence of nested tensors [B, lengths, width]."""
        if not self.batch_first or any(x is not None for x in beside):
            raise ValueError(
                "MultiheadAttention: nested tensors need batch_first=True, and neither masks nor"
                " weights or positions"
            )
        strided = query.layout == torch.strided
        if strided:
            query, key, value = nested.as_jagged(query, key, value)
        q, k, v = self._project(query, key, value)
        out = self._join(self._run(q, k, v, **self._options(causal, self._heads(q, k, v))))
        return torch.nested.as_nested_tensor(list(out.unbind())) if strided else out
