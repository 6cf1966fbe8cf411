"""Ways to tell a transformer the order of its tokens: small classes with the same four methods.

    embed    may add something to the embedded tokens, once
    rotate   may turn queries and keys by their positions, in every layer
    attend   is the attention itself, where a bias belongs, in every layer
    weights  are those of `attend`, to look at

`linbias.methods` has a record of each method; `bidirectional.py` has those that see later keys. B
batch, T new tokens, S keys (the cached ones and the new), H query heads, G key/value heads, D head
size. `positions` is [1 or B, T] and counts from the first token of a row that is no padding.
"""

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from transformers import PreTrainedConfig

from linbias.methods import METHODS
from linbias.models.decoder.slopes import ModelSlopes
from linbias.torch import attention, attention_weights
from linbias.torch.constant import constant
from linbias.torch.operators.values import readable
from linbias.torch.shard import refuse_shard


class AttendOptions(NamedTuple):
    """What `attend` takes beside q, k and v: arguments of `linbias.torch.attention`."""

    key_range: Tensor | None = None  # [B, 2]
    query_start: Tensor | None = None  # [B]; None: the last query stands at the last key
    key_bound: Tensor | None = None  # [B, G]
    dropout: float = 0.0
    positions: Tensor | None = None  # [B, S] or [B, H, S], where keys stand if not at their index


NO_OPTIONS = AttendOptions()


class Position(nn.Module):
    """No positions at all: the causal mask alone, if there is one, hints at order."""

    counts_hidden = False  # whether keys that a mask hides between others take up distance

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """Return [B, H, T, D] for q [B, H, T, D] and k, v [B, G, S, D]."""
        refuse_shard(type(self).__name__)
        T, S = q.shape[2], k.shape[2]
        grouped = q.shape[1] != k.shape[1]
        if not _is_placed(options) and (T in (1, S) or not self.causal):
            # No mask to build: a square is plainly causal, a single last query sees every key.
            is_causal = self.causal and T == S
            return scaled_dot_product_attention(
                q, k, v, dropout_p=options.dropout, is_causal=is_causal, enable_gqa=grouped
            )
        visible = self._visible(distances_of(q, k, options), options)
        return scaled_dot_product_attention(
            q, k, v, visible[:, None], options.dropout, enable_gqa=grouped
        )

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
        """Return the weights [B, H, T, S] of `attend` before dropout; zeros without keys."""
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

        Some SDPA kernels give NaN for a row without keys, which would reach other rows as 0 * NaN.
        """
        seen = self._seen(distances, options)
        return seen | ~seen.any(-1, keepdim=True)


class LinearBias:
    """Attend through `linbias.torch.attention`; a method says what scores fall by: `fall`."""

    counts_hidden = False
    causal = True
    implementation: str

    @property
    def decodes(self) -> bool:
        """Whether the compiled core may compute it."""
        return self.causal and self.implementation in ("auto", "cpu")

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        """Return the arguments of `linbias.torch.attention` that the method is, slopes first."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        how: Any = {"implementation": self.implementation, "return_lse": False}
        given = {**self.fall(q, k.shape[2], options), **options._asdict()}
        return attention(q, k, v, causal=self.causal, **how, **given)

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
        names = ("key_range", "query_start", "positions")
        given = {name: getattr(options, name) for name in names}
        fall = self.fall(q, k.shape[2], options)
        return attention_weights(q, k, **fall, causal=self.causal, **given)


class Biased(LinearBias, Position):
    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.implementation = config.attention_implementation


class Alibi(Biased):
    """Subtract slope * distance from every score (Press et al., arXiv 2108.12409)."""

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.slopes = ModelSlopes.of(config)

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        return {"slopes": self.slopes.left(q, num_keys, options.key_range)}


