"""CTranslate2: its converter's model, and `generate_batch` with the prompt read at once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ctranslate2 import Generator, get_supported_compute_types
from ctranslate2.converters import TransformersConverter, transformers

from models import words
from worker import Job

PACKAGES = ("ctranslate2",)


def refuse(job: Job) -> str | None:
    if job.shape.task == "embed":
        return "its converter has no encoder with ALiBi"
    if job.dtype not in (known := sorted(get_supported_compute_types("cpu"))):
        return f"on this CPU it computes in {', '.join(known)}"
    return None


def prepare(job: Job) -> None:
    loaders = transformers._MODEL_LOADERS
    # It knows MPT by the name that its remote code had; the modules have the same names in
    # Transformers.
    loaders.setdefault("MptConfig", loaders["MPTConfig"])
    TransformersConverter(str(job.folder)).convert(str(job.converted / "model"), force=True)


class Engine:
    def __init__(self, job: Job) -> None:
        how = {"device": "cpu", "compute_type": job.dtype, "inter_threads": 1}
        folder = str(job.converted / "model")
        self.generator = Generator(folder, intra_threads=job.threads, **how)

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> None:
        options = {"max_length": count, "end_token": "<unk>", "include_prompt_in_result": False}
        # A callback that gives False goes on.
        self.generator.generate_batch([words(ids)], callback=lambda _: bool(tell()), **options)

    def logits(self, ids: Sequence[int]) -> Any:
        found = self.generator.forward_batch([words(ids)])
        return np.array(found, copy=False)[0, -1]
