"""ALiBi, attention with linear biases: the definition in NumPy.

The front ends are submodules that load their framework only when imported: `linbias.torch`, `linbias.jax`,
`linbias.models`.
"""

from linbias.bias import bias, distances
from linbias.reference import Explanation, attention, attention_backward, explain
from linbias.schedules import slopes

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "attention",
    "attention_backward",
    "bias",
    "distances",
    "explain",
    "slopes",
]
