"""`plain.py` as a graph for other engines: caches of any length are inputs and outputs."""

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


def write_onnx(
    model: Any, given: tuple[Any, ...], inputs: list[str], outputs: list[str], folder: Path
) -> None:
    """Write model.onnx, with its weights beside it."""
    some = torch.export.Dim.DYNAMIC
    shapes = ({1: some}, *([tuple({2: some} for _ in given[1:])] if len(given) > 1 else []))
    names: dict[str, Any] = {"input_names": inputs, "output_names": outputs}
    how: dict[str, Any] = {"dynamic_shapes": shapes, "dynamo": True, "external_data": True}
    torch.onnx.export(model, given, folder / "model.onnx", **names, **how)
