"""A growing cache whose steps cost what is new, and that knows how large its keys are.

Transformers' growing cache copies all keys and values at every step: with 32,768 tokens, ten times
the work of the near-to-far attention that follows. Here they lie in buffers with room to spare.
"""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class RoomyLayer(DynamicLayer):
    """One layer's keys and values [B, G, S, size]: the first rows of buffers with room for more.

    Rows are written once. Whatever else happens to a cache (rows reordered or dropped, tokens
    cropped, another device), the next `update` starts new buffers.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[Tensor] = []
        self._num_written = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens [B, G, T, size]; return all keys and values."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # Autograd and graphs need tensors that nobody writes to.
            self._rooms = []
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        kept, added = (self.keys, self.values), (key_states, value_states)
        if not self._has_room(kept, old, new):
            self._rooms = [_with_room(x, old, y, new) for x, y in zip(kept, added, strict=True)]
        for room, x in zip(self._rooms, added, strict=True):
            room[:, :, old:new] = x
        self._num_written = new
        self.keys, self.values = (room[:, :, :new] for room in self._rooms)
        return self.keys, self.values

    def _has_room(self, kept: tuple[Tensor, Tensor], old: int, new: int) -> bool:
        if not self._rooms or old != self._num_written or self._rooms[0].shape[2] < new:
            return False
        if self._rooms[0].is_inference() and not torch.is_inference_mode_enabled():
            return False
        return all(
            x.data_ptr() == room.data_ptr() and x.stride() == room.stride() and len(x) == len(room)
            for x, room in zip(kept, self._rooms, strict=True)
        )


def _with_room(kept: Tensor, old: int, added: Tensor, new: int) -> Tensor:
    B, G, _, size = added.shape
    room = added.new_empty(B, G, new + new // 4 + 64, size)
    if old:
        room[:, :, :old] = kept
    return room


def make_roomy(cache: Cache) -> None:
    """Let the layers of a fresh growing cache be `RoomyLayer`s; leave all others as they are."""
    if cache.offloading:  # the buffers would keep on the device what is to leave it
        return
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = RoomyLayer
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = RoomyLayer()


def key_bound(layer: CacheLayerMixin, new: Tensor, keys: Tensor) -> Tensor | None:
    """Return at least the norm of every cached key, [B, G], so that decoding need not read them all.

    The cache's layer carries the largest norm of the keys it had after the last call, which
    stays a bound when rows are reordered or dropped. Has it another number of keys by now, all
    are looked at again.

    Args:
        layer: Of any cache, just updated.
        new: [B, G, T, D], the keys that were added.
        keys: [B, G, S, D], all of them.
    """
    if torch.compiler.is_compiling():  # the number would mean one graph per token
        return None
    num_seen, largest = getattr(layer, "largest_key", (0, None))
    known = largest if num_seen == keys.shape[2] - new.shape[2] else None
    unseen = keys if known is None else new
    if not unseen.numel():
        return None
    wide = torch.promote_types(keys.dtype, torch.float32)
    bound = torch.linalg.vector_norm(unseen.detach(), dim=-1, dtype=wide).amax((0, 2))
    bound = bound * (1 + 2**-16)  # the rounding of the norm
    if known is not None:
        bound = torch.maximum(bound, known)
    layer.largest_key = keys.shape[2], bound
    return bound.expand(len(keys), -1)
