"""ONNX Runtime: `plain.py` as `torch.onnx.export` writes it, in a loop."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime

from worker import Job, greedy

PACKAGES = ("onnxruntime",)


def prepare(job: Job) -> None:
    import exporting
    import plain

    exporting.write_onnx(*exporting.example(job, plain.eager), job.converted)


class Engine:
    def __init__(self, job: Job) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job.threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            job.converted / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.caches = [given.name for given in self.session.get_inputs()][1:]
        heads, width = job.shape.heads, job.shape.width
        self.empty = np.zeros((1, heads, 0, width // heads), np.float32)

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        kept = [self.empty] * len(self.caches)

        def step(new: list[int]) -> Any:
            logits, *kept[:] = self.run(new, kept)
            return logits[0]

        return greedy(step, ids, count, tell)

    def embed(self, ids: Sequence[int]) -> Any:
        return self.run(ids, [])[0][0]

    def run(self, ids: Sequence[int], caches: Sequence[Any]) -> Any:
        given = {"ids": np.array([ids], np.int64), **dict(zip(self.caches, caches, strict=True))}
        return self.session.run(None, given)
