"""PyTorch front end: `attention`, `attention_varlen` and the module `MultiheadAttention`."""

from linbias.torch.functional import attention, attention_varlen
from linbias.torch.nn import MultiheadAttention

__all__ = ["MultiheadAttention", "attention", "attention_varlen"]
