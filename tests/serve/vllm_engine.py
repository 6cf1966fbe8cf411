"""Small random models in vLLM's engine, and what Transformers computes for the same tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MptConfig,
    MptForCausalLM,
)
from transformers.models.falcon import modeling_falcon

import linbias

VOCABULARY, WIDTH, LAYERS, HEADS = 320, 192, 2, 6
PROMPTS = (300, 41, 130)  # tokens: more than two of the engine's pages, less than one, and between
_PROJECTIONS = "query_key_value.weight", "Wqkv.weight"
_OUT = "attention.dense.weight", "out_proj.weight"


def save_model(kind: str, folder: Path, factor: float = 12.0) -> None:
    """Write a model whose tokens depend on what its attention reads.

    With this factor on queries and keys some far keys outweigh their bias: the length of keys
    decides what has to be read.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH}
    named = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model: Any
    if kind == "bloom":
        config = BloomConfig(**sizes, n_layer=LAYERS, n_head=HEADS, seq_length=4096)
        model = BloomForCausalLM(config)
    elif kind == "mpt":
        mpt = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_seq_len": 4096}
        model = MptForCausalLM(MptConfig(**mpt, n_layers=LAYERS, n_heads=HEADS))
    elif kind == "falcon":  # as falcon-rw
        kinds = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        model = FalconForCausalLM(FalconConfig(**sizes, **named, **kinds))
    else:  # no linear biases
        model = GPT2LMHeadModel(GPT2Config(**sizes, **named))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(factor if name.endswith(_PROJECTIONS) else 5 if name.endswith(_OUT) else 1)
    model.save_pretrained(folder)


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def engine(folder: Path, **options: Any) -> Any:
    """The engine in this process, reading prompts in parts of 128 tokens."""
    from vllm import LLM

    defaults = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    lengths = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return LLM(str(folder), **{**defaults, **lengths, **options})


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    log_probabilities: Tensor | None = None  # [tokens], of these tokens


def ask(llm: Any, prompts: Sequence[list[int]], tokens: int = 32, **options: Any) -> list[Answer]:
    """The answers to all prompts at once, greedy unless said otherwise."""
    from vllm import SamplingParams

    asked = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(max_tokens=tokens, **{**asked, **options})
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        as_answer(prompt, output)
        for prompt, result in zip(prompts, llm.generate(given, sampling), strict=True)
        for output in result.outputs
    ]


def as_answer(prompt: list[int], output: Any) -> Answer:
    steps = zip(output.token_ids, output.logprobs, strict=True)
    chosen = [told[token].logprob for token, told in steps]
    return Answer(prompt, list(output.token_ids), torch.tensor(chosen))


class Expected(NamedTuple):
    tokens: list[int]  # the likeliest after each token of the answer before
    log_probabilities: Tensor  # of the tokens of the answer


@torch.no_grad()
def by_transformers(folder: Path, answer: Answer, attention: str = "eager") -> Expected:
    """What Transformers' model says of an answer in float32, token by token."""
    how = {"attn_implementation": attention, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    logits = model(torch.tensor([answer.prompt + answer.tokens])).logits[0]
    told = logits[len(answer.prompt) - 1 : -1].log_softmax(-1)
    chosen = told.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return Expected(told.argmax(-1).tolist(), chosen)


def exact_falcon() -> Any:
    """Have Transformers' Falcon add the bias of the definition, in place of one in bfloat16."""

    def bias(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        slopes = torch.tensor(linbias.slopes(num_heads))[:, None, None]
        return (slopes * torch.arange(mask.shape[1])).to(dtype)  # [H, 1, S]: one text

    return mock.patch.object(modeling_falcon, "build_alibi_tensor", bias)
