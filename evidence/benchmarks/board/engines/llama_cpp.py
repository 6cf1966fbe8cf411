"""llama.cpp through llama-cpp-python: a GGUF file written by `gguf_files.py`, its `generate` and
`embed` with their own settings.

In float32 the cache of keys and values is float32 too; with bfloat16 weights it is float16, as it
comes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_cpp import LLAMA_POOLING_TYPE_MEAN, Llama

from models import ROOM
from worker import Job

PACKAGES = ("llama-cpp-python",)
F32 = 0  # GGML_TYPE_F32


def refuse(job: Job) -> str | None:
    if job.shape.family == "falcon":
        return "its Falcon has rotary positions only"
    return None


def prepare(job: Job) -> None:
    import gguf_files

    gguf_files.write(job)


class Engine:
    """A context is made for each text, as long as that."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.llama: Any = None

    def model(self, length: int) -> Any:
        if self.llama is None or self.llama.n_ctx() < length:
            embeds = self.job.shape.task == "embed"
            longest = {"n_batch": length, "n_ubatch": length} if embeds else {}
            cache = {"type_k": F32, "type_v": F32} if self.job.dtype == "float32" else {}
            self.llama = Llama(
                str(self.job.converted / "model.gguf"),
                n_ctx=length,
                n_threads=self.job.threads,
                n_threads_batch=self.job.threads,
                embedding=embeds,
                pooling_type=LLAMA_POOLING_TYPE_MEAN if embeds else -1,
                verbose=False,
                **longest,
                **cache,
            )
        return self.llama

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        llama = self.model(len(ids) + ROOM)
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
