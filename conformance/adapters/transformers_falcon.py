"""Transformers: a Falcon model of one layer, `eager`.

Falcon divides the bias by sqrt(D), which its checkpoints are trained with: the adapter multiplies
it back, so that rows say what else is different.
"""

from transformers import FalconConfig, FalconModel
from transformers.models.falcon import modeling_falcon

from adapters import parts

NAME, PACKAGE = "Transformers, Falcon (eager)", "transformers"
RUNS = "the model's attention, masks and cache; its bias times sqrt(D)"
DTYPES = ("float32", "bfloat16")
build = modeling_falcon.build_alibi_tensor


def attention(
    q,
    k,
    v,
    *,
    slopes,
    causal,
    scale,
    dtype,
    key_range=None,
    schedule="paper",
    max_bias=8.0,
    implementation="eager",
):
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    (_, H, _, D) = q.shape
    parts.only(slopes, schedule, max_bias, H)
    parts.enough_keys(q, k)
    config = FalconConfig(
        hidden_size=H * D,
        num_hidden_layers=1,
        num_attention_heads=H,
        vocab_size=8,
        alibi=True,
        multi_query=False,
        new_decoder_architecture=False,
        attn_implementation=implementation,
    )
    modeling_falcon.build_alibi_tensor = lambda *args, **kw: build(*args, **kw) / scale
    model = FalconModel(config)
    names = (model.h[0].self_attention, "query_key_value", "dense", parts.fuse_by_head)
    return parts.through(model, *names, q, k, v, key_range, dtype)
