"""PyTorch's attention with the bias as its mask: what a user can write for any family."""

import decoding
import plain
from worker import Job

PACKAGES = ("torch",)


class Engine(decoding.Plain):
    def __init__(self, job: Job) -> None:
        super().__init__(plain.load(job.folder, job.dtype, plain.sdpa), job)
