"""The original folders of ALiBi encoders: what their configurations mean, and how their weights are named.

| family | models | recognised by |
|---|---|---|
| mosaic | MosaicBERT, DNABERT-2 | one projection `Wqkv` per layer |
| jina | jina-embeddings-v2 (small, base, de, es, zh) | `position_embedding_type: alibi` and `mlp.gated_layers` |
| jina-code | jina-embeddings-v2-base-code | norms of queries and keys, `layer_norm_q` |

Their code lives beside the weights and is never run. Names and shapes are translated in both directions, so that
`linbias convert` writes a folder that the original code reads.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from linbias.models.encoders.bert_config import LinbiasBertConfig

FAMILIES = ("mosaic", "jina", "jina-code")

_GLU = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}

# Original name -> ours, within the encoder; {} is the number of a layer.
_SHARED = {
    "embeddings.word_embeddings": "embeddings.words",
    "embeddings.token_type_embeddings": "embeddings.types",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attention.out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attention_norm",
    "pooler.dense": "pooler",
}
_GATED_LAYERS = {
    "encoder.layer.{}.mlp.gated_layers": "layers.{}.feed_forward.gated",
    "encoder.layer.{}.mlp.wo": "layers.{}.feed_forward.out",
    "encoder.layer.{}.mlp.layernorm": "layers.{}.feed_forward_norm",
}
_NAMES = {
    "mosaic": {
        **_SHARED,
        **_GATED_LAYERS,
        "encoder.layer.{}.attention.self.Wqkv": "layers.{}.attention.qkv",
    },
    "jina": {**_SHARED, **_GATED_LAYERS},
    "jina-code": {
        **_SHARED,
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
_DECODER = "cls.predictions.decoder.weight"
_DECODER_BIAS = {
    "mosaic": "cls.predictions.decoder.bias",
    "jina": "cls.predictions.bias",
    "jina-code": "cls.predictions.bias",
}


def recognise(config: Mapping[str, Any], names: set[str]) -> str | None:
    """Tell the family of a folder by its configuration and the names of its weights; None: it is none of them."""
    if any(name.endswith("attention.self.Wqkv.weight") for name in names):
        return "mosaic"
    if any(name.endswith("attention.self.layer_norm_q.weight") for name in names):
        return "jina-code"
    gated = any(name.endswith("mlp.gated_layers.weight") for name in names)
    if gated and config.get("position_embedding_type") == "alibi":
        return "jina"
    return None


def read_config(config: Mapping[str, Any], family: str) -> LinbiasBertConfig:
    """Translate an original configuration.

    Args:
        config: As its config.json says.
        family: As `recognise` told.

    Raises:
        ValueError: A field is missing or asks for what the original models do not have.
    """
    wanted = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "type_vocab_size": "type_vocab_size",
        "hidden_act": "hidden_act",
        "layer_norm_eps": "layer_norm_eps",
        "initializer_range": "initializer_range",
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }
    if absent := sorted(set(wanted) - set(config)):
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
    fields = {ours: config[theirs] for theirs, ours in wanted.items()}
    fields["train_length"] = config.get("alibi_starting_size", 512)
    kept = ("classifier_dropout", "id2label", "label2id", "problem_type", "pad_token_id")
    fields |= {name: config[name] for name in kept if name in config}
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
    """Rename original weights to those of `LinbiasBertModel` ("encoder." before each) and its heads.

    Names that are not known stay as they are, for an error to name.

    Args:
        weights: The original ones; `bert.` before a name is optional, as in the released folders.
        family: As `recognise` told.
    """
    found = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    found.pop(
        "embeddings.position_ids", None
    )  # a buffer that older versions of Transformers saved
    layers = _layers(found)
    for layer in layers:
        for kind in ("weight", "bias"):
            names = [f"{_SPLIT.format(layer) % part}.{kind}" for part in _PARTS]
            if family != "mosaic" and all(name in found for name in names):
                parts = [found.pop(name) for name in names]
                found[f"encoder.layers.{layer}.attention.qkv.{kind}"] = torch.cat(parts)
    known = _known(family, layers)
    ours = {known.get(name, name): tensor for name, tensor in found.items()}
    words = ours.get("encoder.embeddings.words.weight")
    tied = ours.get("decoder.weight")
    # Without numbers, of a folder that is only looked at, they are taken to be the same.
    if tied is not None and words is not None and (tied.is_meta or torch.equal(tied, words)):
        del ours["decoder.weight"]
    return ours


def _known(family: str, layers: Iterable[int]) -> dict[str, str]:
    """Our names by the original ones without `bert.`, of all tensors but those of the three projections."""
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
    return known | {_DECODER: "decoder.weight", _DECODER_BIAS[family]: "decoder.bias"}


def to_original(weights: Mapping[str, Tensor], family: str, prefix: str) -> dict[str, Tensor]:
    """Undo `to_ours`.

    Args:
        weights: Of `LinbiasBertModel` or one of its heads, "encoder." before those of the encoder.
        family: Whose names to give.
        prefix: Before the names of the encoder: "bert." or nothing, as the original folder has it.
    """
    back = {ours: theirs for theirs, ours in _known(family, _layers(weights)).items()}
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        split = re.fullmatch(r"encoder\.layers\.(\d+)\.attention\.qkv\.(\w+)", name)
        if split and family != "mosaic":
            for part, rows in zip(_PARTS, tensor.chunk(3), strict=True):
                theirs[f"{prefix}{_SPLIT.format(split[1]) % part}.{split[2]}"] = rows.contiguous()
        elif name.startswith("encoder."):
            theirs[prefix + back[name]] = tensor
        elif name != "decoder.weight":  # which is the embedding
            theirs[back.get(name, name)] = tensor
    return theirs


def _layers(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that names of either kind speak of."""
    numbers = {
        int(found[1]) for name in names if (found := re.match(r"encoder\.layers?\.(\d+)\.", name))
    }
    return sorted(numbers)
