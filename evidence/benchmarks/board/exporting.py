"""`plain.py` as a graph for other engines: caches of any length are inputs and outputs."""

import shutil
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


class Vectors(torch.nn.Module):
    """Of an encoder, those of all tokens [1, T, width]."""

    def __init__(self, encoder: plain.Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder.vectors(ids)


def to_onnx(job: Job, folder: Path) -> None:
    """Write model.onnx, with its weights beside it."""
    write_onnx(*example(job, plain.eager), folder)


def to_fastembed(job: Job, folder: Path) -> None:
    """The folder that fastembed reads: a graph from input_ids to vectors, and the tokenizer."""
    model, given, _, _ = example(job, plain.eager)
    write_onnx(Vectors(model), given, ["input_ids"], ["last_hidden_state"], folder)
    for path in job.folder.glob("*.json"):
        shutil.copy(path, folder)


def write_onnx(
    model: Any, given: tuple[Any, ...], inputs: list[str], outputs: list[str], folder: Path
) -> None:
    some = torch.export.Dim.DYNAMIC
    shapes: tuple[Any, ...] = ({1: some},)
    if len(given) > 1:
        shapes = ({1: some}, tuple({2: some} for _ in given[1:]))
    torch.onnx.export(
        model, given, folder / "model.onnx", input_names=inputs, output_names=outputs,
        dynamic_shapes=shapes, dynamo=True, external_data=True,
    )  # fmt: skip
