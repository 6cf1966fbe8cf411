"""OpenVINO: `plain.py` on SDPA as `openvino.convert_model` reads it, with keys and values kept inside, in a loop."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation

from worker import Job

PACKAGES = ("openvino",)


def prepare(job: Job) -> None:
    import exporting
    import plain

    program, given, inputs, outputs = exporting.example(job, plain.sdpa)
    model = ov.convert_model(program, example_input=given)
    for port, name in zip(model.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    if len(inputs) > 1:
        begin_empty(model, job)
        apply_make_stateful_transformation(model, dict(zip(inputs[1:], outputs[1:], strict=True)))
    ov.save_model(model, job.converted / "model.xml", compress_to_fp16=False)


def begin_empty(model: Any, job: Job) -> None:
    """Let a new text have no keys and values yet."""
    heads = job.shape.heads
    shape = ov.PartialShape([1, heads, -1, job.shape.width // heads])
    model.reshape({port: ov.PartialShape([1, -1]) if i == 0 else shape for i, port in enumerate(model.inputs)})  # fmt: skip
    assert opset13


class Engine:
    def __init__(self, job: Job) -> None:
        self.model = ov.Core().compile_model(
            job.converted / "model.xml",
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": job.threads,
                "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[job.dtype],
                "KV_CACHE_PRECISION": {"float32": "f32", "bfloat16": "bf16"}[job.dtype],
            },
        )
        self.request = self.model.create_infer_request()

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        self.request.reset_state()
        logits = self.run([ids])
        first = logits[0].astype(np.float32)
        for _ in range(count - 1):
            token = logits.argmax(-1)
            tell()
            logits = self.run([token])
        tell()
        return first

    def embed(self, ids: Sequence[int]) -> Any:
        return self.run([ids])[0]

    def run(self, ids: Any) -> Any:
        return next(iter(self.request.infer({0: np.array(ids, np.int64)}).values()))
