"""Ways to tell a transformer the order of its tokens: small classes with the same four methods.

    embed    may add something to the embedded tokens, once
    rotate   may turn queries and keys by their positions, in every layer
    attend   is the attention itself, where a bias belongs, in every layer
    weights  are those of `attend`, to look at

What a method does not need, it inherits from `Position`, which adds nothing. With causal=False a query sees
later keys as well: `bidirectional.py` has the methods of models that read so. `linbias.methods` has a record of each
method, and `make_position` builds the one that a configuration names.

Letters as in DESIGN section 1: B batch, T new tokens, S keys (the cached ones and the new), H query
heads, G key/value heads, D head size. `positions` is [1 or B, T] and counts from the first token of
a row that is no padding (`linbias.models.places.Places`).
"""

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig

from linbias.methods import METHODS
from linbias.models.slopes import ModelSlopes
from linbias.torch import attention, attention_weights
from linbias.torch.call import refuse_pieces


class AttendOptions(NamedTuple):
    """What `attend` takes beside queries, keys and values; the fields are arguments of `linbias.torch.attention`.

    Attributes:
        key_range: [B, 2] or None: the first and one past the last key of each row that is no padding.
        query_start: [B] or None: where the first query stands. None: the last query stands at the last key of
            the range, or of all keys.
        key_bound: [B, G] or None: at least the norm of every key.
        dropout: Probability that a weight is dropped.
    """

    key_range: Tensor | None = None
    query_start: Tensor | None = None
    key_bound: Tensor | None = None
    dropout: float = 0.0


_NO_OPTIONS = AttendOptions()


class Position(nn.Module):
    """No positions at all: the causal mask alone, if there is one, hints at order (position="none").

    Args:
        config: Of the model.
        causal: Hide the keys after each query.
    """

    uses_key_bound = False  # whether `attend` reads options.key_bound

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions = _NO_OPTIONS
    ) -> Tensor:
        """Return [B, H, T, D] for q [B, H, T, D] and k, v [B, G, S, D]."""
        refuse_pieces(type(self).__name__)
        T, S = q.shape[2], k.shape[2]
        grouped = q.shape[1] != k.shape[1]
        placed = options.key_range is not None or options.query_start is not None
        if not placed and (T in (1, S) or not self.causal):
            # No mask to build: a square is plainly causal, a single last query sees every key.
            is_causal = self.causal and T == S
            return scaled_dot_product_attention(
                q, k, v, dropout_p=options.dropout, is_causal=is_causal, enable_gqa=grouped
            )
        visible = self._visible(distances_of(q, k, options), options)
        return scaled_dot_product_attention(
            q, k, v, visible[:, None], options.dropout, enable_gqa=grouped
        )

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions = _NO_OPTIONS) -> Tensor:
        """Return the weights [B, H, T, S] of `attend` before dropout, at least float32; all of them in memory.

        A query that sees no key has zeros.
        """
        return self._weights_with(self._bias(distances_of(q, k, options)), q, k, options)

    def _weights_with(
        self, bias: Tensor | float, q: Tensor, k: Tensor, options: AttendOptions
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1]) + bias
        seen = self._seen(distances_of(q, k, options), options)[:, None]
        # Not -inf: the softmax of a row without keys would be NaN.
        scores = scores.masked_fill(~seen, torch.finfo(wide).min)
        return scores.softmax(-1) * seen

    def _bias(self, distances: Tensor) -> Tensor | float:
        """What is added to the scores at distances [1 or B, T, S]: [1 or B, H, T, S]."""
        return 0.0

    def _seen(self, distances: Tensor, options: AttendOptions) -> Tensor:
        """[1 or B, T, S]: which keys each query may see."""
        seen = distances >= 0 if self.causal else torch.ones_like(distances, dtype=torch.bool)
        if options.key_range is not None:
            first, end = options.key_range[:, None, :1], options.key_range[:, None, 1:]
            keys = torch.arange(distances.shape[-1], device=distances.device)
            seen = seen & (keys >= first) & (keys < end)
        return seen

    def _visible(self, distances: Tensor, options: AttendOptions) -> Tensor:
        """As `_seen`, but a query that may see no key, as those of padding, sees them all.

        Some SDPA kernels give NaN for a row without keys, and NaN in a padding row would reach the other rows as
        0 * NaN one layer later. Nobody reads what such a query gathers.
        """
        seen = self._seen(distances, options)
        return seen | ~seen.any(-1, keepdim=True)


