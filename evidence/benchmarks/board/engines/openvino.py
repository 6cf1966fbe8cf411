"""OpenVINO: `plain.py` on SDPA as `convert_model` reads it, keys and values kept inside."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino._offline_transformations import apply_make_stateful_transformation

from worker import Job, greedy

PACKAGES = ("openvino",)


def prepare(job: Job) -> None:
    import exporting
    import plain

    program, given, inputs, outputs = exporting.example(job, plain.sdpa)
    model = ov.convert_model(program, example_input=given)
    for port, name in zip([*model.inputs, *model.outputs], [*inputs, *outputs], strict=True):
        port.get_tensor().set_names({name})
    if len(inputs) > 1:
        begin_empty(model, job)
        apply_make_stateful_transformation(model, dict(zip(inputs[1:], outputs[1:], strict=True)))
    ov.save_model(model, job.converted / "model.xml", compress_to_fp16=False)


def begin_empty(model: Any, job: Job) -> None:
    """Let a new text have no keys and values yet."""
    heads, (ids, *caches) = job.shape.heads, model.inputs
    shape = ov.PartialShape([1, heads, -1, job.shape.width // heads])
    model.reshape({ids: ov.PartialShape([1, -1]), **dict.fromkeys(caches, shape)})


class Engine:
    def __init__(self, job: Job) -> None:
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads}
        precision = {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
        options |= dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), precision)
        model = ov.Core().compile_model(job.converted / "model.xml", "CPU", options)
        self.request = model.create_infer_request()

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        self.request.reset_state()
        return greedy(lambda new: self.run(new).astype(np.float32), ids, count, tell)

    def embed(self, ids: Sequence[int]) -> Any:
        return self.run(ids)

    def run(self, ids: Sequence[int]) -> Any:
        return next(iter(self.request.infer({0: np.array([ids], np.int64)}).values()))[0]
