"""A growing cache in which a step costs what is new, and which knows how large its keys are.

Transformers' own copies all keys and values at every step: with 32,768 tokens, ten times the work
of the near-to-far attention that follows, which needs a bound on the norms of keys (`key_bound`).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from linbias.models.decoder.layout import TokenLayout
from linbias.torch import decoding
from linbias.torch.decoding import FEW_QUERIES

# What Transformers calls a cache: `cache` since 5.24, before that `past_key_values`.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward that has an argument `past_key_values` take it as `cache` too."""

    @wraps(forward)
    def with_either(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            if kwargs.get("past_key_values") is not None:
                raise ValueError(
                    f"{type(self).__name__}: give either cache or past_key_values, its older "
                    "name, and not both"
                )
            kwargs["past_key_values"] = cache
        return forward(self, *args, **kwargs)

    return with_either


class AttendingLayer(CacheLayerMixin):
    """A layer whose heads keep different keys: it hands out none, but attends itself."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        scale: float | None,
        layout: TokenLayout,
    ) -> Tensor:
        """Append new tokens k, v [B, G, T, D]; return what their queries gather, [B, H, T, D]."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> Any:
        """Refuse: there is no one set of keys for all heads."""
        raise ValueError(
            f"{type(self).__name__}: a cache whose heads keep different keys must be given to a "
            "model with linear biases that runs on linbias (linbias.models.load gives one)"
        )


def attending_layer(cache: Cache | None, index: int) -> AttendingLayer | None:
    """The layer of a cache, where it attends itself."""
    layer = cache.layers[index] if cache is not None and index < len(cache.layers) else None
    return layer if isinstance(layer, AttendingLayer) else None


@dataclass(eq=False)
class _Buffers:
    """Keys and values [B, G, room, size], of which the first rows are in use.

    Rows are written once, since somebody may hold a view. Copies of a layer share the buffers: the
    first copy that grows writes here, the others see that the next row is taken.
    """

    keys: Tensor
    values: Tensor
    num_written: int


@dataclass(eq=False)
class _Last:
    """Keys and values as an update left them, and PyTorch's count of changes; copies are None."""

    keys: Tensor
    values: Tensor
    version: int

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, G, S, size]: the first rows of buffers with room for more.

    `keys` and `values` may be replaced at will, as Transformers does to reorder, select or crop.
    With gradients, and under `torch.compile`, the layer grows as Transformers' own does.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._buffers: _Buffers | None = None
        self._last: _Last | None = None
        self._num_bounded = 0
        self._bound: Tensor | None = None  # [B, G], of the first _num_bounded keys

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; return all keys and values, which stay whatever is appended later."""
        if torch.compiler.is_compiling():
            self._buffers = self._last = None
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._forget_if_replaced()
        if torch.is_grad_enabled():
            self._buffers = None
            super().update(key_states, value_states)
        else:
            self._append(key_states, value_states)
        self._remember()
        return self.keys, self.values

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float | None
    ) -> Tensor | None:
        """Append a few tokens without padding and attend in one step; None where it cannot."""
        old, T = self.get_seq_length(), k.shape[2]
        self._forget_if_replaced()
        if self._bound is None or self._num_bounded != old or k.shape[0] != len(self._bound):
            return None
        if T > FEW_QUERIES or torch.is_grad_enabled():  # before anything is moved to make room
            return None
        buffers = self._with_room_for(k, v)
        kept = (buffers.keys, buffers.values, old, self._bound)
        out = decoding.decode(q, k, v, *kept, slopes, scale)
        if out is not None:
            self._take(buffers, old + T)
            self._num_bounded = old + T
            self._remember()
        return out

    def key_bound(self) -> Tensor | None:
        """Return [B, G], at least the norm of every key; None while there is no key."""
        if not self.get_seq_length():
            return None
        self._forget_if_replaced()
        new = self.keys[:, :, self._num_bounded :].detach()
        if new.numel():
            wide = torch.promote_types(new.dtype, torch.float32)
            norm = torch.linalg.vector_norm(new, dim=-1, dtype=wide).amax(2)
            # More than the rounding of the norm, and than the squares that vanish in it.
            norm.mul_(1 + 2**-16).add_(2**-56)
            self._bound = norm if self._bound is None else torch.maximum(self._bound, norm)
            self._num_bounded = self.keys.shape[2]
        return self._bound

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        old, T = self.get_seq_length(), key_states.shape[2]
        buffers = self._with_room_for(key_states, value_states)
        buffers.keys.narrow(2, old, T).copy_(key_states)
        buffers.values.narrow(2, old, T).copy_(value_states)
        self._take(buffers, old + T)

    def _with_room_for(self, key_states: Tensor, value_states: Tensor) -> _Buffers:
        """The buffers, or larger ones with the same tokens: the rows of new tokens are free."""
        old = self.get_seq_length()
        new = old + key_states.shape[2]
        buffers = self._buffers
        if buffers is None or buffers.num_written != old or buffers.keys.shape[2] < new:
            buffers = self._buffers = _Buffers(
                keys=_with_room(self.keys, old, key_states, new),
                values=_with_room(self.values, old, value_states, new),
                num_written=old,
            )
        return buffers

    def _take(self, buffers: _Buffers, num_tokens: int) -> None:
        buffers.num_written = num_tokens
        self.keys = buffers.keys.narrow(2, 0, num_tokens)
        self.values = buffers.values.narrow(2, 0, num_tokens)

    def _remember(self) -> None:
        version = 0 if self.keys.is_inference() else self.keys._version
        self._last = _Last(self.keys, self.values, version)

    def _forget_if_replaced(self) -> None:
        """Drop buffers and bound unless keys and values are those that the last update left."""
        if (last := self._last) is not None:
            same = self.keys is last.keys and self.values is last.values
            if same and last.keys.is_inference():
                # Outside of inference mode autograd would refuse the bound.
                same = torch.is_inference_mode_enabled()
            elif same:
                same = last.keys._version == last.version
            if same:
                return
        self._buffers = self._last = self._bound = None
        self._num_bounded = 0


def _with_room(kept: Tensor, old: int, added: Tensor, new: int) -> Tensor:
    """A buffer for `new` tokens and more, which begins with the `old` ones that are kept."""
    B, G, _, size = added.shape
    buffer = added.new_empty(B, G, new + new // 4 + 64, size)
    if old:
        buffer[:, :, :old] = kept
    return buffer


def use_growing_layers(cache: Cache) -> None:
    """Make the empty layers of a cache that stays on the device `GrowingLayer`s."""
    if cache.offloading:
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = GrowingLayer()


def check_rows(cache: Cache, index: int, rows: int) -> None:
    """Check that a layer holds as many rows as there are of new tokens: one would be repeated."""
    keys = getattr(cache.layers[index], "keys", None) if index < len(cache.layers) else None
    if keys is not None and keys.ndim == 4 and len(keys) != rows:
        raise ValueError(
            f"linbias: past_key_values must hold as many rows as there are of new tokens, {rows}, "
            f"got {len(keys)}"
        )


def keep_beside(cache: Cache, index: int, states: Tensor) -> Tensor:
    """Append what new tokens have beside keys, [B, heads, T, size]; return that of all tokens.

    It is kept as the keys of a layer of its own, behind those of the model: whatever reorders,
    selects, crops or resets the cache does the same there.
    """
    if cache.offloading:
        raise ValueError(
            "linbias: past_key_values must stay on the device for a model with learned steps "
            "between tokens, got a cache with offloading"
        )
    first = cache.layers[0]
    while len(cache.layers) <= index:
        is_static = isinstance(first, StaticLayer)
        cache.layers.append(StaticLayer(first.max_cache_len) if is_static else GrowingLayer())
    kept: Tensor = cache.layers[index].update(states, states[..., :0])[0]
    return kept


def growing_layer(cache: Cache, index: int) -> GrowingLayer | None:
    """The layer of a cache, where it is a `GrowingLayer` by now, and no graph is made."""
    layer = cache.layers[index] if index < len(cache.layers) else None
    may_be_growing = type(layer) is GrowingLayer and not torch.compiler.is_compiling()
    return layer if may_be_growing else None


def key_bound(layer: CacheLayerMixin) -> Tensor | None:
    """A `key_bound` [B, G] for attention, if a layer has one, and no graph is made."""
    if torch.compiler.is_compiling() or not isinstance(layer, GrowingLayer):
        return None
    return layer.key_bound()
