"""Transformers with `attn_implementation="sdpa"`."""

import transformers

import decoding
from models import load
from worker import Job

PACKAGES = ("transformers", "torch")


def refuse(job: Job) -> str | None:
    if job.shape.task == "embed":
        return "Transformers has no jina-embeddings-v2; its code lies beside the weights"
    config = transformers.AutoConfig.from_pretrained(job.folder)
    try:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError as error:
        return str(error).split(". ")[0]
    return None


class Engine(decoding.Transformers):
    def __init__(self, job: Job) -> None:
        model = load(job.folder, job.dtype)
        model.set_attn_implementation("sdpa")
        super().__init__(model, job)
