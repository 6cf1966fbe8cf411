"""Text that a language model writes after a prompt."""

from pathlib import Path

import torch
from transformers import TextStreamer

from linbias.models.load import encode, load_model, load_tokenizer

_LONG = 200  # characters of a prompt that is not printed again


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
        path: As for `load_model`.
        prompt: Not empty; text that UTF-8 can write.
        max_new_tokens: Tokens to write at most; the model may end the text earlier.
        temperature: Divides the logits before sampling; 0 always takes the likeliest token.
        top_k: Sample among the k likeliest tokens; 0: among all.
        seed: Sets PyTorch's generator; the same seed writes the same text.
        stream: Print the text as it is written, after a prompt of at most 200 characters.

    Returns:
        The prompt and its continuation.

    Raises:
        ValueError: An argument breaks a rule above, or there is no such model.
    """
    if not prompt:
        raise ValueError("generate: prompt must not be empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "generate: prompt must be text that UTF-8 can write, got "
            f"{prompt[error.start]!a} at character {error.start}"
        ) from error
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    if temperature < 0 or top_k < 0:
        raise ValueError(
            f"generate: temperature and top_k must be at least 0, got {temperature}, {top_k}"
        )
    model, tokenizer = load_model(path), load_tokenizer(path)
    if not model.can_generate():
        raise ValueError(
            f"generate: model must be causal, got {path}, which tells masked tokens from both sides"
        )
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    try:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    except Exception as error:  # the library's own, of a character that has no token
        encode(path, prompt.encode())  # names the character
        raise ValueError(
            f"generate: prompt must be text that the model's tokenizer reads, got {prompt!r} ({error})"
        ) from error
    ids = model.generate(
        **inputs.to(model.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=len(prompt) > _LONG) if stream else None,
        **(sampling if temperature else {"do_sample": False}),
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
