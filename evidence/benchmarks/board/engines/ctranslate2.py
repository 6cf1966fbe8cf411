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
        self.generator = Generator(
            str(job.converted / "model"),
            device="cpu",
            compute_type=job.dtype,
            inter_threads=1,
            intra_threads=job.threads,
        )

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> None:
        def step(_: Any) -> bool:
            tell()
            return False

        self.generator.generate_batch(
            [words(ids)],
            max_length=count,
            end_token="<unk>",
            include_prompt_in_result=False,
            callback=step,
        )

    def logits(self, ids: Sequence[int]) -> Any:
        found = self.generator.forward_batch([words(ids)])
        return np.array(found, copy=False)[0, -1]
