"""`MultiheadAttention`: projections around `attention`, in every variant."""

from typing import Any, Never

import torch
from torch import Tensor, nn

from linbias import _request
from linbias.schedules import is_causal, variant_slopes
from linbias.torch.constant import constant
from linbias.torch.functional import attention, attention_weights
from linbias.torch.layers import masks, sets
from linbias.torch.layers.theirs import NoMatrix, take_weights
from linbias.torch.packed import nested
from linbias.torch.points.functional import Points, as_points
from linbias.torch.standing import Positions, as_tensors


class MultiheadAttention(nn.Module):
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

    A call may say where tokens stand: at `positions` on a line or at `points` of a plane or space.
    Points know no left and right: the variant must be `symmetric` or `none`, and the slopes are
    those to the left.

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
        metric, global_tokens: As for `linbias.torch.attention_points`, of calls with points. A
            layer with global tokens has no others.
        window, implementation: As for `linbias.torch.attention`. Points have no window.
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
        metric: str = "euclidean",
        global_tokens: int = 0,
        window: tuple[int, int] | None = None,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            _request.refuse_unknown("MultiheadAttention", unknown, MultiheadAttention)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        variant = variant or ("none" if cross_attention else "causal")
        _check_settings(embed_dim, num_heads, num_kv_heads, head_dim, dropout)
        sides = variant_slopes("MultiheadAttention", variant, num_heads, schedule, max_bias)
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.variant = variant
        self.learned = variant == "asymmetric" if learned is None else learned
        self.metric = metric
        self.global_tokens = global_tokens
        self.window = window
        self.implementation = implementation
        _request.check_window("MultiheadAttention", window, is_causal(variant))
        if self.learned not in (False, True, "sigmoid"):
            raise ValueError(
                "MultiheadAttention: learned must be False, True or 'sigmoid',"
                f" got {self.learned!r}"
            )
        if self.learned and variant.startswith("none"):
            raise ValueError(f"MultiheadAttention: variant {variant!r} has no slopes to learn")

        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        inner, inner_kv = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, **options)
        self.k_proj = nn.Linear(self.kdim, inner_kv, **options)
        self.v_proj = nn.Linear(self.vdim, inner_kv, **options)
        self.out_proj = nn.Linear(inner, embed_dim, **options)
        # Fixed slopes stay numbers: `module.bfloat16()` would round a buffer.
        self._fixed = dict(zip(("left", "right"), sides, strict=True))
        if self.learned:
            self._register_slopes()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections as `torch.nn.MultiheadAttention` does: q, k and v of one shape as
        one Xavier uniform matrix, the output as `torch.nn.Linear`, and biases 0; learned slopes
        begin with those of the variant.
        """
        inputs = self.q_proj, self.k_proj, self.v_proj
        alike = all(projection.weight.shape == self.q_proj.weight.shape for projection in inputs)
        for projection in inputs:
            nn.init.xavier_uniform_(projection.weight, gain=0.5**0.5 if alike else 1.0)
        self.out_proj.reset_parameters()
        for projection in (*inputs, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for side in self._learned_sides if self.learned else ():
            learned = getattr(self, f"{self._name_of_learned}_{side}")
            slope = torch.tensor(self._fixed[side], dtype=torch.float64, device=learned.device)
            start = slope.logit() if self.learned == "sigmoid" else slope.log()
            # A hidden side, whose slope is inf, stays hidden.
            _fill(learned, start.masked_fill(slope == torch.inf, torch.inf))

    @property
    def causal(self) -> bool:
        return is_causal(self.variant)

    @property
    def slopes(self) -> Tensor:
        """[H]: slopes towards earlier keys."""
        return self._slopes("left")

    @property
    def right_slopes(self) -> Tensor | None:
        """[H]: slopes towards later keys; None for causal attention."""
        return None if self.causal else self._slopes("right")

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
        points: Points | None = None,
        query_points: Points | None = None,
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
            points: [B, S, A] or [S, A], where the tokens stand, as for
                `linbias.torch.attention_points`; those of global tokens may be left out. Query and
                key stand at the same points. Of masks there is key_padding_mask alone, which may
                hide any tokens; these gather zeros.
            query_points: [B, T, A] or [T, A]: where the queries stand, if they are tokens of
                their own, none of them global; padding then is among the keys.

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
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                "MultiheadAttention: query, key and value must all have 3 axes, or 2 without a"
                f" batch, got {query.dim()}, {key.dim()} and {value.dim()}"
            )
        if nested.is_nested(query, key, value):
            given = (
                *(key_padding_mask, attn_mask, mask, need_weights or None),
                *(positions, points, query_points),
            )
            return self._attend_nested(query, key, value, given, is_causal), None
        places: dict[str, Any] = {} if positions is None else {"positions": positions}
        as_tensors("MultiheadAttention", places, query.device)
        positions = places.get("positions")
        points, query_points = (
            None if x is None else as_points("MultiheadAttention", name, x)
            for name, x in (("points", points), ("query_points", query_points))
        )
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
            positions = None if positions is None else positions[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if points is not None or query_points is not None or self.global_tokens:
            others: dict[str, object] = {
                "attn_mask": attn_mask,
                "mask": mask,
                "positions": positions,
                "is_causal": is_causal or None,
            }
            where = self._check_points(points, query_points, key.shape[1], others)
            out, weights = self._attend_points(
                query, key, value, *where, key_padding_mask, need_weights
            )
        else:
            sizes = masks.Sizes(query.shape[0], self.num_heads, query.shape[1], key.shape[1])
            seen = masks.read(sizes, attn_mask, is_causal, key_padding_mask, mask)
            out, weights = self._attend(query, key, value, sizes, seen, positions, need_weights)
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
        for side in self._learned_sides:
            slope = nn.Parameter(torch.empty(self.num_heads, device=device, dtype=dtype))
            self.register_parameter(f"{self._name_of_learned}_{side}", slope)

    @property
    def _learned_sides(self) -> tuple[str, ...]:
        return ("left",) if self.causal else ("left", "right")

    @property
    def _name_of_learned(self) -> str:
        return "logit" if self.learned == "sigmoid" else "log"

    def _slopes(self, side: str) -> Tensor:
        if not self.learned:
            # `weight` of a quantised layer, which is on the CPU, is a method
            device = getattr(self.q_proj.weight, "device", torch.device("cpu"))
            return constant(self._fixed[side], torch.float64, device)
        learned: Tensor = getattr(self, f"{self._name_of_learned}_{side}")
        learned = learned.to(_at_least_float32(learned.dtype))
        # exp(inf) has no gradient to give: a hidden side passes 0 on.
        hidden = learned == torch.inf
        slope_of = torch.sigmoid if self.learned == "sigmoid" else torch.exp
        return slope_of(learned.masked_fill(hidden, 0.0)).masked_fill(hidden, torch.inf)

    def _project(self, *sequences: Tensor) -> tuple[Tensor, ...]:
        """query, key and value [B, length, width] -> q, k and v [B, heads, length, D]."""
        named = ("query", "embed_dim"), ("key", "kdim"), ("value", "vdim")
        for x, (name, width) in zip(sequences, named, strict=True):
            if x.shape[-1] != getattr(self, width):
                raise ValueError(
                    f"MultiheadAttention: the last axis of {name} must be {width} ="
                    f" {getattr(self, width)}, got {x.shape[-1]}"
                )
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = [projection(x) for projection, x in zip(projections, sequences, strict=True)]
        for x in projected:
            if x.shape[-1] % self.head_dim:
                raise self._wrong_share()
        return tuple(x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, need_weights: bool = False) -> slice | None:
        """Which heads q, k and v hold: None for all, else those of this process."""
        if q.shape[1] == self.num_heads and k.shape[1] == v.shape[1] == self.num_kv_heads:
            return None
        if need_weights:
            raise ValueError(
                "MultiheadAttention: need_weights must be False where processes share the heads"
            )
        weight: Any = self.q_proj.weight
        shares = [
            (weight.device_mesh.size(axis), weight.device_mesh.get_local_rank(axis))
            for axis, placement in enumerate(getattr(weight, "placements", ()))
            if placement.is_shard(0)
        ]
        if len(shares) != 1:
            raise self._wrong_share()
        ((count, rank),) = shares
        wanted = self.num_heads, self.num_kv_heads, self.num_kv_heads
        if tuple(count * x.shape[1] for x in (q, k, v)) != wanted:
            raise self._wrong_share()
        return slice(rank * q.shape[1], (rank + 1) * q.shape[1])

    def _wrong_share(self) -> ValueError:
        return ValueError(
            "MultiheadAttention: q_proj, k_proj and v_proj must give all heads, or be split alike"
            " (ColwiseParallel) over processes whose number divides num_heads"
            f" {self.num_heads} and num_kv_heads {self.num_kv_heads}"
        )

    def _options(self, causal: bool, heads: slice | None) -> dict[str, Any]:
        """Keywords of `attention`, for some of the heads."""
        causal = causal or self.causal
        sides = self.slopes, None if causal else self.right_slopes
        left, right = (x if x is None or heads is None else x[heads] for x in sides)
        return {"slopes": left, "causal": causal, "right_slopes": right, "window": self.window}

    def _run(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, **options, dropout=dropout, implementation=self.implementation)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sizes: masks.Sizes,
        seen: masks.Seen,
        positions: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        B, _, T, S = sizes
        if seen.ends_early and T != S and self.variant != "none":
            raise ValueError(
                "MultiheadAttention: padding on the right needs as many queries as keys"
                f" (T = {T}, S = {S}): where do the queries stand?"
            )
        q, k, v = self._project(query, key, value)
        heads = self._heads(q, k, v, need_weights)
        options = self._options(seen.causal, heads)
        if seen.key_range is not None:  # by itself it would move the queries to its end
            start = seen.key_range.new_full((B,), S - T)
            options |= {"key_range": seen.key_range, "query_start": start}
        mask = seen.mask
        if heads is not None:
            if mask is not None and mask.shape[1] != 1:
                mask = mask[:, heads]
            if positions is not None and positions.dim() == 3:
                positions = positions[:, heads]
        options |= {"mask": mask, "positions": positions}
        out = self._run(q, k, v, **options)
        weights = attention_weights(q, k, **options) if need_weights else None
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _check_points(
        self,
        points: Tensor | None,
        query_points: Tensor | None,
        num_keys: int,
        others: dict[str, object],
    ) -> tuple[Tensor, Tensor | None]:
        """The points of all keys, with some for global ones, and those of queries."""
        if points is None:
            whose = f"the tokens after the {self.global_tokens} global ones"
            if query_points is not None:
                whose = "the keys"
            raise ValueError(f"MultiheadAttention: points must say where {whose} stand")
        if self.variant not in ("symmetric", "none"):
            raise ValueError(
                "MultiheadAttention: points know no left and right: variant must be symmetric or"
                f" none, got {self.variant!r}"
            )
        for name, other in {**others, "window": self.window}.items():
            if other is not None:
                raise ValueError(f"MultiheadAttention: points cannot be given with {name}")
        if self.global_tokens and points.shape[-2:-1] == (num_keys - self.global_tokens,):
            points = nn.functional.pad(points, (0, 0, self.global_tokens, 0))
        return points, query_points

    def _attend_points(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        points: Tensor,
        query_points: Tensor | None,
        padding: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend among tokens [B, N, width] that stand at points."""
        q, k, v = self._project(query, key, value)
        heads = self._heads(q, k, v, need_weights)
        out, weights = sets.attend(
            q,
            k,
            v,
            points,
            query_points,
            padding,
            need_weights,
            dropout=self.dropout if self.training else 0.0,
            implementation=self.implementation,
            slopes=self._options(False, heads)["slopes"],
            metric=self.metric,
            global_tokens=self.global_tokens,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def _attend_nested(
        self, query: Tensor, key: Tensor, value: Tensor, given: tuple[Any, ...], causal: bool
    ) -> Tensor:
        """Attend within each sequence of nested tensors [B, lengths, width]."""
        if not self.batch_first or any(x is not None for x in given):
            raise ValueError(
                "MultiheadAttention: nested tensors need batch_first=True, and neither masks nor"
                " weights, positions or points; with points pad them, as"
                " torch.nested.to_padded_tensor does, and give a key_padding_mask"
            )
        strided = query.layout == torch.strided
        if strided:
            query, key, value = nested.as_jagged(query, key, value)
        q, k, v = self._project(query, key, value)
        options = self._options(causal, self._heads(q, k, v))
        out = self._run(q, k, v, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return torch.nested.as_nested_tensor(list(out.unbind())) if strided else out

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take weights of `torch.nn.MultiheadAttention`, too, which leave slopes as they are."""
        if take_weights(state_dict, prefix):
            for name, slope in self.named_parameters(recurse=False):
                state_dict.setdefault(prefix + name, slope.detach())
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@torch.no_grad()
def _fill(parameter: Any, values: Tensor) -> None:
    """Fill a parameter, or of one that FSDP shares out what this process holds."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor  # takes a second to import

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    parameter.copy_(values)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_settings(
    embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None, dropout: float
) -> None:
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, value in (sizes | {"head_dim": 1 if head_dim is None else head_dim}).items():
        if value < 1:
            raise ValueError(f"MultiheadAttention: {name} must be at least 1, got {value}")
    if head_dim is None and embed_dim % num_heads:
        advice = "give head_dim"
        if num_heads > embed_dim and num_heads % embed_dim == 0:
            advice = f"embed_dim comes first: MultiheadAttention({num_heads}, {embed_dim})"
        raise ValueError(
            f"MultiheadAttention: embed_dim {embed_dim} is no multiple of num_heads {num_heads};"
            f" {advice}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"MultiheadAttention: num_heads {num_heads} is no multiple of num_kv_heads"
            f" {num_kv_heads}"
        )
    _request.check_dropout("MultiheadAttention", dropout)
