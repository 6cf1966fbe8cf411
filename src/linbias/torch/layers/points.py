"""`PointAttention`: projections around `attention_points`, and sets of points with padding.

The order of points means nothing, so that padding may lie anywhere; `attention_points` takes rows
whose padding comes last.
"""

from typing import Any, NamedTuple, Never

import torch
from torch import Tensor, nn

from linbias._request import keywords
from linbias.torch.layers import masks
from linbias.torch.layers.heads import Heads, Layout
from linbias.torch.operators import transforms
from linbias.torch.operators.values import may_read, readable
from linbias.torch.packed import nested
from linbias.torch.points.functional import (
    Points,
    as_points,
    attention_points,
    weights_among_points,
)
from linbias.torch.points.rules import METRICS


class PointAttention(Heads):
    """Multi-head attention among tokens that stand at points of a line, a plane or space.

    Scores fall with the distance of two points, alike on all sides. The state dict is that of
    `MultiheadAttention` without right slopes.

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, num_kv_heads, head_dim, learned, schedule,
            max_bias, device, dtype: As for `MultiheadAttention`.
        variant: "symmetric", or "none" for slopes of 0.
        metric, global_tokens, implementation: As for `linbias.torch.attention_points`.

    Raises:
        TypeError: There is no such argument.
        ValueError: Sizes do not divide, or the variant is another.

    Example:
        >>> layer = PointAttention(12, 3, global_tokens=1)
        >>> tokens, patches = torch.ones(2, 5, 12), torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        >>> layer(tokens, patches)[0].shape
        torch.Size([2, 5, 12])

    Source: Fuller, Millard and Green, "CROMA", NeurIPS 2023; Ding et al., "TITAN", 2024.
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
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        variant: str = "symmetric",
        learned: bool | str = False,
        schedule: str = "paper",
        max_bias: float = 8.0,
        metric: str = "euclidean",
        global_tokens: int = 0,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            keywords.refuse_unknown("PointAttention", unknown, PointAttention)
        if variant not in ("symmetric", "none"):
            raise ValueError(
                "PointAttention: points know no left and right: variant must be symmetric or none,"
                f" got {variant!r}"
            )
        if metric not in METRICS:
            raise ValueError(f"PointAttention: metric must be one of {METRICS}, got {metric!r}")
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            variant=variant,
            learned=learned,
            schedule=schedule,
            max_bias=max_bias,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        self.metric = metric
        self.global_tokens = global_tokens

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, metric={self.metric!r}, global_tokens={self.global_tokens}"
        )

    @property
    def _learned_sides(self) -> tuple[str, ...]:
        return ("left",)

    def forward(
        self,
        query: Tensor,
        points: Points,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        query_points: Points | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key, which stand at the same points unless query_points are given.

        Args:
            query: [B, T, embed_dim] or [T, embed_dim].
            points: [B, S, A] or [S, A], where the keys stand, as for
                `linbias.torch.attention_points`; those of global tokens may be left out.
            key: [B, S, kdim] (likewise); None means query.
            value: [B, S, vdim] (likewise); None means key.
            query_points: [B, T, A] or [T, A]: where the queries stand, if they are tokens of
                their own, none of them global; padding then is among the keys.
            key_padding_mask: [B, S] (or [S]), bool, True for padding, which may lie anywhere and
                gathers zeros; or floating point, 0 and -inf.
            need_weights: Also return the weights [B, T, S], or [B, H, T, S], before dropout.
            average_attn_weights: Average the weights over the heads.

        Returns:
            The output in the shape of query, and the weights or None.

        Raises:
            TypeError: A mask has another dtype.
            ValueError: A shape breaks a rule above.

        Example:
            >>> layer = PointAttention(8, 2)
            >>> layer(torch.ones(3, 8), torch.rand(3, 2))[0].shape
            torch.Size([3, 8])
        """
        key = query if key is None else key
        value = key if value is None else value
        if nested.is_nested(query, key, value):
            raise TypeError(
                "PointAttention: nested tensors are not built; pad them, as"
                " torch.nested.to_padded_tensor does, and give a key_padding_mask"
            )
        layout = Layout.of("PointAttention", True, query, key, value)
        place = self._with_global_ones(as_points("PointAttention", "points", points), key)
        if query_points is not None:
            query_points = as_points("PointAttention", "query_points", query_points)
        q, k, v = self._project(*layout.rows(query, key, value))
        heads = self._heads(q, k, v, need_weights)
        padding = layout.one_row(key_padding_mask)
        out, weights = self._attend(q, k, v, place, query_points, padding, heads, need_weights)
        return layout.back(self._join(out), weights, average_attn_weights)

    def _with_global_ones(self, points: Tensor, key: Tensor) -> Tensor:
        """The points of all keys, with some, which nobody reads, for global ones."""
        N = key.shape[-2]
        if not self.global_tokens or points.shape[-2:-1] == (N,):
            return points
        if points.shape[-2:-1] != (N - self.global_tokens,):
            raise ValueError(
                f"PointAttention: points must be those of all {N} keys, or of all but the"
                f" {self.global_tokens} global ones, got {list(points.shape)}"
            )
        return nn.functional.pad(points, (0, 0, self.global_tokens, 0))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        points: Tensor,
        query_points: Tensor | None,
        padding: Tensor | None,
        heads: slice | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Out and weights of heads, where padding [B, S] may lie anywhere."""
        options: dict[str, Any] = {"metric": self.metric, "global_tokens": self.global_tokens}
        slopes = self.slopes if heads is None else self.slopes[heads]
        options |= {"slopes": slopes, "query_points": query_points}
        sets = None
        if padding is not None:
            B, N = k.shape[0], k.shape[2]
            sets = _read(padding, (B, N), self.global_tokens)
            options |= {"num_points": sets.num_points}
            k, v = sets.sort(k, 2), sets.sort(v, 2)
            points = sets.sort(points.expand(B, -1, -1), 1)
            if query_points is None:
                q = sets.sort(q, 2)
        dropout = self.dropout if self.training else 0.0
        out = attention_points(
            q, k, v, points, **options, dropout=dropout, implementation=self.implementation
        )
        weights = weights_among_points(q, k, points, **options) if need_weights else None
        if sets is None:
            return out, weights
        if weights is not None:
            weights = sets.undo(weights, 3)
        if query_points is not None:
            return out, weights
        return sets.undo(out, 2), None if weights is None else sets.undo(weights, 2)


class Sets(NamedTuple):
    """The real tokens of each batch row, in an order that begins with them."""

    num_points: Tensor  # [B]
    order: Tensor | None  # [B, N], int64: token i of the order is token order[i]; None: they do

    def sort(self, x: Tensor, axis: int) -> Tensor:
        """Bring the tokens along an axis of [B, ...] into the order."""
        return x if self.order is None else _take(x, self.order, axis)

    def undo(self, x: Tensor, axis: int) -> Tensor:
        return x if self.order is None else _take(x, self.order.argsort(1), axis)


def _read(padding: Tensor, shape: tuple[int, int], global_tokens: int) -> Sets:
    """What a key_padding_mask [B, N] says of the sets."""
    masks.check_one("PointAttention", "key_padding_mask", padding, "[B, S]", shape)
    hidden = masks.is_hidden(padding)
    some = ~hidden.all(1, keepdim=True)
    _require(
        ~(hidden[:, :global_tokens] & some).any(),
        f"key_padding_mask must not hide the {global_tokens} global tokens of a row that has"
        " others",
    )
    if padding.dtype != torch.bool:
        _require(
            ((padding == 0) | hidden).all(),
            "key_padding_mask must be bool, or hold 0 and -inf alone",
        )
    if may_read(padding) and not (hidden[:, :-1] & ~hidden[:, 1:]).any():
        order = None
    else:
        order = hidden.to(torch.uint8).argsort(dim=1, stable=True)
    return Sets((~hidden).sum(1), order)


def _require(condition: Tensor, rule: str) -> None:
    """Check what the values tell: at once, in a compiled program when it runs."""
    if may_read(condition):
        if not condition:
            raise ValueError(f"PointAttention: {rule}")
    elif readable(condition) is None and not transforms.active():
        torch._assert_async(condition, f"PointAttention: {rule}")


def _take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Take index [B, N] along an axis of x [B, ...]."""
    shape = [1] * x.dim()
    shape[0], shape[axis] = index.shape
    # Not take_along_dim, which makes constants of sizes that are symbols.
    return x.gather(axis, index.view(shape).expand(*x.shape[:axis], -1, *x.shape[axis + 1 :]))
