"""fastembed with the ONNX file of `onnx.py`, but for the mean, which fastembed takes."""

import shutil
from collections.abc import Sequence
from typing import Any

import fastembed
from fastembed.common.model_description import ModelSource, PoolingType

from models import words
from worker import Job

PACKAGES = ("fastembed", "onnxruntime")


def refuse(job: Job) -> str | None:
    return None if job.shape.task == "embed" else "it embeds texts"


def prepare(job: Job) -> None:
    """The folder that fastembed reads: a graph from input_ids to vectors, and the tokenizer."""
    import exporting
    import plain

    model, given, _, _ = exporting.example(job, plain.eager)
    model.forward = model.vectors
    exporting.write_onnx(model, given, ["input_ids"], ["last_hidden_state"], job.converted)
    for path in job.folder.glob("*.json"):
        shutil.copy(path, job.converted)


class Engine:
    def __init__(self, job: Job) -> None:
        name = f"board/{job.name}-{job.dtype}"
        file = {"sources": ModelSource(hf=name), "model_file": "model.onnx"}
        vector = {"dim": job.shape.width, "pooling": PoolingType.MEAN, "normalization": False}
        fastembed.TextEmbedding.add_custom_model(model=name, **file, **vector)
        where = {"specific_model_path": str(job.converted), "threads": job.threads}
        self.model = fastembed.TextEmbedding(name, **where)

    def embed(self, ids: Sequence[int]) -> Any:
        return next(iter(self.model.embed(" ".join(words(ids)))))
