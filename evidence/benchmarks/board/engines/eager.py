"""Transformers' own eager attention; jina, which it lacks, in plain PyTorch."""

import decoding
import plain
from models import load
from worker import Job

PACKAGES = ("transformers", "torch")


class Engine(decoding.Transformers):
    def __init__(self, job: Job) -> None:
        if job.shape.task == "embed":
            super().__init__(plain.load(job.folder, job.dtype), job)
            return
        model = load(job.folder, job.dtype)
        model.set_attn_implementation("eager")
        super().__init__(model, job)
