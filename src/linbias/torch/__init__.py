"""PyTorch front end: `attention`, packed sequences, and a layer named like PyTorch's own."""

from linbias.torch.functional import attention, attention_weights
from linbias.torch.nn import MultiheadAttention
from linbias.torch.varlen import attention_varlen

__all__ = ["MultiheadAttention", "attention", "attention_varlen", "attention_weights"]
