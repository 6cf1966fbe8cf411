"""fastembed with the ONNX file of `onnx.py`, but for the mean, which fastembed takes."""

from collections.abc import Sequence
from typing import Any

import fastembed
from fastembed.common.model_description import ModelSource, PoolingType

from models import words
from worker import Job

PACKAGES = ("fastembed", "onnxruntime")


def refuse(job: Job) -> str | None:
    if job.shape.task != "embed":
        return "it embeds texts"
    return None


def prepare(job: Job) -> None:
    import exporting

    exporting.to_fastembed(job, job.converted)


class Engine:
    def __init__(self, job: Job) -> None:
        name = f"board/{job.name}-{job.dtype}"
        fastembed.TextEmbedding.add_custom_model(
            model=name,
            pooling=PoolingType.MEAN,
            normalization=False,
            sources=ModelSource(hf=name),
            dim=job.shape.width,
            model_file="model.onnx",
        )
        self.model = fastembed.TextEmbedding(
            name, specific_model_path=str(job.converted), threads=job.threads
        )

    def embed(self, ids: Sequence[int]) -> Any:
        return next(iter(self.model.embed(" ".join(words(ids)))))
