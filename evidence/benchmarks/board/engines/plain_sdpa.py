"""PyTorch's `scaled_dot_product_attention` with the bias as its mask, in `plain.py`: what a user
can write where Transformers refuses.
"""

import decoding
import plain
from worker import Job

PACKAGES = ("torch",)


class Engine(decoding.Plain):
    def __init__(self, job: Job) -> None:
        super().__init__(plain.load(job.folder, job.dtype, plain.sdpa), job)
