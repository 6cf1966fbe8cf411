"""The models of the board as GGUF files, from the weights of `plain.py`."""

import gguf
import numpy as np
import torch
from torch import Tensor

import models
import plain
from worker import Job

ARCHITECTURES = {"bloom": "bloom", "mpt": "mpt", "jina": "jina-bert-v2"}
# Name of a module in plain.py -> name in the file; {} is the number of a layer.
DECODER = {
    "embedding": "token_embd",
    "embedding_norm": "token_embd_norm",
    "layers.{}.attention_norm": "blk.{}.attn_norm",
    "layers.{}.attention.qkv": "blk.{}.attn_qkv",
    "layers.{}.attention.out": "blk.{}.attn_output",
    "layers.{}.norm": "blk.{}.ffn_norm",
    "layers.{}.up": "blk.{}.ffn_up",
    "layers.{}.down": "blk.{}.ffn_down",
    "norm": "output_norm",
}
ENCODER = {
    "embedding": "token_embd",
    "types": "token_types",
    "embedding_norm": "token_embd_norm",
    "layers.{}.attention.out": "blk.{}.attn_output",
    "layers.{}.attention_norm": "blk.{}.attn_output_norm",
    "layers.{}.down": "blk.{}.ffn_down",
    "layers.{}.norm": "blk.{}.layer_output_norm",
}


def write(job: Job) -> None:
    """Write model.gguf: matrices keep their type, the rest is float32, as in others' files."""
    shape = job.shape
    writer = gguf.GGUFWriter(job.converted / "model.gguf", ARCHITECTURES[shape.family])
    writer.add_context_length(32768 + models.ROOM)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(4 * shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_eps(1e-12 if shape.task == "embed" else 1e-5)
    writer.add_max_alibi_bias(8.0)
    writer.add_vocab_size(models.VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    if shape.task == "embed":
        writer.add_causal_attention(False)
        writer.add_token_type_count(2)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    _, weights = plain.weights(job.folder)
    for name, weight in weights.items():
        for named, part in parts(name, weight, shape):
            add(writer, named, part)
    if shape.task == "generate":
        add(writer, "output.weight", weights["embedding.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts(name: str, weight: Tensor, shape: models.Shape) -> list[tuple[str, Tensor]]:
    """The tensors of the file that a weight becomes."""
    module, _, kind = name.rpartition(".")
    number = next((part for part in module.split(".") if part.isdigit()), "")
    module = module.replace(f".{number}.", ".{}.")
    names: tuple[str, ...] = ()
    if shape.task == "embed" and module.endswith("attention.qkv"):
        names = ("attn_q", "attn_k", "attn_v")
    elif module.endswith("gated"):
        names = ("ffn_gate", "ffn_up")
    if names:
        chunks = zip(names, weight.chunk(len(names)), strict=True)
        return [(f"blk.{number}.{name}.{kind}", part) for name, part in chunks]
    if shape.family == "bloom" and module.endswith("attention.qkv"):
        by_head = weight.unflatten(0, (shape.heads, 3, -1))
        weight = by_head.transpose(0, 1).flatten(0, 2)
    table = ENCODER if shape.task == "embed" else DECODER
    return [(f"{table[module].format(number)}.{kind}", weight)]


def add(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    if weight.dtype == torch.bfloat16 and weight.dim() == 2 and "token_types" not in name:
        bits = weight.contiguous().view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, weight.float().contiguous().numpy())
