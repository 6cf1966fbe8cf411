"""The architectures of GGUF files that have ALiBi, and the families of models that they become.

llama.cpp's converter names tensors alike in all architectures, lays some out otherwise, and folds
constants into others. Its Falcon has rotary positions only; its Refact is of no family here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linbias.schedules import slopes

Weights = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class Metadata:
    """What a file says of its architecture, checked as it is asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.architecture = values["general.architecture"]

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self._refuse(name, "a positive whole number", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """As it was before it became float32: 1e-05, not 9.999999747378752e-06."""
        value = self._value(name, default)
        if not isinstance(value, float):
            self._refuse(name, "a number", value)
        return float(str(np.float32(value)))

    def heads(self) -> int:
        """Heads, where each has keys and values of its own."""
        heads = self.count("attention.head_count")
        if self.count("attention.head_count_kv", heads) != heads:
            value = self._value("attention.head_count_kv", None)
            self._refuse("attention.head_count_kv", f"attention.head_count = {heads}", value)
        return heads

    def _value(self, name: str, default: float | None) -> Any:
        return self.values.get(f"{self.architecture}.{name}", default)

    def _refuse(self, name: str, rule: str, value: object) -> None:
        got = "nothing" if value is None else f"{value!r:.40}"
        raise ValueError(f"{self.architecture}.{name} must be {rule}, got {got}")


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture become a model of a family."""

    # The fields of a config.json beside those that all files have, given the tensors' shapes.
    settings: Callable[[Metadata, Shapes], dict[str, Any]]
    # Name in the file -> name in the family; {} is the number of a layer.
    names: Mapping[str, str]
    # What lies otherwise in the file, under the file's names: changed in place.
    lay_out: Callable[[Weights, Metadata], None] = lambda weights, metadata: None


_BLOOM = {
    "token_embd": "word_embeddings",
    "token_embd_norm": "word_embeddings_layernorm",
    "output_norm": "ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "h.{}.input_layernorm",
    "blk.{}.attn_qkv": "h.{}.self_attention.query_key_value",
    "blk.{}.attn_output": "h.{}.self_attention.dense",
    "blk.{}.ffn_norm": "h.{}.post_attention_layernorm",
    "blk.{}.ffn_up": "h.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "h.{}.mlp.dense_4h_to_h",
}
_MPT = {
    "token_embd": "wte",
    "output_norm": "norm_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "blocks.{}.norm_1",
    "blk.{}.attn_qkv": "blocks.{}.attn.Wqkv",
    "blk.{}.attn_q_norm": "blocks.{}.attn.q_ln",
    "blk.{}.attn_k_norm": "blocks.{}.attn.k_ln",
    "blk.{}.attn_output": "blocks.{}.attn.out_proj",
    "blk.{}.ffn_norm": "blocks.{}.norm_2",
    "blk.{}.ffn_up": "blocks.{}.ffn.up_proj",
    "blk.{}.ffn_down": "blocks.{}.ffn.down_proj",
}
_JAIS = {
    "token_embd": "wte",
    "output_norm": "ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "h.{}.ln_1",
    "blk.{}.attn_qkv": "h.{}.attn.c_attn",
    "blk.{}.attn_output": "h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "h.{}.ln_2",
    "blk.{}.ffn_up": "h.{}.mlp.c_fc",
    "blk.{}.ffn_gate": "h.{}.mlp.c_fc2",
    "blk.{}.ffn_down": "h.{}.mlp.c_proj",
}
_BAICHUAN = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    "blk.{}.attn_qkv": "layers.{}.self_attn.W_pack",
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blk.{}.ffn_up": "layers.{}.mlp.up_proj",
    "blk.{}.ffn_gate": "layers.{}.mlp.gate_proj",
    "blk.{}.ffn_down": "layers.{}.mlp.down_proj",
}
_JINA = {
    "token_embd": "embeddings.words",
    "token_types": "embeddings.types",
    "token_embd_norm": "embeddings.norm",
    "blk.{}.attn_qkv": "layers.{}.attention.qkv",
    "blk.{}.attn_q_norm": "layers.{}.attention.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.attention.k_norm",
    "blk.{}.attn_output": "layers.{}.attention.out",
    "blk.{}.attn_output_norm": "layers.{}.attention_norm",
    "blk.{}.attn_norm_2": "layers.{}.residual_norm",
    "blk.{}.ffn_up": "layers.{}.feed_forward.gated",
    "blk.{}.ffn_down": "layers.{}.feed_forward.out",
    "blk.{}.layer_output_norm": "layers.{}.feed_forward_norm",
}


def _join(weights: Weights, parts: tuple[str, ...], whole: str) -> None:
    """Make one tensor of those of each layer, weights and biases, where all are there."""
    for first in [name for name in weights if f".{parts[0]}." in name]:
        names = [first.replace(f".{parts[0]}.", f".{part}.") for part in parts]
        if all(name in weights for name in names):
            joined = torch.cat([weights.pop(name) for name in names])
            weights[first.replace(f".{parts[0]}.", f".{whole}.")] = joined


def _bloom(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "hidden_size": metadata.count("embedding_length"),
        "n_layer": metadata.count("block_count"),
        "n_head": metadata.heads(),
        "seq_length": metadata.count("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


def _lay_out_bloom(weights: Weights, metadata: Metadata) -> None:
    """All queries, keys and values in the file; in the family those of one head after another."""
    for name, tensor in weights.items():
        if ".attn_qkv." in name:
            by_kind = tensor.unflatten(0, (3, metadata.heads(), -1))
            weights[name] = by_kind.transpose(0, 1).flatten(0, 2)


def _mpt(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    width, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    shared = metadata.count("attention.head_count_kv", heads)
    max_bias = metadata.number("attention.max_alibi_bias", 0.0)
    clip = metadata.number("attention.clamp_kqv", 0.0)
    attention: dict[str, Any] = {
        "alibi": max_bias > 0,
        "alibi_bias_max": _whole(max_bias) or 8,
        "clip_qkv": clip or None,
        "qk_ln": "blk.0.attn_q_norm.weight" in shapes,
    }
    if shared != heads:
        attention |= {"attn_type": "grouped_query_attention", "kv_n_heads": shared}
    return {
        "model_type": "mpt",
        "d_model": width,
        "n_layers": metadata.count("block_count"),
        "n_heads": heads,
        "expansion_ratio": _whole(metadata.count("feed_forward_length") / width),
        "max_seq_len": metadata.count("context_length"),
        "no_bias": "blk.0.attn_norm.bias" not in shapes,
        "norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "attn_config": attention,
    }


def _whole(value: float) -> float:
    """An integer where it is one, as Transformers asks for it."""
    return int(value) if value == int(value) else value


def _jais(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "jais",
        "n_embd": metadata.count("embedding_length"),
        "n_layer": metadata.count("block_count"),
        "n_head": metadata.heads(),
        "n_inner": metadata.count("feed_forward_length"),
        "n_positions": metadata.count("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "mup_scale_qk_dot_by_d": True,  # the other scales are in the weights of a file
        "tie_word_embeddings": False,
    }


def _lay_out_jais(weights: Weights, metadata: Metadata) -> None:
    for name, tensor in weights.items():
        if name.startswith("blk.") and tensor.dim() == 2:
            weights[name] = tensor.T
    stored = slopes(metadata.heads(), max_bias=metadata.number("attention.max_alibi_bias"))
    weights["relative_pe.slopes"] = torch.tensor(stored, dtype=torch.float32)[:, None]


def _baichuan(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    if metadata.count("block_count") != 40:
        rule = "40, as in the models with ALiBi"
        raise ValueError(
            f"baichuan.block_count must be {rule}, got {metadata.count('block_count')}"
        )
    return {
        "model_type": "baichuan",
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": metadata.heads(),
        "intermediate_size": metadata.count("feed_forward_length"),
        "model_max_length": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": False,
    }


def _lay_out_baichuan(weights: Weights, metadata: Metadata) -> None:
    """One projection. Queries and keys are shuffled alike, which their products do not see."""
    _join(weights, ("attn_q", "attn_k", "attn_v"), "attn_qkv")


def _jina(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    is_code = _is_code(shapes)
    return {
        "model_type": "linbias_bert",
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": metadata.heads(),
        "intermediate_size": metadata.count("feed_forward_length"),
        "type_vocab_size": shapes.get("token_types.weight", (2,))[0],
        "gate_first": not is_code,
        "query_key_norm": is_code,
        "residual_norm": is_code,
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": True,
    }


def _is_code(names: Shapes | Weights) -> bool:
    """Whether a file is of jina-embeddings-v2-base-code, by its norms of queries."""
    return "blk.0.attn_q_norm.weight" in names


def _lay_out_jina(weights: Weights, metadata: Metadata) -> None:
    """Projections that are apart become one; newer files have both parts of the gate in one.

    Then they lie as in the original folder. llama.cpp activates the first even where, in `-code`,
    that is the second.
    """
    _join(weights, ("attn_q", "attn_k", "attn_v"), "attn_qkv")
    gate, up = "ffn_gate", "ffn_up"
    _join(weights, (up, gate) if _is_code(weights) else (gate, up), up)


ARCHITECTURES = {
    "bloom": Architecture(_bloom, _BLOOM, _lay_out_bloom),
    "mpt": Architecture(_mpt, _MPT),
    "jais": Architecture(_jais, _JAIS, _lay_out_jais),
    "baichuan": Architecture(_baichuan, _BAICHUAN, _lay_out_baichuan),
    "jina-bert-v2": Architecture(_jina, _JINA, _lay_out_jina),
}
