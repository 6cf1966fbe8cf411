"""The original's side of the tests: checkpoints in its format, and its forward pass in NumPy.

`golden/paper_checkpoint_*` was trained for 300 updates by the paper's repository on WikiText-2 cut
to 1,024 types, each tied tensor kept once; `golden/paper_log_probs.npz` holds 300 ids, and the
log-probabilities that the repository gives them in blocks of 64, 128 and 300.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "golden" / "fairseq"


def golden_record() -> dict[str, Any]:
    """Checkpoint C, as the original would have saved it."""
    files = sorted(GOLDEN.glob("paper_checkpoint_*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    cfg = json.loads((GOLDEN / "paper_checkpoint.json").read_text())
    return {"args": None, "cfg": cfg, "model": _twice(tensors)}


def random_record(
    *,
    width: int = 24,
    layers: int = 2,
    heads: int = 3,
    vocab_size: int = 83,
    cutoffs: Sequence[int] = (11, 30),
    factor: float = 2.0,
    final_norm: bool = False,
) -> dict[str, Any]:
    """A checkpoint of random tensors, each so large that leaving it out would show."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float = 0.5) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {}
    for band, (start, stop) in enumerate(pairwise((0, *cutoffs, vocab_size))):
        narrow = int(width // factor**band)
        name = f"decoder.embed_tokens.embeddings.{band}"
        tensors[f"{name}.0.weight"] = draw(stop - start, narrow)
        tensors[f"{name}.1.weight"] = draw(width, narrow, scale=0.3)
    norms = [f"layers.{layer}.{part}" for layer in range(layers) for part in _NORMS]
    for name in norms + ["layer_norm"] * final_norm:
        tensors[f"decoder.{name}.weight"] = 1 + draw(width, scale=0.2)
        tensors[f"decoder.{name}.bias"] = draw(width, scale=0.2)
    for layer in range(layers):
        shapes = {f"self_attn.{part}_proj": (width, width) for part in ("k", "v", "q", "out")}
        shapes |= {"fc1": (2 * width + 2, width), "fc2": (width, 2 * width + 2)}
        for part, shape in shapes.items():
            tensors[f"decoder.layers.{layer}.{part}.weight"] = draw(*shape, scale=0.3)
            tensors[f"decoder.layers.{layer}.{part}.bias"] = draw(shape[0], scale=0.2)
    name = "decoder.adaptive_softmax.head.class_proj.weight"
    tensors[name] = draw(len(cutoffs), width)

    record = golden_record()
    written = ",".join(map(str, cutoffs or [vocab_size]))
    record["cfg"]["model"] |= {
        "decoder_embed_dim": width,
        "decoder_input_dim": width,
        "decoder_output_dim": width,
        "decoder_ffn_embed_dim": 2 * width + 2,
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        "no_decoder_final_norm": not final_norm,
        "adaptive_input_cutoff": written,
        "adaptive_softmax_cutoff": written,
        "adaptive_input_factor": factor,
        "adaptive_softmax_factor": factor,
    }
    return {**record, "model": _twice(tensors)}


_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def _twice(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the tied names, and what the original saves without meaning it."""
    softmax = "decoder.adaptive_softmax"
    tied = {
        f"{softmax}.head.word_proj.weight": tensors["decoder.embed_tokens.embeddings.0.0.weight"]
    }
    for band in range(1, len(tensors)):
        for ours, theirs in ((0, 2), (1, 0)):
            name = f"decoder.embed_tokens.embeddings.{band}.{ours}.weight"
            if name in tensors:
                tied[f"{softmax}.tail.{band - 1}.{theirs}.weight"] = tensors[name]
    noise = {
        f"decoder.{part}._float_tensor": torch.tensor([float("nan")])
        for part in ("embed_tokens", "embed_positions", "adaptive_softmax.head")
    }
    versions = {
        "decoder.version": torch.tensor([3.0]),
        f"{softmax}.version": torch.tensor([1]),
    }
    return {**tensors, **tied, **noise, **versions}


def forward(
    record: dict[str, Any], inputs: np.ndarray, position: str = "alibi"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features [T, width] and log-probabilities [T, vocab_size] of one block."""
    weights = {name: t.double().numpy() for name, t in record["model"].items()}
    settings = record["cfg"]["model"]
    hidden = _embed(weights, inputs) * settings["decoder_embed_dim"] ** 0.5
    if position == "sinusoidal":
        hidden = hidden + _sinusoids(*hidden.shape)
    for layer in range(settings["decoder_layers"]):
        get = {
            name.removeprefix(f"decoder.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        heads = settings["decoder_attention_heads"]
        normed = _norm(hidden, get, "self_attn_layer_norm")
        hidden = hidden + _attend(normed, get, heads, position == "alibi")
        wide = np.maximum(_affine(_norm(hidden, get, "final_layer_norm"), get, "fc1"), 0)
        hidden = hidden + _affine(wide, get, "fc2")
    if not settings["no_decoder_final_norm"]:
        hidden = _norm(hidden, weights, "decoder.layer_norm")
    return hidden, _softmax_tree(weights, hidden)


def _embed(weights: dict[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
    table = "decoder.embed_tokens.embeddings"
    bands = sum(name.startswith(table) and name.endswith(".0.weight") for name in weights)
    rows = [
        weights[f"{table}.{band}.0.weight"] @ weights[f"{table}.{band}.1.weight"].T
        for band in range(bands)
    ]
    return np.concatenate(rows)[inputs]


def _sinusoids(length: int, width: int) -> np.ndarray:
    """Row n, from 2: sin(n / w_i), then cos(n / w_i), w_i from 1 to 10000 in equal ratios."""
    angles = np.arange(2, length + 2)[:, None] / np.geomspace(1, 10000, width // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _slopes(heads: int) -> list[float]:
    power = 2 ** int(np.log2(heads))
    exact = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    finer = [2 ** (-4 * (head + 1) / power) for head in range(2 * power)]
    return exact + finer[::2][: heads - power]


def _attend(
    hidden: np.ndarray, get: dict[str, np.ndarray], heads: int, biased: bool
) -> np.ndarray:
    length, width = hidden.shape
    q, k, v = (_affine(hidden, get, f"self_attn.{part}_proj") for part in "qkv")
    size, out = width // heads, np.empty_like(hidden)
    for head, slope in enumerate(_slopes(heads)):
        part = slice(head * size, (head + 1) * size)
        scores = q[:, part] @ k[:, part].T / size**0.5
        if biased:
            scores = scores + slope * np.arange(length)  # by key, as the original adds it
        scores[np.triu_indices(length, 1)] = -np.inf
        weight = np.exp(scores - scores.max(1, keepdims=True))
        out[:, part] = weight / weight.sum(1, keepdims=True) @ v[:, part]
    return _affine(out, get, "self_attn.out_proj")


def _softmax_tree(weights: dict[str, np.ndarray], hidden: np.ndarray) -> np.ndarray:
    softmax = "decoder.adaptive_softmax"
    words, classes = (weights[f"{softmax}.head.{part}_proj.weight"] for part in ("word", "class"))
    head = _log_softmax(np.concatenate([hidden @ words.T, hidden @ classes.T], axis=1))
    parts = [head[:, : len(words)]]
    for tail in range(len(classes)):
        narrow = hidden @ weights[f"{softmax}.tail.{tail}.0.weight"]
        logits = narrow @ weights[f"{softmax}.tail.{tail}.2.weight"].T
        parts.append(head[:, [len(words) + tail]] + _log_softmax(logits))
    return np.concatenate(parts, axis=1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _norm(hidden: np.ndarray, get: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = hidden - hidden.mean(1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    return scaled * get[f"{name}.weight"] + get[f"{name}.bias"]


def _affine(hidden: np.ndarray, get: dict[str, np.ndarray], name: str) -> np.ndarray:
    return hidden @ get[f"{name}.weight"].T + get[f"{name}.bias"]


def write(record: dict[str, Any], folder: Path) -> Path:
    """Save a record as the original saves its checkpoints."""
    path = folder / "checkpoint.pt"
    torch.save(record, path)
    return path


def as_namespace(record: dict[str, Any]) -> dict[str, Any]:
    """The same settings as older versions of the original keep them."""
    cfg = record["cfg"]
    args = argparse.Namespace(**(cfg["task"] | cfg["model"]), criterion="adaptive_loss")
    return {"args": args, "model": record["model"]}
