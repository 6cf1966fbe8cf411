"""labml-nn: AlibiMultiHeadAttention, its projections answered with q, k and v."""

import torch
from labml_nn.transformers.alibi import AlibiMultiHeadAttention

from adapters import parts

NAME, PACKAGE, RUNS = "labml-nn", "labml-nn", "its attention, in float32"


@parts.square
def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    (B, H, T, D), S = q.shape, k.shape[2]
    parts.only(slopes, schedule, max_bias, H)
    layer = AlibiMultiHeadAttention(H, H * D, dropout_prob=0.0).eval()
    for name, x in (("query", q), ("key", k), ("value", v)):
        x = torch.tensor(x).permute(2, 0, 1, 3)  # [T, B, H, D]
        setattr(layer, name, parts.Answer(lambda _, x=x: x))
    layer.output = torch.nn.Identity()
    x = torch.zeros(T, B, H * D)
    with torch.no_grad():
        out = layer(query=x, key=x, value=x, mask=torch.ones(T, S).tril()[:, :, None])
    return out.reshape(T, B, H, D).permute(1, 2, 0, 3).numpy()
