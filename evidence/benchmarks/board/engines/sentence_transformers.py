"""Sentence Transformers with linbias' encoder in it, and a tokenizer that splits at spaces."""

from collections.abc import Sequence
from typing import Any

import sentence_transformers
import torch
from sentence_transformers.models import Pooling, Transformer

from linbias.models import install
from models import words
from worker import Job

PACKAGES = ("sentence-transformers", "linbias", "torch")


def refuse(job: Job) -> str | None:
    return None if job.shape.task == "embed" else "it embeds texts"


class Engine:
    def __init__(self, job: Job) -> None:
        install()  # or Transformers would not know the encoder
        torch.set_num_threads(job.threads)
        body = Transformer(str(job.folder), model_kwargs={"dtype": getattr(torch, job.dtype)})
        self.model = sentence_transformers.SentenceTransformer(
            modules=[body, Pooling(job.shape.width)], device="cpu"
        )
        self.model.max_seq_length = 8192

    def embed(self, ids: Sequence[int]) -> Any:
        options = {"convert_to_tensor": True, "show_progress_bar": False}
        return self.model.encode(" ".join(words(ids)), **options).float().numpy()
