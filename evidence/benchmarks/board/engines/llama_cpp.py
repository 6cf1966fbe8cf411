"""llama.cpp through llama-cpp-python: a GGUF file from the weights of `plain.py`, its `generate`
and `embed` with their own settings.

In float32 the cache of keys and values is float32 too; with bfloat16 weights it is float16, as it
comes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

import models
import plain
from worker import Job

PACKAGES = ("llama-cpp-python",)
F32 = 0  # GGML_TYPE_F32
ARCHITECTURES = {"bloom": "bloom", "mpt": "mpt", "jina": "jina-bert-v2"}
# Name of a module in plain.py -> name in the file; {} is the number of a layer. A name of several
# parts is a matrix that the file has in parts.
BOTH = {
    "embedding": "token_embd",
    "embedding_norm": "token_embd_norm",
    "layers.{}.attention.out": "blk.{}.attn_output",
    "layers.{}.down": "blk.{}.ffn_down",
}
DECODER = {
    **BOTH,
    "layers.{}.attention_norm": "blk.{}.attn_norm",
    "layers.{}.attention.qkv": "blk.{}.attn_qkv",
    "layers.{}.norm": "blk.{}.ffn_norm",
    "layers.{}.up": "blk.{}.ffn_up",
    "norm": "output_norm",
}
ENCODER = {
    **BOTH,
    "types": "token_types",
    "layers.{}.attention_norm": "blk.{}.attn_output_norm",
    "layers.{}.attention.qkv": "blk.{0}.attn_q blk.{0}.attn_k blk.{0}.attn_v",
    "layers.{}.gated": "blk.{0}.ffn_gate blk.{0}.ffn_up",
    "layers.{}.norm": "blk.{}.layer_output_norm",
}


def refuse(job: Job) -> str | None:
    if job.shape.family == "falcon":
        return "its Falcon has rotary positions only"
    return None


def prepare(job: Job) -> None:
    """Write model.gguf: matrices keep their type, the rest is float32, as in others' files."""
    shape, is_encoder = job.shape, job.shape.task == "embed"
    writer = gguf.GGUFWriter(job.converted / "model.gguf", ARCHITECTURES[shape.family])
    writer.add_context_length(32768 + models.ROOM)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(4 * shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_eps(1e-12 if is_encoder else 1e-5)
    writer.add_max_alibi_bias(8.0)
    writer.add_vocab_size(models.VOCABULARY)
    writer.add_tokenizer_model("no_vocab")
    if is_encoder:
        writer.add_causal_attention(False)
        writer.add_token_type_count(2)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    _, weights = plain.weights(job.folder)
    for name, weight in weights.items():
        (module, number), kind = plain.split(name), name.rpartition(".")[2]
        if shape.family == "bloom" and module.endswith("attention.qkv"):
            weight = weight.unflatten(0, (shape.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        named = (ENCODER if is_encoder else DECODER)[module].format(number).split()
        for own, part in zip(named, weight.chunk(len(named)), strict=True):
            add(writer, f"{own}.{kind}", part)
    if not is_encoder:
        add(writer, "output.weight", weights["embedding.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    if weight.dtype == torch.bfloat16 and weight.dim() == 2 and "token_types" not in name:
        bits = weight.contiguous().view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, weight.float().contiguous().numpy())


class Engine:
    """A context is made for each text, as long as that."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.llama: Any = None

    def model(self, length: int) -> Any:
        if self.llama is None or self.llama.n_ctx() < length:
            from llama_cpp import LLAMA_POOLING_TYPE_MEAN, Llama

            threads = self.job.threads
            how = {"n_ctx": length, "n_threads": threads, "n_threads_batch": threads}
            if self.job.shape.task == "embed":
                how |= {"n_batch": length, "n_ubatch": length, "embedding": True}
                how |= {"pooling_type": LLAMA_POOLING_TYPE_MEAN}
            if self.job.dtype == "float32":
                how |= {"type_k": F32, "type_v": F32}
            self.llama = Llama(str(self.job.converted / "model.gguf"), verbose=False, **how)
        return self.llama

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        llama = self.model(len(ids) + models.ROOM)
        llama.n_tokens = 0  # or it would find the text in its cache
        first = None
        for number, _ in enumerate(llama.generate(ids, temp=0.0), 1):
            tell()
            if first is None:
                first = np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),)).copy()
            if number == count:
                return first

    def embed(self, ids: Sequence[int]) -> Any:
        llama = self.model(max(len(ids), 64))
        llama.tokenize = lambda *_, **__: list(ids)  # its file has no tokenizer
        return llama.embed("", truncate=False)
