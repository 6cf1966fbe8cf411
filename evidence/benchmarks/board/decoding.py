"""How engines in PyTorch generate: Transformers' `generate`, or a loop around `plain.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from worker import Job

Tell = Callable[[], None]


class Transformers:
    """A model of Transformers (or for jina, any that gives vectors)."""

    def __init__(self, model: Any, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.model = model
        if job.shape.task == "generate":
            model.generation_config.eos_token_id = None  # no text ends before it has all tokens

    def generate(self, ids: Sequence[int], count: int, tell: Tell) -> Any:
        given = torch.tensor([ids])
        found = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,  # MPT's configuration says no
            streamer=Streamer(tell),
            output_logits=True,
            return_dict_in_generate=True,
        )
        return found.logits[0][0].float().numpy()

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Any:
        found = self.model(torch.tensor([ids]))
        if isinstance(found, tuple):
            return found[0][0].numpy()
        return found.last_hidden_state[0].mean(0, dtype=torch.float32).numpy()


class Streamer:
    """What `generate` hands each token to; the first is the prompt."""

    def __init__(self, tell: Tell) -> None:
        self.tell, self.prompt = tell, True

    def put(self, _: Tensor) -> None:
        if not self.prompt:
            self.tell()
        self.prompt = False

    def end(self) -> None:
        pass


class Plain:
    """A model of `plain.py`, or anything that is called like one."""

    def __init__(self, model: Callable[..., Any], job: Job) -> None:
        torch.set_num_threads(job.threads)
        self.model = model

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], count: int, tell: Tell) -> Any:
        logits, *past = self.model(torch.tensor([ids]))
        first = logits[0].float().numpy()
        for _ in range(count - 1):
            token = logits.argmax(-1, keepdim=True)
            tell()
            logits, *past = self.model(token, *past)
        logits.argmax()
        tell()
        return first

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Any:
        return self.model(torch.tensor([ids]))[0][0].float().numpy()
