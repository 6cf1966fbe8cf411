"""What our layers share: projections between a width and heads, and the slopes of the heads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linbias import _request
from linbias.schedules import is_causal, variant_slopes
from linbias.torch.constant import constant
from linbias.torch.layers.from_pytorch import take_weights


class Layout(NamedTuple):
    """How a caller's sequences lie: [B, length, width], [length, B, width] or [length, width]."""

    batched: bool
    batch_first: bool

    @classmethod
    def of(cls, name: str, batch_first: bool, *sequences: Tensor) -> "Layout":
        """That of query, key and value, which must have as many axes as each other."""
        axes = [x.dim() for x in sequences]
        if axes not in ([2, 2, 2], [3, 3, 3]):
            raise ValueError(
                f"{name}: query, key and value must all have 3 axes, or 2 without a batch,"
                f" got {axes[0]}, {axes[1]} and {axes[2]}"
            )
        return cls(axes[0] == 3, batch_first)

    def rows(self, *sequences: Tensor) -> tuple[Tensor, ...]:
        """As [B, length, width]."""
        if not self.batched:
            return tuple(x[None] for x in sequences)
        return sequences if self.batch_first else tuple(x.transpose(0, 1) for x in sequences)

    def one_row(self, x: Tensor | None) -> Tensor | None:
        """What comes [B, ...], or without a batch [...], as [B, ...]."""
        return x if x is None or self.batched else x[None]

    def back(self, out: Tensor, weights: Tensor | None, average: bool) -> Any:
        """Out [B, T, width] as the sequences lie, and weights [B, H, T, S], or their mean."""
        if weights is not None and average:
            weights = weights.mean(1)
        if not self.batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights


class Heads(nn.Module):
    """Projections q_proj, k_proj, v_proj and out_proj, and slopes, fixed or learned.

    The arguments are those of `MultiheadAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        *,
        kdim: int | None,
        vdim: int | None,
        num_kv_heads: int | None,
        head_dim: int | None,
        variant: str,
        learned: bool | str | None,
        schedule: str,
        max_bias: float,
        implementation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self._check_settings(embed_dim, num_heads, num_kv_heads, head_dim, dropout)
        sides = variant_slopes(self._name, variant, num_heads, schedule, max_bias)
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.dropout = dropout
        self.variant = variant
        self.learned = variant == "asymmetric" if learned is None else learned
        self.implementation = implementation
        if self.learned not in (False, True, "sigmoid"):
            raise ValueError(
                f"{self._name}: learned must be False, True or 'sigmoid', got {self.learned!r}"
            )
        if self.learned and variant.startswith("none"):
            raise ValueError(f"{self._name}: variant {variant!r} has no slopes to learn")

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
    def _name(self) -> str:
        return type(self).__name__

    @property
    def causal(self) -> bool:
        return is_causal(self.variant)

    @property
    def slopes(self) -> Tensor:
        """[H]: slopes towards earlier keys."""
        return self._slopes("left")

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
                    f"{self._name}: the last axis of {name} must be {width} ="
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
                f"{self._name}: need_weights must be False where processes share the heads"
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
            f"{self._name}: q_proj, k_proj and v_proj must give all heads, or be split alike"
            " (ColwiseParallel) over processes whose number divides num_heads"
            f" {self.num_heads} and num_kv_heads {self.num_kv_heads}"
        )

    def _join(self, out: Tensor) -> Tensor:
        """Out of the heads [B, H, T, D] -> [B, T, embed_dim]."""
        joined: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return joined

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take weights of `torch.nn.MultiheadAttention`, too, which leave slopes as they are."""
        if take_weights(state_dict, prefix):
            for name, slope in self.named_parameters(recurse=False):
                state_dict.setdefault(prefix + name, slope.detach())
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _check_settings(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None,
        dropout: float,
    ) -> None:
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, value in (sizes | {"head_dim": 1 if head_dim is None else head_dim}).items():
            if value < 1:
                raise ValueError(f"{self._name}: {name} must be at least 1, got {value}")
        if head_dim is None and embed_dim % num_heads:
            advice = "give head_dim"
            if num_heads > embed_dim and num_heads % embed_dim == 0:
                advice = f"embed_dim comes first: {self._name}({num_heads}, {embed_dim})"
            raise ValueError(
                f"{self._name}: embed_dim {embed_dim} is no multiple of num_heads {num_heads};"
                f" {advice}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{self._name}: num_heads {num_heads} is no multiple of num_kv_heads"
                f" {num_kv_heads}"
            )
        _request.check_dropout(self._name, dropout)


@torch.no_grad()
def _fill(parameter: Any, values: Tensor) -> None:
    """Fill a parameter, or of one that FSDP shares out what this process holds."""
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor  # takes a second to import

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    parameter.copy_(values)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
