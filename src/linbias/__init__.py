"""ALiBi, attention with linear biases: the definition in NumPy.

The front ends are submodules that load their framework only when imported: `linbias.torch`, `linbias.jax`,
`linbias.models`. The project's own idea, to read: `linbias.near_to_far`.
"""

from linbias import near_to_far
from linbias.definition import (
    attention,
    attention_backward,
    attention_weights,
    bias,
    distances,
    merge,
)
from linbias.explain import Explanation, explain
from linbias.schedules import slopes

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "attention",
    "attention_backward",
    "attention_weights",
    "bias",
    "distances",
    "explain",
    "merge",
    "near_to_far",
    "slopes",
]
