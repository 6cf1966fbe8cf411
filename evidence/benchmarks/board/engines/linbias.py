"""linbias: `fuse`, and Transformers' `generate`; encoders as `load` gives them."""

from typing import Any

from transformers.utils import logging

import decoding
from linbias.models import fuse
from models import load
from worker import Job

PACKAGES = ("linbias", "torch", "transformers")
logging.disable_progress_bar()


class Engine(decoding.Transformers):
    def __init__(self, job: Job) -> None:
        model: Any = load(job.folder, job.dtype)
        super().__init__(fuse(model) if job.shape.task == "generate" else model, job)