class Stepped(Biased):
    """Subtract from every score the steps of its head after the key, up to the query.

        x[s] = step[0] + ... + step[s]        score[t, s] = scale * (q[t] . k[s]) - (x[t] - x[s])

    A layer makes the steps of a token of what it makes its query, key and value of (`make_gate`).
    """

    has_gate_bias = False  # whether that projection adds a number for each head

    def steps(self, gates: Tensor) -> Tensor:
        """Return the steps, at least 0 and at least float32, for what the projection gives."""
        raise NotImplementedError

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        wide = torch.promote_types(q.dtype, torch.float32)
        return {"slopes": constant((1.0,) * q.shape[1], wide, q.device)}


class Forget(Stepped):
    """Multiply the weight of a key by the forget gates sigmoid(w . x + b) of all tokens after it.

    That of the Forgetting Transformer (Lin et al., arXiv 2503.02130): a step is -log of a gate. As
    there, b begins at 0; the rest of that model (norms, blocks) is not taken.
    """

    has_gate_bias = True

    def steps(self, gates: Tensor) -> Tensor:
        return -logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))


class Cable(Stepped):
    """Let tokens make steps of ReLU(w . x): some of them none at all.

    Those of CABLE without weights (Veisi et al., arXiv 2503.08067, equations 2 to 5, CABLE_NW in
    its tables); CABLE multiplies them by another number of the query (equations 6 and 7), which
    `linbias.torch.attention` does not have. With softplus for ReLU it would be `Forget`.
    """

    def steps(self, gates: Tensor) -> Tensor:
        return gates.to(torch.promote_types(gates.dtype, torch.float32)).relu()


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
        if readable(positions) is not None:  # else the lookup's own range check has to do
            self._check_reach(positions)
        return hidden + self.table(positions)

    def _check_reach(self, positions: Tensor) -> None:
        size = self.table.num_embeddings
        least, most = map(int, positions.aminmax()) if positions.numel() else (0, 0)
        if least < 0:
            raise ValueError(
                f"LinbiasModel: position_ids must be at least 0 for a table, got {least}"
            )
        if most >= size:
            raise ValueError(
                "LinbiasModel: position='learned' has a table of train_length = "
                f"{size} positions, too few for a sequence of {most + 1} tokens"
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
    """Add a trained number per head and bucket of distance to scores (arXiv 1910.10683)."""

    def __init__(self, config: PreTrainedConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.bias = nn.Embedding(config.t5_num_buckets, config.num_attention_heads)
        self._max_distance = config.t5_max_distance

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        if T == 0 or S == 0:
            return super().attend(q, k, v, options)
        # A row has T + S - 1 distances, from that of its last query to the first key downwards:
        # look those up, then lay them out as [T, S], each query one step after the next.
        masked = _is_placed(options)
        farthest = query_start_of(q, k, options) + T - 1
        distances = farthest - torch.arange(T + S - 1, device=q.device)
        line = self.bias(self.bucket(distances)).mT.to(q.dtype)
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
        """Number the buckets: one per distance in the nearer half, then ever wider ones."""
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
    return _kind(name)(config, causal)


def make_gate(name: str, config: PreTrainedConfig) -> nn.Linear | None:
    """Build what a layer makes its steps of, where the method of a name is a `Stepped` one."""
    kind = _kind(name)
    if not issubclass(kind, Stepped):
        return None
    return nn.Linear(config.hidden_size, config.num_attention_heads, bias=kind.has_gate_bias)


def _kind(name: str) -> type[Position]:
    module, _, kind = METHODS[name].kind.partition(".")
    found: type[Position] = getattr(import_module(f"linbias.models.decoder.{module}"), kind)
    return found


def _angles(positions: Tensor, count: int, base: float) -> Tensor:
    """Return position * base^(-i / count), i = 0 .. count-1 along a new last axis, in float32."""
    exponents = torch.arange(count, device=positions.device, dtype=torch.float32) / count
    return positions[..., None] * base**-exponents


def _is_placed(options: AttendOptions) -> bool:
    """Whether more than the order of keys says what is seen."""
    return options.key_range is not None or options.query_start is not None


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
