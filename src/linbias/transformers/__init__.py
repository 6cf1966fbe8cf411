"""What a Transformers model needs around attention, so that it can use `linbias.torch.attention`.

`padding` turns an `attention_mask` into positions and ranges of keys; `packing` tells the texts of a packed row
apart; `cache` keeps the keys and values of earlier tokens, and how large the keys are.
"""

from linbias.transformers.cache import GrowingLayer, key_bound, use_growing_layers
from linbias.transformers.packing import Packing, attend_packed, packed_weights
from linbias.transformers.padding import Padding, read_attention_mask

__all__ = [
    "GrowingLayer",
    "Packing",
    "Padding",
    "attend_packed",
    "key_bound",
    "packed_weights",
    "read_attention_mask",
    "use_growing_layers",
]
