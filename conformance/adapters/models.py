"""Models of Transformers of one layer each, with their own masks and cache."""

import torch
from transformers import BloomConfig, BloomModel, FalconConfig, FalconModel, MptConfig, MptModel
from transformers.models.falcon import modeling_falcon

from adapters import parts

WHOLE = "the model's attention, masks and cache"
DIVIDED = f"{WHOLE}; its bias times sqrt(D)"


def adapter(name, build, own=None, runs=WHOLE):
    """Of a model that build(H, D, scale, max_bias) gives, with how its layer is reached; `own` is
    its schedule.
    """
    usual = own or "paper"

    def attention(
        q, k, v, *, slopes, causal, scale, dtype, key_range=None, schedule=usual, max_bias=8.0
    ):
        parts.one_sided(causal)
        parts.equal_heads(q, k)
        (_, H, _, D) = q.shape
        parts.only(slopes, schedule, max_bias, H, own)
        parts.enough_keys(q, k)
        return parts.through(*build(H, D, scale, max_bias), q, k, v, key_range, dtype)

    return parts.described(name, "transformers", runs, dtypes=("float32", "bfloat16"))(attention)


def bloom(H, D, scale, max_bias):
    model = BloomModel(BloomConfig(hidden_size=H * D, n_layer=1, n_head=H, vocab_size=8))
    return model, model.h[0].self_attention, "query_key_value", "dense", parts.fuse_by_head


build_tensor = modeling_falcon.build_alibi_tensor


def falcon(implementation):
    """Falcon divides the bias by sqrt(D), which its checkpoints are trained with: here it is
    multiplied back, so that rows say what else is different.
    """

    def build(H, D, scale, max_bias):
        sizes = {"hidden_size": H * D, "num_hidden_layers": 1, "num_attention_heads": H}
        kind = {"alibi": True, "multi_query": False, "new_decoder_architecture": False}
        config = FalconConfig(**sizes, **kind, vocab_size=8, attn_implementation=implementation)
        modeling_falcon.build_alibi_tensor = lambda *args, **kw: build_tensor(*args, **kw) / scale
        model = FalconModel(config)
        return model, model.h[0].self_attention, "query_key_value", "dense", parts.fuse_by_head

    return build


def mpt(H, D, scale, max_bias):
    biases = {"alibi": True, "alibi_bias_max": int(max_bias)}  # max_seq_len is 2,048
    config = MptConfig(d_model=H * D, n_layers=1, n_heads=H, vocab_size=8, attn_config=biases)
    model = MptModel(config)

    def fuse(*qkv):  # [B, T, 3 * H * D]
        return torch.cat([x.transpose(1, 2).flatten(2) for x in qkv], 2)

    return model, model.blocks[0].attn, "Wqkv", "out_proj", fuse


transformers_bloom = adapter("Transformers, BLOOM", bloom)
transformers_mpt = adapter("Transformers, MPT", mpt, own="mpt")
transformers_falcon, transformers_falcon_sdpa = (
    adapter(f"Transformers, Falcon ({name})", falcon(name), runs=DIVIDED)
    for name in ("eager", "sdpa")
)
