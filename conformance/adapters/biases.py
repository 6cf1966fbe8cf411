"""Those who make the bias alone, or whose formula is known and whose kernels do not run here.

NumPy does the rest. What they import stands in their functions, since each is there in an
environment of its own only.
"""

import os
import sys
import types
from types import SimpleNamespace

import numpy as np

import linbias
from adapters import parts

BIAS, FORMULA = "its bias; attention in NumPy", "formula as published; attention in NumPy"


def around(build, own=None, causal_only=False):
    """Attention around what build(q, k, causal, max_bias) gives; `own` is its schedule."""

    def attention(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
        if causal_only:
            parts.one_sided(causal)
        parts.only(slopes, schedule, max_bias, q.shape[1], own)
        return parts.attend(q, k, v, np.asarray(build(q, k, causal, max_bias)), scale, causal)

    return attention


def bias(name, package, runs=BIAS, conventions=None, **options):
    """Make an adapter of what builds a bias."""
    say = parts.described(name, package, runs, conventions)
    return lambda build: say(around(build, **options))


@parts.described("AXLearn", "axlearn", "its bias and masks (PyTorch); attention in NumPy")
@parts.square
def axlearn(
    q,
    k,
    v,
    *,
    slopes,
    causal,
    scale,
    segments=None,
    key_range=None,
    schedule="paper",
    max_bias=8.0,
):
    """ALiBiAttentionLogitBiasLayer as its PyTorch adapter has it."""
    import torch

    theirs = parts.file_of("axlearn", "axlearn/common/adapter_torch.py")
    parts.one_sided(causal)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    real, positions = parts.padding_mask(k, key_range), torch.arange(k.shape[2])[None]
    segments = real if segments is None else segments + 1  # 0 is padding there
    where = {"segment_ids": torch.tensor(segments), "positions": positions.expand(len(q), -1)}
    made = theirs.ALiBiAttentionLogitBiasLayer(q.shape[1])(**where).numpy()
    return parts.attend(q, k, v, np.where(made < -1e8, -np.inf, made), scale, False)


@bias("curated-transformers", "curated-transformers")
def curated_transformers(q, k, causal, max_bias):
    import torch
    from curated_transformers.layers.attention import AttentionLinearBiases

    (B, H, T, _), S = q.shape, k.shape[2]
    if not causal and T != S:
        raise NotImplementedError("as many queries as keys on both sides")
    build = AttentionLinearBiases(n_attention_heads=H, is_causal=causal, is_inverted=False)
    return build(attention_scores=torch.zeros(B, H, T, S))


@parts.described(
    "flash-attn 2", None, FORMULA, {"lse": "softmax_lse counts the bias from key 0 where causal"}
)
def flash_attn(q, k, v, *, slopes, causal, scale, return_lse=False):
    """Its kernels need CUDA. With causal=True they add slope * key index, and otherwise
    -slope * |i + S - T - j|; softmax_lse is of these scores.
    """
    (_, H, T, _), S = q.shape, k.shape[2]
    slopes, keys = slopes.reshape(-1, H, 1, 1), np.arange(S)
    made = slopes * keys if causal else -slopes * np.abs(np.arange(T)[:, None] + S - T - keys)
    out = parts.attend(q, k, v, made, scale, causal)
    if not return_lse:
        return out
    scores = scale * q.astype(float) @ k.swapaxes(-1, -2) + made
    if causal:
        scores = np.where(keys > np.arange(T)[:, None] + S - T, -np.inf, scores)
    return out, np.logaddexp.reduce(scores, -1)


@bias("FlashInfer", None, FORMULA)
def flashinfer(q, k, causal, max_bias):
    """Its kernels need CUDA: slope * (key - query)."""
    parts.enough_keys(q, k)
    distance = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
    return linbias.slopes(q.shape[1])[:, None, None] * distance


@parts.described("jaketae/alibi", None, FORMULA)
@parts.square
def jaketae_alibi(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    """Others refer to it. It divides by the root of the whole width."""
    parts.equal_heads(q, k)
    H, S = q.shape[1], k.shape[2]
    parts.only(slopes, schedule, max_bias, H, "geometric")
    distance = np.arange(S) - np.arange(S)[:, None]
    made = linbias.slopes(H, "geometric")[:, None, None] * distance
    return parts.attend(q, k, v, made, (H * q.shape[3]) ** -0.5, causal)


@bias("keras-hub", "keras-hub", own="mpt", causal_only=True)
def keras_hub(q, k, causal, max_bias):
    """The layer AlibiBias on PyTorch."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras_hub
    import torch

    scores = torch.zeros(*q.shape[:3], k.shape[2])
    return keras_hub.layers.AlibiBias(alibi_bias_max=int(max_bias))(scores).detach().cpu()


@bias("MLX", "mlx")
def mlx(q, k, causal, max_bias):
    """nn.ALiBi, on the CPU."""
    import mlx.core as mx
    import mlx.nn as nn

    parts.enough_keys(q, k)
    (*batch, T, _), S = q.shape, k.shape[2]
    return nn.ALiBi()(mx.zeros((*batch, T, S)), offset=S - T)


@bias("MosaicML Composer", "mosaicml")
def mosaicml_composer(q, k, causal, max_bias):
    """What its ALiBi algorithm gives to GPT-2 (causal) and BERT (both sides)."""
    import torch

    path = "composer/algorithms/alibi/attention_surgery_functions/utils.py"
    T, S = q.shape[2], k.shape[2]
    if T > S or (not causal and T != S):
        raise NotImplementedError("no more queries than keys; as many on both sides")
    theirs = parts.file_of("mosaicml", path)
    return theirs.register_alibi(torch.nn.Linear(1, 1), q.shape[1], S, causal).alibi


@bias("OLMo", "ai2-olmo", BIAS, parts.GEOMETRIC, own="geometric", causal_only=True)
def olmo(q, k, causal, max_bias):
    """An option of OLMo; its released models are trained without."""
    import torch
    from olmo.model import alibi_attention_bias

    parts.enough_keys(q, k)
    (_, H, T, _), S = q.shape, k.shape[2]
    config = SimpleNamespace(n_heads=H, alibi_bias_max=max_bias)
    return alibi_attention_bias(S, config, torch.device("cpu"))[:, :, S - T :]


@parts.described("the paper's fairseq", None, FORMULA)
@parts.square
def paper_fairseq(q, k, v, *, slopes, causal, scale, schedule="paper", max_bias=8.0):
    """The paper's own code, a fork of fairseq: slope * key index in a causal mask, in float32."""
    parts.one_sided(causal)
    parts.equal_heads(q, k)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    made = linbias.slopes(q.shape[1])[:, None, None] * np.arange(k.shape[2])
    return parts.attend(q, k, v, made.astype(np.float32), scale, causal)


@parts.described("TransformerLens", "transformer-lens", BIAS)
def transformer_lens(
    q, k, v, *, slopes, causal, scale, key_range=None, schedule="paper", max_bias=8.0
):
    """For its BLOOM and Falcon."""
    import torch

    path = "transformer_lens/model_bridge/generalized_components/alibi_utils.py"
    parts.one_sided(causal)
    parts.only(slopes, schedule, max_bias, q.shape[1])
    build = parts.file_of("transformer-lens", path).build_alibi_tensor
    mask = parts.padding_mask(k, key_range)
    made = build(torch.tensor(mask), q.shape[1], torch.float32).numpy()
    return parts.attend(q, k, v, made, scale, causal, ~mask.astype(bool)[:, None, None])


@parts.described("x-transformers", "x-transformers", BIAS)
def x_transformers(
    q, k, v, *, slopes, causal, scale, query_start=None, schedule="paper", max_bias=8.0
):
    import torch
    from x_transformers.x_transformers import AlibiPositionalBias

    (B, H, T, _), S = q.shape, k.shape[2]
    if slopes is not None and slopes.ndim == 2:
        raise NotImplementedError("one list of slopes")
    if slopes is None:
        parts.only(slopes, schedule, max_bias, H)
    build = AlibiPositionalBias(heads=H, slopes=None if slopes is None else slopes.tolist())
    parts.enough_keys(q, k)
    if query_start is None:
        return parts.attend(q, k, v, build(T, S), scale, causal)
    if B > 1:
        raise NotImplementedError("the adapter places one row")
    positions = torch.arange(T) + int(query_start[0])
    hidden = causal & (torch.arange(S) > positions[:, None]).numpy()
    made = build.forward_custom_pos(positions, torch.arange(S))
    return parts.attend(q, k, v, made, scale, False, hidden)


@bias("zetascale, nn.biases", "zetascale")
def zeta(q, k, causal, max_bias):
    # What its file imports from its package, without everything that the package imports.
    for name in ("zeta", "zeta.nn", "zeta.nn.biases"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["zeta.nn.biases.base"] = parts.file_of("zetascale", "zeta/nn/biases/base.py")
    theirs = parts.file_of("zetascale", "zeta/nn/biases/alibi.py")
    build = theirs.AlibiPositionalBias(heads=q.shape[1], num_heads=q.shape[1])
    return build(q.shape[2], k.shape[2])


ASKED_FIRST = "its bias, asked for all queries first; attention in NumPy"


@bias("zetascale, Transformer", "zetascale", ASKED_FIRST)
def zeta_transformer(q, k, causal, max_bias):
    """The other AlibiPositionalBias of zetascale; a layer that has seen a whole text before."""
    parts.enough_keys(q, k)
    theirs = parts.file_of("zetascale", "zeta/structs/transformer.py")
    build = theirs.AlibiPositionalBias(q.shape[1], q.shape[1])
    build(k.shape[2], k.shape[2])
    return build(q.shape[2], k.shape[2])
