"""The models of the board in plain PyTorch, from the weights of their folders: BLOOM, MPT and
Falcon are one decoder, jina the encoder.

The bias of all heads is made once per call, [H, T, S], as programs without a kernel for it do. It
is what ONNX Runtime and OpenVINO are given, and what runs on `scaled_dot_product_attention` and
FlexAttention where Transformers refuses them for a family.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from linbias import slopes

# Each has q [1, H, T, D], k and v [1, H, S, D] and what `bias` of the same name made, and gives
# [1, H, T, D].
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# Of slopes [H], T queries, S keys, whether causal, and an array of the type that is wanted.
Bias = Callable[[Tensor, int, int, bool, Tensor], Any]
Past = tuple[Tensor, Tensor] | None


class Size(NamedTuple):
    vocabulary: int
    width: int
    heads: int
    layers: int


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Scores in memory."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    dtype = torch.float32 if q.dtype == torch.bfloat16 else None
    return F.softmax(scores, -1, dtype=dtype).to(v.dtype) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's attention, with the bias as its mask."""
    return F.scaled_dot_product_attention(q, k, v, bias[None])


def dense_bias(slopes: Tensor, T: int, S: int, causal: bool, like: Tensor) -> Tensor:
    """[H, T, S] in the type of the model; causal: the future is -inf."""
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    bias = -slopes[:, None, None] * distance.abs().float().to(slopes.dtype)
    return (bias.masked_fill(distance < 0, -torch.inf) if causal else bias).to(like.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Attention(nn.Module):
    def __init__(
        self, width: int, heads: int, biased: bool, interleaved: bool, attend: Attend
    ) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, biased)
        self.out = nn.Linear(width, width, biased)
        self.heads, self.interleaved, self.attend = heads, interleaved, attend

    def forward(self, x: Tensor, bias: Any, past: Past = None) -> tuple[Tensor, Tensor, Tensor]:
        if self.interleaved:  # a query, a key and a value of each head after the other
            q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.out(self.attend(q, k, v, bias).transpose(1, 2).flatten(-2)), k, v


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, biased: bool, tanh: bool, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=biased)
        self.attention = Attention(width, heads, biased, biased, attend)
        self.norm = nn.LayerNorm(width, bias=biased)
        self.up = nn.Linear(width, 4 * width, biased)
        self.down = nn.Linear(4 * width, width, biased)
        self.activation = partial(F.gelu, approximate="tanh" if tanh else "none")

    def forward(self, x: Tensor, bias: Any, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        attended, k, v = self.attention(self.attention_norm(x), bias, past)
        x = x + attended
        return x + self.down(self.activation(self.up(self.norm(x)))), k, v


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.attention = Attention(width, heads, True, False, attend)
        self.attention_norm = nn.LayerNorm(width, 1e-12)
        self.gated = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, bias: Any) -> Tensor:
        x = self.attention_norm(x + self.attention(x, bias)[0])
        gate, value = self.gated(x).chunk(2, -1)
        return self.norm(x + self.down(F.gelu(gate) * value))


class Decoder(nn.Module):
    """(ids [1, T], *earlier keys and values) -> (the last logits [1, V], *those of all)."""

    def __init__(self, family: str, size: Size, attend: Attend, bias: Bias) -> None:
        super().__init__()
        own = (size.width, size.heads, family != "mpt", family == "bloom", attend)
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.embedding_norm = nn.LayerNorm(size.width) if family == "bloom" else nn.Identity()
        self.layers = nn.ModuleList(DecoderLayer(*own) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=family != "mpt")
        self.bias, self.slopes = bias, Tensor()

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding_norm(self.embedding(ids))
        T = ids.shape[1]
        bias = self.bias(self.slopes, T, T + (past[0].shape[2] if past else 0), True, x)
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, bias, (past[2 * i], past[2 * i + 1]) if past else None)
            kept += [k, v]
        return at_least_float32(F.linear(self.norm(x[:, -1]), self.embedding.weight)), *kept


