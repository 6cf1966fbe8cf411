"""Transformers: a BLOOM model of one layer, with its own masks and cache."""

from transformers import BloomConfig, BloomModel

from adapters import parts

NAME, PACKAGE = "Transformers, BLOOM", "transformers"
RUNS = "the model's attention, masks and cache"
DTYPES = ("float32", "bfloat16")


def attention(
    q, k, v, *, slopes, causal, scale, dtype, key_range=None, schedule="paper", max_bias=8.0
):
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    (_, H, _, D) = q.shape
    parts.only(slopes, schedule, max_bias, H)
    parts.enough_keys(q, k)
    model = BloomModel(BloomConfig(hidden_size=H * D, n_layer=1, n_head=H, vocab_size=8))
    names = (model.h[0].self_attention, "query_key_value", "dense", parts.fuse_by_head)
    return parts.through(model, *names, q, k, v, key_range, dtype)
