"""vLLM's engine for CPUs, through its `LLM`."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm import LLM, SamplingParams

from models import ROOM
from worker import Job

PACKAGES = ("vllm",)


def refuse(job: Job) -> str | None:
    return "it has no jina-embeddings-v2" if job.shape.task == "embed" else None


class Engine:
    """It runs step by step, so that each token has a time."""

    def __init__(self, job: Job) -> None:
        self.llm = LLM(
            str(job.folder), dtype=job.dtype, max_model_len=32768 + ROOM, enforce_eager=True
        )

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        prompt: Any = {"prompt_token_ids": list(ids)}
        engine = self.llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine.add_request("0", prompt, greedy)
        while engine.has_unfinished_requests():
            engine.step()
            tell()

    def logits(self, ids: Sequence[int]) -> Any:
        raise NotImplementedError("vLLM gives no logits")