class Encoder(nn.Module):
    """ids [1, T] -> the mean of the vectors of all tokens [1, width]."""

    def __init__(self, size: Size, attend: Attend, bias: Bias) -> None:
        super().__init__()
        own = (size.width, size.heads, attend)
        self.embedding, self.types = nn.Embedding(*size[:2]), nn.Embedding(2, size.width)
        self.embedding_norm = nn.LayerNorm(size.width, 1e-12)
        self.layers = nn.ModuleList(EncoderLayer(*own) for _ in range(size.layers))
        self.bias, self.slopes = bias, Tensor()

    def vectors(self, ids: Tensor) -> Tensor:
        """[1, T, width]"""
        x = self.embedding_norm(self.embedding(ids) + self.types.weight[0])
        bias = self.bias(self.slopes, ids.shape[1], ids.shape[1], False, x)
        for layer in self.layers:
            x = layer(x, bias)
        return x

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (at_least_float32(self.vectors(ids)).mean(1),)


# Name in a folder -> name here, by family; {} is the number of a layer.
_BLOOM = {
    "word_embeddings_layernorm": "embedding_norm",
    "word_embeddings": "embedding",
    "h.{}.input_layernorm": "layers.{}.attention_norm",
    "h.{}.self_attention.query_key_value": "layers.{}.attention.qkv",
    "h.{}.self_attention.dense": "layers.{}.attention.out",
    "h.{}.post_attention_layernorm": "layers.{}.norm",
    "h.{}.mlp.dense_h_to_4h": "layers.{}.up",
    "h.{}.mlp.dense_4h_to_h": "layers.{}.down",
    "ln_f": "norm",
}
NAMES = {
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "mpt": {
        "wte": "embedding",
        "blocks.{}.norm_1": "layers.{}.attention_norm",
        "blocks.{}.attn.Wqkv": "layers.{}.attention.qkv",
        "blocks.{}.attn.out_proj": "layers.{}.attention.out",
        "blocks.{}.norm_2": "layers.{}.norm",
        "blocks.{}.ffn.up_proj": "layers.{}.up",
        "blocks.{}.ffn.down_proj": "layers.{}.down",
        "norm_f": "norm",
    },
    "linbias_bert": {
        "embeddings.words": "embedding",
        "embeddings.types": "types",
        "embeddings.norm": "embedding_norm",
        "layers.{}.attention.qkv": "layers.{}.attention.qkv",
        "layers.{}.attention.out": "layers.{}.attention.out",
        "layers.{}.attention_norm": "layers.{}.attention_norm",
        "layers.{}.feed_forward.gated": "layers.{}.gated",
        "layers.{}.feed_forward.out": "layers.{}.down",
        "layers.{}.feed_forward_norm": "layers.{}.norm",
    },
}


def split(name: str) -> tuple[str, str]:
    """The module of a weight with {} for the number of its layer, and the number, or ""."""
    module = name.rpartition(".")[0]
    number = next((part for part in module.split(".") if part.isdigit()), "")
    return module.replace(f".{number}.", ".{}.") if number else module, number


def weights(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The family of a folder, and its weights under the names of this file."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module, number = split(name.removeprefix("transformer."))
        if ours := NAMES[family].get(module):  # the output weights are those of the embedding
            found[f"{ours.format(number)}.{name.rpartition('.')[2]}"] = weight
    return family, found


def load(folder: Path, dtype: str, attend: Attend = eager, bias: Bias = dense_bias) -> Any:
    """The model of a folder."""
    family, found = weights(folder)
    config = json.loads((folder / "config.json").read_text())
    names = ("n_head", "n_heads", "num_attention_heads")
    heads = next(config[name] for name in names if name in config)
    layers = 1 + max(int(split(name)[1] or 0) for name in found)
    size = Size(*found["embedding.weight"].shape, heads, layers)
    with torch.device("meta"):
        kind = (size, attend, bias)
        model = Encoder(*kind) if family == "linbias_bert" else Decoder(family, *kind)
    model.load_state_dict(found, assign=True)
    model.requires_grad_(False)
    model = model.to(getattr(torch, dtype)).eval()
    # Falcon divides the bias by sqrt(head size), as it does q . k.
    divisor = (size.width // heads) ** 0.5 if family == "falcon" else 1.0
    kept = torch.float64 if dtype == "float64" else torch.float32
    model.slopes = torch.tensor(slopes(heads) / divisor, dtype=kept)
    return model
