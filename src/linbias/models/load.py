"""Models and tokenizers from a folder or the Hugging Face Hub, or one clear error.

Nothing that is loaded is executed: weights are safetensors, or pickles read with weights_only.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from linbias.data.tokenizers import Tokenizer

# What Transformers raises for a missing, truncated, garbled or misshapen file.
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)


def load_model(path: str | Path, *, device: torch.device | str | None = None) -> PreTrainedModel:
    """Load a causal language model, ready to evaluate, from a folder or a Hugging Face model id.

    A checkpoint that is damaged, or that lacks weights (which Transformers alone would replace by
    random ones), is refused.

    Args:
        path: a folder with config.json and weights, or a model id such as "gpt2".
        device: None is the first CUDA device, or else the CPU.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: there is no such model, or it cannot be read whole.
    """
    _check_place("load_model", path)
    try:
        with no_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(path), trust_remote_code=False, weights_only=True, output_loading_info=True
            )
    except _LOADING_ERRORS as error:
        raise _cannot_read("load_model", path, error) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"load_model: {str(path)!r} lacks {len(missing)} weights of its model, "
            f"the first {missing[0]}"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or Hugging Face model id.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    _check_place("load_tokenizer", path)
    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise _cannot_read("load_tokenizer", path, error) from error


def encode(path: str | Path, text: bytes) -> NDArray[Any]:
    """Turn a text of any size into the tokens of a model, without special tokens.

    Args:
        path: as for `load_model`.
        text: UTF-8.

    Returns:
        [tokens], integers.

    Raises:
        ValueError: the model has no readable tokenizer, or the text is not UTF-8.
    """
    config = Path(path, "config.json")
    if config.is_file() and json.loads(config.read_text())["model_type"] == "linbias":
        return Tokenizer.load(path).encode(text)  # in pieces, as in training
    ids = load_tokenizer(path)(text.decode(), add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, np.int64)


def _check_place(function: str, path: str | Path) -> None:
    """A folder has to be a model's; what is no path may be an id."""
    may_be_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(path)) and not Path(path).exists()
    if not may_be_id and not Path(path, "config.json").is_file():
        raise ValueError(
            f"{function}: path must be a folder with a config.json, got {str(path)!r}"
        )


def _cannot_read(function: str, path: str | Path, error: Exception) -> ValueError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return ValueError(f"{function}: cannot read a model at {str(path)!r}: {reason}")


@contextmanager
def no_bars() -> Iterator[None]:
    """Keeps Transformers from drawing a bar for what it loads or saves; warnings are left alone."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
