"""Six ways to tell a transformer the order of its tokens: small classes with the same three hooks.

    embed    may add something to the embedded tokens, once
    rotate   may turn queries and keys by their positions, in every layer
    attend   is the attention itself, where a bias belongs, in every layer

What a method does not need, it inherits from `Position`, which adds nothing and attends causally.
`METHODS`, below the classes, maps the names of the configuration to them.

Letters as in DESIGN section 1: B batch, T new tokens, S keys (the cached ones and the new), H
query heads, G key/value heads, D head size. `positions` is [1 or B, T] and counts from the first
real token of a row; `key_range` is None where nothing is padded, else [B, 2], the first and
one-past-last real key of each row; `key_bound`, [B, G] or None, is at least the norm of every key.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linbias.models.config import LinbiasConfig
from linbias.schedules import slopes
from linbias.torch import attention
from linbias.torch.constant import constant


class Position(nn.Module):
    """No positions at all: the causal mask alone hints at order (position="none")."""

    skips_far_keys = False  # whether `attend` makes use of key_bound

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__()

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_range: Tensor | None,
        dropout: float,
        key_bound: Tensor | None = None,
    ) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        grouped = q.shape[1] != k.shape[1]
        if key_range is None and T in (1, S):
            # No mask to build: a square is plainly causal, a single last query sees every key.
            return scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=T == S, enable_gqa=grouped
            )
        mask = _visible(T, S, key_range, q.device)
        return scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=grouped)


class Alibi(Position):
    """Subtract slope * distance from every score (Press et al., arXiv 2108.12409)."""

    skips_far_keys = True

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        # Python floats, not a buffer: `model.to(bfloat16)` would round a buffer.
        self._slopes = slopes(config.num_attention_heads, config.slope_schedule).tolist()
        self._scale = config.slope_scale
        self._train_length = config.train_length
        self._implementation = config.attention_implementation

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_range: Tensor | None,
        dropout: float,
        key_bound: Tensor | None = None,
    ) -> Tensor:
        left = self._left(q, k.shape[2], key_range)
        name = self._implementation
        return attention(
            q,
            k,
            v,
            left,
            key_range=key_range,
            key_bound=key_bound,
            dropout=dropout,
            implementation=name,
        )

    def _left(self, q: Tensor, num_keys: int, key_range: Tensor | None) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        left = constant(self._slopes, dtype, q.device)
        if self._scale is None:
            return left
        if self._scale != "interpolate":
            return left * float(self._scale)
        if key_range is None:
            return left * min(1.0, self._train_length / num_keys)
        real_keys = (key_range[:, 1:] - key_range[:, :1]).clamp(min=1)
        return left * (self._train_length / real_keys.to(dtype)).clamp(max=1.0)


class Sinusoidal(Position):
    """Add sines and cosines of the position, as the first transformer did (arXiv 1706.03762)."""

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        width = hidden.shape[-1]
        angles = _angles(positions, width // 2, base=10000.0)
        table = torch.cat([angles.sin(), angles.cos()], dim=-1)
        # Fresh embeddings are small; unscaled, the sinusoids of size 1 would drown them.
        return hidden * math.sqrt(width) + table.to(hidden.dtype)


class Learned(Position):
    """Add one trained vector per position; past the last one there is nothing to add."""

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.train_length, config.hidden_size)

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # Compiled, the lookup's own range check has to do.
            self._check_reach(positions)
        return hidden + self.table(positions)

    def _check_reach(self, positions: Tensor) -> None:
        size = self.table.num_embeddings
        if positions.numel() and (length := int(positions.max()) + 1) > size:
            raise ValueError(
                "LinbiasModel: position='learned' has a table of train_length = "
                f"{size} positions, too few for a sequence of {length} tokens"
            )


class Rotary(Position):
    """Turn queries and keys by their position, so that scores see distance (arXiv 2104.09864)."""

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self._base = config.rotary_base

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = _angles(positions[:, None], q.shape[-1] // 2, self._base)
        cos, sin = angles.cos(), angles.sin()

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return turned.to(x.dtype)

        return turn(q), turn(k)


class T5(Position):
    """Add a trained number per head and bucket of distance to every score (arXiv 1910.10683).

    As in T5, all layers share the table; its backward pass needs the bias [H, T, S] in memory.
    """

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self.bias = nn.Embedding(config.t5_num_buckets, config.num_attention_heads)
        self._max_distance = config.t5_max_distance

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_range: Tensor | None,
        dropout: float,
        key_bound: Tensor | None = None,
    ) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        if T == 0:
            return super().attend(q, k, v, key_range, dropout)
        # The bias depends on distance alone: look up each distance once, then lay the line out as
        # [H, T, S], row t + 1 one step before row t. Negative distances are the future.
        distances = torch.arange(S - 1, -T, -1, device=q.device)
        line = self.bias(self.bucket(distances.clamp(min=0))).T.to(q.dtype)
        line = line.masked_fill(distances < 0, -math.inf)
        bias = line.unfold(-1, S, 1).flip(-2)
        if key_range is not None:
            bias = torch.where(_visible(T, S, key_range, q.device), bias, -math.inf)
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, bias, dropout, enable_gqa=grouped)

    def bucket(self, distances: Tensor) -> Tensor:
        """Number the buckets: one per distance in the nearer half, then ever wider ones."""
        count = self.bias.num_embeddings
        exact = count // 2
        octaves = (distances.float() / exact).clamp(min=1).log()
        share = octaves / math.log(self._max_distance / exact)
        coarse = exact + (share * (count - exact)).long()
        return torch.where(distances < exact, distances, coarse.clamp(max=count - 1))


METHODS: dict[str, type[Position]] = {
    "alibi": Alibi,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "t5": T5,
    "none": Position,
}


def _angles(positions: Tensor, count: int, base: float) -> Tensor:
    """Return position * base^(-i / count), i = 0 .. count-1 along a new last axis, in float32."""
    exponents = torch.arange(count, device=positions.device, dtype=torch.float32) / count
    return positions[..., None] * base**-exponents


def _visible(T: int, S: int, key_range: Tensor | None, device: torch.device) -> Tensor:
    """Return which keys each query may see, [T, S] or [B, 1, T, S]; the last sees them all."""
    keys = torch.arange(S, device=device)
    queries = torch.arange(S - T, S, device=device)[:, None]
    visible = keys <= queries
    if key_range is None:
        return visible
    real = keys >= key_range[:, :1, None, None]
    # A padding query sees itself: some SDPA kernels give NaN for a row without keys, and NaN in a
    # padding row would reach the real rows as 0 * NaN one layer later.
    return visible & real | (keys == queries)
