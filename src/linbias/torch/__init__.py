"""PyTorch front end: `attention`, `attention_varlen` and the module `MultiheadAttention`."""

from linbias.torch.functional import attention
from linbias.torch.nn import MultiheadAttention
from linbias.torch.varlen import attention_varlen

__all__ = ["MultiheadAttention", "attention", "attention_varlen"]
