"""Text that a language model writes after a prompt, or in its gaps."""

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import TextStreamer

from linbias.data.segments import SpanTokens
from linbias.data.tokenizers import Tokenizer
from linbias.lm.checkpoints import open_model
from linbias.lm.streaming import stream as stream_tokens
from linbias.models.decoder.seq2seq import LinbiasForConditionalGeneration
from linbias.models.loading import Files, encode, load_tokenizer
from linbias.models.window_cache.cache import WindowCache

LONG = 200  # a prompt with more characters is not printed again


def generate(
    path: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    stream: bool = False,
) -> str:
    """Continues a prompt with a model from a folder or the Hugging Face Hub.

    A sequence-to-sequence model of linbias writes the spans that <extra_id_0>, <extra_id_1> and so
    on stand for.

    Args:
        path: As for `linbias.models.load`; or the folder of a run that has not finished, whose
            newest undamaged checkpoint is read.
        prompt: Not empty; text that UTF-8 can write.
        max_new_tokens: Tokens to write at most; the model may end the text earlier.
        temperature: Divides the logits before sampling; 0 always takes the likeliest token.
        top_k: Sample among the k likeliest tokens; 0: among all.
        seed: Sets PyTorch's generator; the same seed writes the same text.
        stream: Print the text as it is written, after a prompt of at most 200 characters; with
            gaps filled in, at the end.

    Returns:
        The prompt and its continuation; or the prompt with its gaps filled in, as far as the model
        wrote something for them.

    Raises:
        ValueError: An argument breaks a rule above, there is no such model, or the prompt of a
            sequence-to-sequence model has no gap.
    """
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    files, model, tokenizer, inputs = _opened(path, prompt, temperature, top_k)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": top_k}
    if isinstance(model, LinbiasForConditionalGeneration):
        tokens = SpanTokens.of(Tokenizer.load(files.name))
        written = _with_spans(model, inputs["input_ids"][0].tolist(), tokens, options)
        text = str(tokenizer.decode(written))
        if stream:
            print(text)
        return text
    ids = model.generate(
        **inputs,
        streamer=TextStreamer(tokenizer, skip_prompt=len(prompt) > LONG) if stream else None,
        **options,
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def generate_endlessly(
    path: str | Path,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> tuple[Iterator[str], WindowCache]:
    """What `generate` writes after a prompt, without an end; and the cache, all that is kept."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    _, model, tokenizer, inputs = _opened(path, prompt, temperature, top_k)
    if isinstance(model, LinbiasForConditionalGeneration):
        raise ValueError(
            f"generate: path must hold a causal model for a text without an end, got {path}"
        )
    ids, cache = inputs["input_ids"][0].tolist(), WindowCache.for_model(model)
    torch.manual_seed(seed)
    tokens = stream_tokens(model, ids, temperature=temperature, top_k=top_k, cache=cache)
    return _decoded(tokenizer, ids, islice(tokens, max_new_tokens)), cache


def _decoded(tokenizer: Any, before: list[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens that follow others, as soon as a character is whole."""
    decoder, waiting = DecodeStream(before, skip_special_tokens=True), []
    for token in tokens:
        waiting.append(token)
        if piece := decoder.step(tokenizer.backend_tokenizer, token):
            waiting = []
            yield piece
    yield tokenizer.decode(waiting, skip_special_tokens=True)


def _opened(
    path: str | Path, prompt: str, temperature: float, top_k: int
) -> tuple[Files, Any, Any, Any]:
    """Files, model, tokenizer and tokens of a prompt, once all are known to be good."""
    if not prompt:
        raise ValueError("generate: prompt must not be empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "generate: prompt must be text that UTF-8 can write, got "
            f"{prompt[error.start]!a} at character {error.start}"
        ) from error
    if temperature < 0 or top_k < 0:
        raise ValueError(
            f"generate: temperature and top_k must be at least 0, got {temperature}, {top_k}"
        )
    files, model = open_model("generate", path, "path")
    tokenizer = load_tokenizer(files)
    if not model.can_generate():
        raise ValueError(
            f"generate: path must hold a causal model, got {path}, which tells masked tokens from "
            "both sides"
        )
    try:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    except Exception as error:  # the library raises its own kind for a character that has no token
        encode(files, prompt.encode())  # names the character
        raise ValueError(
            "generate: prompt must be text that the model's tokenizer reads, got "
            f"{prompt!r} ({error})"
        ) from error
    return files, model, tokenizer, inputs.to(model.device)


def _with_spans(
    model: LinbiasForConditionalGeneration,
    prompt: list[int],
    tokens: SpanTokens,
    options: dict[str, Any],
) -> list[int]:
    """A prompt in which each sentinel is replaced by what the model wrote for it."""
    if not set(prompt) & set(tokens.sentinels):
        raise ValueError(
            "generate: prompt must hold <extra_id_0> where the model is to write, got none"
        )
    read = torch.tensor([[tokens.begin, *prompt]], device=model.device)
    said = model.generate(read, attention_mask=torch.ones_like(read), **options)[0].tolist()
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in said[1:]:  # after the one that the decoder starts with
        if token == tokens.end:
            break
        if token in tokens.sentinels:
            span = []
            spans.setdefault(token, span)
        else:
            span.append(token)
    if not any(spans.get(token) for token in prompt):
        warnings.warn(
            "generate: the model wrote nothing for any gap of the prompt: another seed or "
            "temperature may help, or longer training",
            stacklevel=3,
        )
    return [new for token in prompt for new in spans.get(token, [token])]