class Biased(Position):
    """Attend through `linbias.torch.attention`, which leaves far keys unread: what the ALiBi methods share.

    A method says what scores fall by: `fall`.
    """

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self._implementation = config.attention_implementation

    def fall(self, q: Tensor, k: Tensor, options: AttendOptions) -> dict[str, Any]:
        """Return the arguments of `linbias.torch.attention` that the method is: slopes, and perhaps scale and mask."""
        raise NotImplementedError

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions = _NO_OPTIONS
    ) -> Tensor:
        given = {**self.fall(q, k, options), **options._asdict()}
        implementation: str = self._implementation
        return attention(
            q, k, v, causal=self.causal, implementation=implementation, return_lse=False, **given
        )

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions = _NO_OPTIONS) -> Tensor:
        return attention_weights(
            *(q, k),
            **self.fall(q, k, options),
            causal=self.causal,
            key_range=options.key_range,
            query_start=options.query_start,
        )


class Alibi(Biased):
    """Subtract slope * distance from every score (Press et al., arXiv 2108.12409)."""

    uses_key_bound = True

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.slopes = ModelSlopes.of(config)

    def fall(self, q: Tensor, k: Tensor, options: AttendOptions) -> dict[str, Any]:
        return {"slopes": self.slopes.left(q, k.shape[2], options.key_range)}


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

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
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

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
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

    As in T5, all layers share the table; where later keys are seen, they have half of the buckets. Its backward
    pass needs the bias [H, T, S] in memory.
    """

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.bias = nn.Embedding(config.t5_num_buckets, config.num_attention_heads)
        self._max_distance = config.t5_max_distance

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions = _NO_OPTIONS
    ) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        if T == 0 or S == 0:
            return super().attend(q, k, v, options)
        # The bias depends on distance alone. A row of the batch has T + S - 1 distances, from that of its last
        # query to the first key downwards: look those up, then lay them out as [T, S], each query one step
        # after the next.
        farthest = query_start_of(q, k, options) + T - 1
        distances = farthest - torch.arange(T + S - 1, device=q.device)
        line = self.bias(self.bucket(distances)).mT.to(q.dtype)
        masked = options.key_range is not None or options.query_start is not None
        if not masked and self.causal:  # hidden before the line is laid out, which is cheaper
            line = line.masked_fill((distances < 0)[:, None], -math.inf)
        bias = line.unfold(-1, S, 1).flip(-2)  # [1 or B, H, T, S]
        if masked:
            visible = self._visible(distances_of(q, k, options), options)
            bias = torch.where(visible[:, None], bias, -math.inf)
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, bias, options.dropout, enable_gqa=grouped)

    def _bias(self, distances: Tensor) -> Tensor:
        return self.bias(self.bucket(distances)).movedim(-1, 1)

    def bucket(self, distances: Tensor) -> Tensor:
        """Number the buckets of a side: one per distance in the nearer half, then ever wider ones."""
        count = self.bias.num_embeddings
        if self.causal:
            return self._bucket_of_side(distances.clamp(min=0), count)
        count //= 2
        return self._bucket_of_side(distances.abs(), count) + count * (distances < 0)

    def _bucket_of_side(self, distances: Tensor, count: int) -> Tensor:
        exact = count // 2
        octaves = (distances.float() / exact).clamp(min=1).log()
        share = octaves / math.log(self._max_distance / exact)
        coarse = exact + (share * (count - exact)).long()
        return torch.where(distances < exact, distances, coarse.clamp(max=count - 1))


def make_position(name: str, config: PreTrainedConfig, *, causal: bool = True) -> Position:
    """Build the position method of a name for a model of this configuration."""
    module, _, kind = METHODS[name].kind.partition(".")
    made: Position = getattr(import_module(f"linbias.models.{module}"), kind)(config, causal)
    return made


def _angles(positions: Tensor, count: int, base: float) -> Tensor:
    """Return position * base^(-i / count), i = 0 .. count-1 along a new last axis, in float32."""
    exponents = torch.arange(count, device=positions.device, dtype=torch.float32) / count
    return positions[..., None] * base**-exponents


def query_start_of(q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
    """[1 or B, 1]: where the first query of each row stands."""
    if options.query_start is not None:
        return options.query_start[:, None]
    if options.key_range is not None:
        return options.key_range[:, 1:] - q.shape[2]
    return torch.full((1, 1), k.shape[2] - q.shape[2], device=q.device)


def distances_of(q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
    """[1 or B, T, S]: how far each key lies before each query."""
    queries = query_start_of(q, k, options) + torch.arange(q.shape[2], device=q.device)
    return queries[..., None] - torch.arange(k.shape[2], device=q.device)
