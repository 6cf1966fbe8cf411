"""The original folders of ALiBi encoders: what their configurations and names of weights mean.

| family | models | recognised by |
|---|---|---|
| mosaic | MosaicBERT, DNABERT-2 | one projection `Wqkv` per layer |
| jina | jina-embeddings-v2 | `position_embedding_type: alibi` and `mlp.gated_layers` |
| jina-code | jina-embeddings-v2-base-code | norms of queries and keys, `layer_norm_q` |

Their code lies beside the weights and is never run.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from linbias.models.encoders.bert_config import LinbiasBertConfig

_GLU = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}

# The fields of a config.json that must be there, and our names of them.
_SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "type_vocab_size", "hidden_act", "layer_norm_eps", "initializer_range"),
)
_FIELDS = dict(zip(_SAME, _SAME, strict=True)) | {
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
# Original name -> ours, within the encoder; {} is the number of a layer.
_SHARED = {
    "embeddings.word_embeddings": "embeddings.words",
    "embeddings.token_type_embeddings": "embeddings.types",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attention.out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attention_norm",
    "pooler.dense": "pooler",
}
_GATED = _SHARED | {
    "encoder.layer.{}.mlp.gated_layers": "layers.{}.feed_forward.gated",
    "encoder.layer.{}.mlp.wo": "layers.{}.feed_forward.out",
    "encoder.layer.{}.mlp.layernorm": "layers.{}.feed_forward_norm",
}
_NAMES = {
    "mosaic": _GATED | {"encoder.layer.{}.attention.self.Wqkv": "layers.{}.attention.qkv"},
    "jina": _GATED,
    "jina-code": _SHARED
    | {
        "encoder.layer.{}.attention.self.layer_norm_q": "layers.{}.attention.q_norm",
        "encoder.layer.{}.attention.self.layer_norm_k": "layers.{}.attention.k_norm",
        "encoder.layer.{}.layer_norm_1": "layers.{}.residual_norm",
        "encoder.layer.{}.layer_norm_2": "layers.{}.feed_forward_norm",
        "encoder.layer.{}.mlp.up_gated_layer": "layers.{}.feed_forward.gated",
        "encoder.layer.{}.mlp.down_layer": "layers.{}.feed_forward.out",
    },
}
# The three projections that are one of ours, in this order.
_SPLIT = "encoder.layer.{}.attention.self.%s"
_PARTS = ("query", "key", "value")

_MASKED_HEAD = {
    "cls.predictions.transform.dense": "transform",
    "cls.predictions.transform.LayerNorm": "norm",
}


def recognise(config: Mapping[str, Any], names: set[str]) -> str | None:
    """The family of a folder by its config.json and the names of its weights, or None."""
    if any(name.endswith("attention.self.Wqkv.weight") for name in names):
        return "mosaic"
    if any(name.endswith("attention.self.layer_norm_q.weight") for name in names):
        return "jina-code"
    gated = any(name.endswith("mlp.gated_layers.weight") for name in names)
    if gated and config.get("position_embedding_type") == "alibi":
        return "jina"
    return None


def read_config(config: Mapping[str, Any], family: str) -> LinbiasBertConfig:
    """Our configuration for the contents of an original config.json, or a ValueError."""
    if absent := sorted(set(_FIELDS) - set(config)):
        raise ValueError(f"config.json of a {family} model lacks {absent[0]}")
    for name in ("is_decoder", "add_cross_attention", "pruned_heads"):
        if config.get(name):
            raise ValueError(
                f"{name} of a {family} model must be absent, got {config[name]!r:.40}"
            )
    position = config.get("position_embedding_type")
    if family == "jina-code" and position != "alibi":
        raise ValueError(
            f"position_embedding_type of a {family} model must be 'alibi', got {position!r}"
        )
    fields = {ours: config[theirs] for theirs, ours in _FIELDS.items()}
    fields["train_length"] = config.get("alibi_starting_size", 512)
    kept = ("classifier_dropout", "id2label", "label2id", "problem_type", "pad_token_id")
    fields |= {name: config[name] for name in kept if name in config}
    if config.get("id2label") is None and "num_labels" in config:
        fields["num_labels"] = config["num_labels"]
    if family == "mosaic":  # hidden_act is that of its head alone: its feed-forward part has GELU
        return LinbiasBertConfig(**fields)
    kind = config.get("feed_forward_type")
    if kind not in _GLU:
        raise ValueError(
            f"feed_forward_type of a {family} model must be one of {tuple(_GLU)}, got {kind!r}"
        )
    fields["feed_forward_act"] = _GLU[kind]
    fields["head_norm_eps"] = config["layer_norm_eps"]
    if family == "jina-code":
        fields |= {"gate_first": False, "query_key_norm": True, "residual_norm": True}
    return LinbiasBertConfig(**fields)


def to_ours(weights: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """Rename original weights, `bert.` before them or not, to those of our models.

    Names that are not known stay as they are, for an error to name.
    """
    left = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    left.pop("embeddings.position_ids", None)  # a buffer that older Transformers saved
    layers = _layers(left)
    for layer in layers:
        for kind in ("weight", "bias"):
            names = [f"{_SPLIT.format(layer) % part}.{kind}" for part in _PARTS]
            if family != "mosaic" and all(name in left for name in names):
                parts = [left.pop(name) for name in names]
                left[f"encoder.layers.{layer}.attention.qkv.{kind}"] = torch.cat(parts)
    known = _known(family, layers)
    ours = {known.get(name, name): tensor for name, tensor in left.items()}
    words = ours.get("encoder.embeddings.words.weight")
    tied = ours.get("decoder.weight")
    # Without numbers, of a folder that is only looked at, they are taken to be the same.
    if tied is not None and words is not None and (tied.is_meta or torch.equal(tied, words)):
        del ours["decoder.weight"]
    return ours


def _known(family: str, layers: Iterable[int]) -> dict[str, str]:
    """Our names by the original ones without `bert.`, of all but the three projections."""
    encoder = {
        theirs.format(layer): f"encoder.{ours.format(layer)}"
        for layer in layers
        for theirs, ours in _NAMES[family].items()
    }
    known = {
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in (encoder | _MASKED_HEAD).items()
        for kind in ("weight", "bias")
    }
    bias = "cls.predictions.decoder.bias" if family == "mosaic" else "cls.predictions.bias"
    return known | {"cls.predictions.decoder.weight": "decoder.weight", bias: "decoder.bias"}


def _layers(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that names of either kind speak of."""
    matches = (re.match(r"encoder\.layers?\.(\d+)\.", name) for name in names)
    return sorted({int(match[1]) for match in matches if match})
