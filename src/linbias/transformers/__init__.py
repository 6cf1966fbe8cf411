"""What a model of Transformers needs around `linbias.torch.attention`, whatever its family.

`padding` turns an `attention_mask` into positions and ranges of keys; `cache` keeps the keys and values of
earlier tokens, and how large the keys are.
"""

from linbias import _extras

_extras.require("linbias.transformers")

from linbias.transformers.cache import GrowingLayer, key_bound, use_growing_layers
from linbias.transformers.padding import Padding, read_attention_mask

__all__ = ["GrowingLayer", "Padding", "key_bound", "read_attention_mask", "use_growing_layers"]
