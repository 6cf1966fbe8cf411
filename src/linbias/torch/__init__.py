"""PyTorch front end: attention, packed sequences, points, layers, and what is read and weighed."""

from linbias import _extras

_extras.require("linbias.torch")

from linbias.torch.functional import attention, attention_weights
from linbias.torch.layers.nn import MultiheadAttention
from linbias.torch.layers.points import PointAttention
from linbias.torch.layers.replace import replace_attention
from linbias.torch.merge import merge
from linbias.torch.packed.paged import attention_paged, write_pages
from linbias.torch.packed.varlen import attention_varlen
from linbias.torch.points.functional import attention_points
from linbias.torch.visited import Visited, visited, visited_paged

__all__ = [
    "MultiheadAttention",
    "PointAttention",
    "Visited",
    "attention",
    "attention_paged",
    "attention_points",
    "attention_varlen",
    "attention_weights",
    "merge",
    "replace_attention",
    "visited",
    "visited_paged",
    "write_pages",
]
