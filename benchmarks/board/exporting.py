"""`plain.py` as a graph for other engines: any length, keys and values of earlier tokens as inputs and outputs."""

from pathlib import Path
from typing import Any

import torch

import plain
from worker import Job


def example(job: Job, attend: plain.Attend) -> tuple[Any, tuple[Any, ...], list[str], list[str]]:
    """The model, inputs that it takes, and names of inputs and outputs."""
    model = plain.load(job.folder, job.dtype, attend)
    ids = torch.arange(4, 11)[None]
    if job.shape.task == "embed":
        return model, (ids,), ["ids"], ["vector"]
    _, *caches = model(ids)
    names = [f"{kind}_{layer}" for layer in range(job.shape.layers) for kind in ("keys", "values")]
    return model, (ids, *caches), ["ids", *names], ["logits", *(f"new_{name}" for name in names)]


def to_onnx(job: Job, folder: Path) -> None:
    """Write model.onnx, with its weights beside it."""
    model, given, inputs, outputs = example(job, plain.eager)
    tokens, earlier = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    shapes: tuple[Any, ...] = ({1: tokens},)
    if len(given) > 1:
        shapes = ({1: tokens}, tuple({2: earlier} for _ in given[1:]))
    torch.onnx.export(
        model,
        given,
        folder / "model.onnx",
        input_names=inputs,
        output_names=outputs,
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=True,
    )
