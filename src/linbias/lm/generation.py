"""Text that a language model writes after a prompt."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import TextStreamer

from linbias.lm.checkpoints import open_model
from linbias.lm.streaming import stream as stream_tokens
from linbias.models.decoder.seq2seq import LinbiasForConditionalGeneration
from linbias.models.loading import load_tokenizer
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

    Args:
        path: As for `linbias.models.load`; or the folder of a run that has not finished, whose
            newest undamaged checkpoint is read.
        prompt: Not empty; text that UTF-8 can write.
        max_new_tokens: Tokens to write at most; the model may end the text earlier.
        temperature: Divides the logits before sampling; 0 always takes the likeliest token.
        top_k: Sample among the k likeliest tokens; 0: among all.
        seed: Sets PyTorch's generator; the same seed writes the same text.
        stream: Print the text as it is written, after a prompt of at most 200 characters.

    Returns:
        The prompt and its continuation.

    Raises:
        ValueError: An argument breaks a rule above, or there is no such causal model.
    """
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    model, tokenizer, inputs = _opened(path, prompt, temperature, top_k)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": top_k}
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
    model, tokenizer, inputs = _opened(path, prompt, temperature, top_k)
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


def _opened(path: str | Path, prompt: str, temperature: float, top_k: int) -> tuple[Any, Any, Any]:
    """Model, tokenizer and tokens of a prompt, once all are known to be good."""
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
    if not model.can_generate() or isinstance(model, LinbiasForConditionalGeneration):
        why = "reads one text to write another (its own generate does)"
        if not model.can_generate():
            why = "tells masked tokens from both sides"
        raise ValueError(f"generate: path must hold a causal model, got {path}, which {why}")
    try:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    except Exception as error:  # the library raises its own kind for a word that has no token
        raise ValueError(
            "generate: prompt must be text that the model's tokenizer reads, got "
            f"{prompt!r} ({error})"
        ) from error
    return model, tokenizer, inputs.to(model.device)
