"""The engines in PyTorch: Transformers with its own attention, eager or SDPA, and with linbias';
and `plain.py` on SDPA, which a user can write for any family, and on FlexAttention, compiled,
which Transformers refuses for ALiBi.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import plain
from linbias.models import fuse
from models import load
from worker import Job, greedy

PACKAGES = ("linbias", "torch", "transformers")
transformers.utils.logging.disable_progress_bar()
compiled = torch.compile(flex_attention, dynamic=True)


def refuse(job: Job) -> str | None:
    if job.engine != "sdpa":
        return None
    if job.shape.task == "embed":
        return "Transformers has no jina-embeddings-v2; its code lies beside the weights"
    config = transformers.AutoConfig.from_pretrained(job.folder)
    try:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError as error:
        return str(error).split(". ")[0]
    return None


def flex_bias(slopes: Tensor, T: int, S: int, causal: bool, like: Tensor) -> Any:
    """What changes scores, and which blocks there are."""
    start = torch.tensor(S - T)

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - slopes[h] * (q + start - k).abs()

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + start >= k

    blocks = create_block_mask(visible, None, None, T, S, "cpu") if causal and T > 1 else None
    return change, blocks


def flex(q: Tensor, k: Tensor, v: Tensor, made: Any) -> Tensor:
    change, blocks = made
    arrays = (x.contiguous() for x in (q, k, v))
    return compiled(*arrays, score_mod=change, block_mask=blocks)


def Engine(job: Job) -> Any:
    torch.set_num_threads(job.threads)
    in_plain = {"plain_sdpa": (plain.sdpa,), "flex": (flex, flex_bias)}
    if job.engine in in_plain:
        return Plain(plain.load(job.folder, job.dtype, *in_plain[job.engine]))
    if job.shape.task == "embed":  # which Transformers lacks: eager in plain.py
        return Plain(plain.load(job.folder, job.dtype)) if job.engine == "eager" else Own(job)
    return Own(job)


class Own:
    """A model of Transformers; for jina, linbias' encoder."""

    def __init__(self, job: Job) -> None:
        self.model: Any = load(job.folder, job.dtype)
        if job.shape.task == "generate":
            self.model.generation_config.eos_token_id = None  # no text ends before all tokens
            if job.engine == "linbias":
                self.model = fuse(self.model)
            else:
                self.model.set_attn_implementation(job.engine)

    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        given = torch.tensor([ids])
        how = {"attention_mask": torch.ones_like(given), "do_sample": False}
        how |= {"use_cache": True, "max_new_tokens": count}  # MPT's configuration says no cache
        kept = {"output_logits": True, "return_dict_in_generate": True}
        found = self.model.generate(given, streamer=Streamer(tell), **how, **kept)
        return found.logits[0][0].float().numpy()

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Any:
        found = self.model(torch.tensor([ids])).last_hidden_state[0]
        return found.mean(0, dtype=torch.float32).numpy()


class Streamer:
    """What `generate` hands each token to; the first is the prompt."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.prompt = tell, True

    def put(self, _: Tensor) -> None:
        if not self.prompt:
            self.tell()
        self.prompt = False

    def end(self) -> None:
        pass


class Plain:
    """A model of `plain.py`."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], count: int, tell: Callable[[], None]) -> Any:
        past: list[Tensor] = []

        def step(new: list[int]) -> Any:
            logits, *past[:] = self.model(torch.tensor([new]), *past)
            return logits[0].float().numpy()

        return greedy(step, ids, count, tell)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Any:
        return self.model(torch.tensor([ids]))[0][0].float().numpy()
