"""GGUF files of small models, written as llama.cpp reads them, with weights that never change."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCAB, WIDTH, HEADS, INNER, LAYERS = 37, 96, 6, 64, 2
TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMATS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}

Metadata = dict[str, Any]
Tensors = dict[str, Tensor]


def write(path: Path, metadata: Metadata, tensors: Tensors, matrices: str = "F32") -> Path:
    """Matrices of layers, of the embedding and of the output have a type, all else is F32."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        header += _string(name) + _value(value)
    data = b""
    for name, tensor in tensors.items():
        kind = matrices if tensor.dim() == 2 and name != "token_types.weight" else "F32"
        header += _string(name) + struct.pack("<I", tensor.dim())
        header += struct.pack(f"<{tensor.dim()}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", TYPES[kind], len(data))
        data += _padded(_numbers(tensor, kind))
    path.write_bytes(_padded(header) + data)
    return path


def rounded(tensor: Tensor, matrices: str) -> Tensor:
    """What is left of a matrix that is stored in a type, in float32."""
    if matrices != "Q8_0":
        return tensor.to(_FLOATS[matrices]).float()
    scale, numbers = _blocks(tensor)
    return (scale.float() * numbers).reshape(tensor.shape)


def _blocks(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [N, 1] in float16 and whole numbers [N, 32], of 32 numbers each."""
    blocks = tensor.reshape(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return scale.half(), (blocks / scale).round()


def _numbers(tensor: Tensor, kind: str) -> bytes:
    if kind != "Q8_0":
        return tensor.to(_FLOATS[kind]).contiguous().view(torch.uint8).numpy().tobytes()
    scale, numbers = _blocks(tensor)
    return torch.cat([scale.view(torch.int8), numbers.to(torch.int8)], -1).numpy().tobytes()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        texts = isinstance(value[0], str)
        parts = [_string(one) if texts else struct.pack("<i", one) for one in value]
        return struct.pack("<IIQ", 9, 8 if texts else 5, len(value)) + b"".join(parts)
    number, form = _FORMATS[type(value)]
    return struct.pack("<I" + form, number, value)


# The tensors of a layer: rows and columns of matrices, whose biases and norms are as long as rows.
_ATTENTION = {"attn_qkv": (3 * WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH)}
_APART = {name: (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
_GATED = {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
_WIDE = {"ffn_up": (4 * WIDTH, WIDTH), "ffn_down": (WIDTH, 4 * WIDTH)}
_NORMS = ("attn_norm", "ffn_norm")
_SHARED = {"attn_qkv": (WIDTH + 2 * 2 * WIDTH // HEADS, WIDTH), "attn_output": (WIDTH, WIDTH)}
# Matrices, norms, which parts have a bias, what lies around the layers, and metadata.
MODELS: dict[str, tuple[dict[str, tuple[int, int]], tuple[str, ...], str, str, Metadata]] = {
    "bloom": (_ATTENTION | _WIDE, _NORMS, ".", "token_embd_norm output_norm", {}),
    "mpt": (
        _ATTENTION | _WIDE,
        _NORMS,
        "none",
        "output_norm",
        {"max_alibi_bias": 16.0, "clamp_kqv": 2.5},
    ),
    "mpt-grouped": (
        _SHARED | _WIDE,
        _NORMS,
        ".",
        "output_norm output",
        {"max_alibi_bias": 8.0, "head_count_kv": 2},
    ),
    "jais": (_ATTENTION | _GATED, _NORMS, ".", "output_norm output", {"max_alibi_bias": 6.0}),
    "baichuan": (_APART | _GATED, _NORMS, "none", "output_norm output", {}),
    "jina-bert-v2": (
        _APART | _GATED,
        ("attn_output_norm", "layer_output_norm"),
        "attn norm ffn_down",
        "token_embd_norm token_types",
        {"causal": False},
    ),
    "jina-bert-v2-code": (
        _APART | _GATED,
        ("attn_q_norm", "attn_k_norm", "attn_output_norm", "attn_norm_2", "layer_output_norm"),
        "attn norm ffn_down",
        "token_embd_norm token_types",
        {"causal": False},
    ),
}


def model(name: str, **changes: Any) -> tuple[Metadata, Tensors]:
    """Metadata and tensors of a model, with other metadata where asked for."""
    matrices, norms, with_bias, around, special = MODELS[name]
    kind = name.removesuffix("-code").removesuffix("-grouped")
    layers = 40 if kind == "baichuan" else LAYERS  # by which llama.cpp tells that it has ALiBi
    special = {"head_count": HEADS, "head_count_kv": HEADS, **special}
    eps = ("layer_norm_rms_epsilon", 1e-6) if kind == "baichuan" else ("layer_norm_epsilon", 1e-5)
    metadata = {
        "general.architecture": kind,
        f"{kind}.context_length": 64,
        f"{kind}.embedding_length": WIDTH,
        f"{kind}.block_count": layers,
        f"{kind}.feed_forward_length": matrices["ffn_down"][1],
        f"{kind}.rope.dimension_count": WIDTH // HEADS,
        f"{kind}.vocab_size": VOCAB,
        **{f"{kind}.attention.{key}": value for key, value in (dict([eps]) | special).items()},
        "tokenizer.ggml.model": "no_vocab",
    }
    if kind.startswith("jina"):
        metadata |= {f"{kind}.pooling_type": 0, "tokenizer.ggml.token_type_count": 2}
    metadata |= {key: value for key, value in changes.items() if value is not None}
    draw = np.random.RandomState(len(name))  # whose numbers are the same in every version

    def numbers(rows: int, columns: int | None = None) -> Tensor:
        shape = (rows,) if columns is None else (rows, columns)
        return torch.tensor(draw.standard_normal(shape), dtype=torch.float32)

    tensors = {"token_embd.weight": numbers(VOCAB, WIDTH)}

    def add_norm(name: str, has_bias: bool) -> None:
        tensors[f"{name}.weight"] = 1 + 0.3 * numbers(WIDTH)
        if has_bias:
            tensors[f"{name}.bias"] = 0.3 * numbers(WIDTH)

    def has_bias(part: str) -> bool:
        return with_bias == "." or any(word in part for word in with_bias.split())

    for part in around.split():
        if part in ("output", "token_types"):
            rows = VOCAB if part == "output" else 2
            tensors[f"{part}.weight"] = numbers(rows, WIDTH) * (0.1 if part == "output" else 1.0)
        else:
            add_norm(part, has_bias("norm"))
    for layer in range(layers):
        for part, (rows, columns) in matrices.items():
            tensors[f"blk.{layer}.{part}.weight"] = 0.15 * numbers(rows, columns)
            if has_bias(part):
                tensors[f"blk.{layer}.{part}.bias"] = 0.3 * numbers(rows)
        for part in norms:
            add_norm(f"blk.{layer}.{part}", has_bias("norm"))
    return metadata, tensors
