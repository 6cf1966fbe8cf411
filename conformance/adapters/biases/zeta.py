"""zetascale: AlibiPositionalBias."""

import sys
import types

from adapters import parts

NAME, PACKAGE, RUNS = "zetascale, nn.biases", "zetascale", "its bias; attention in NumPy"
# What its file imports from its package, without everything that the package imports.
for name in ("zeta", "zeta.nn", "zeta.nn.biases"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["zeta.nn.biases.base"] = parts.file_of("zetascale", "zeta/nn/biases/base.py")
theirs = parts.file_of("zetascale", "zeta/nn/biases/alibi.py")


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    parts.only(slopes, schedule, max_bias, q.shape[1])
    build = theirs.AlibiPositionalBias(heads=q.shape[1], num_heads=q.shape[1])
    bias = build(q.shape[2], k.shape[2])
    return parts.attend(q, k, v, bias.numpy(), scale, causal)
