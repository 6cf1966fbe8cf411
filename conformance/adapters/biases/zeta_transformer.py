"""zetascale: the other AlibiPositionalBias, that of its Transformer; a layer that has seen a whole
text before.
"""

from adapters import parts

NAME, PACKAGE = "zetascale, Transformer", "zetascale"
RUNS = "its bias, asked for all queries first; attention in NumPy"
theirs = parts.file_of("zetascale", "zeta/structs/transformer.py")


def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    (_, H, T, _), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    parts.enough_keys(q, k)
    build = theirs.AlibiPositionalBias(H, H)
    build(S, S)
    return parts.attend(q, k, v, build(T, S).numpy(), scale, causal)
