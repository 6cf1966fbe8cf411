"""Models and tokenizers from a folder or the Hugging Face Hub, or one clear error.

Nothing that is loaded is executed: weights are safetensors, or pickles read with weights_only. What a folder's
`model_type` says about its text: all come with what `AutoTokenizer` asks for; the words of a `linbias-paper` model
are in its dict.txt as well.
"""

import io
import json
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from linbias._run.hub import caches_if_unreachable
from linbias.data.dictionary import Dictionary
from linbias.data.tokenizers import Tokenizer
from linbias.models.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.fields import check_sizes
from linbias.models.fused.mpt_model import (
    LinbiasMptConfig,
    LinbiasMptForCausalLM,
    runs_in_transformers,
)
from linbias.models.paper_config import PaperConfig


def load_model(path: str | Path, *, device: torch.device | str | None = None) -> PreTrainedModel:
    """Load a language model, ready to evaluate, from a folder or a Hugging Face model id.

    A checkpoint that is damaged, or that lacks weights (which Transformers alone would replace by
    random ones), is refused.

    Args:
        path: A folder with config.json and weights, or a model id such as "gpt2".
        device: None means the first CUDA device, or else the CPU.

    Returns:
        The model, in evaluation mode: `LinbiasForConditionalGeneration` where the configuration is that of one,
        `LinbiasForMaskedLM` where it says that the model reads in both directions, else a causal one.

    Raises:
        ValueError: There is no such model, or it cannot be read whole.
    """
    _check_path("load_model", path)
    try:
        with no_bars(), caches_if_unreachable(path):
            config, kind = _config_and_class(path)
            check_sizes(config.get_text_config())
            model, info = kind.from_pretrained(
                str(path),
                config=config,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # said below, with names
            )
    except pickle.UnpicklingError as error:  # its own words advise to run what is in the file
        reason = ValueError("its weights are damaged, or ask for code, which was not run")
        raise _cannot_read("load_model", path, reason) from error
    except Exception as error:  # damaged or hostile files can raise anything
        raise _cannot_read("load_model", path, error) from error
    if info["mismatched_keys"]:
        name, stored, wanted = min(info["mismatched_keys"])
        raise ValueError(
            f"load_model: config.json of {str(path)!r} must fit its weights, got {name} of shape {list(stored)} where it "
            f"asks for {list(wanted)}"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"load_model: {str(path)!r} lacks {len(missing)} weights of its model, "
            f"the first {missing[0]}"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()


def _auto_class(config: PreTrainedConfig) -> Any:
    if isinstance(config, LinbiasSeq2SeqConfig):
        return AutoModelForSeq2SeqLM
    reads_both_ways = getattr(config, "encoder_position", None) is not None
    return AutoModelForMaskedLM if reads_both_ways else AutoModelForCausalLM


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or Hugging Face model id.

    Args:
        path: As for `load_model`.

    Raises:
        ValueError: There is none, or it cannot be read.
    """
    _check_path("load_tokenizer", path)
    if _model_type(path) == PaperConfig.model_type and not Path(path, "tokenizer.json").is_file():
        raise ValueError(
            f"load_tokenizer: path must hold the tokenizer.json of its words, got {str(path)!r} without "
            "(`linbias paper convert --dict` writes it)"
        )
    try:
        with caches_if_unreachable(path):
            # Without a configuration it would read that of the folder.
            return AutoTokenizer.from_pretrained(
                str(path), config=_own_mpt_config(path), trust_remote_code=False
            )
    except Exception as error:  # damaged or hostile files can raise anything
        raise _cannot_read("load_tokenizer", path, error) from error


def encode(path: str | Path, text: bytes) -> NDArray[Any]:
    """Turn a text of any size into the tokens of a model, without special tokens.

    The tokens are those that the model's own training made of its text; each line of a `linbias-paper` model's
    text ends in </s>.

    Args:
        path: As for `load_model`.
        text: UTF-8.

    Returns:
        [tokens], integers.

    Raises:
        ValueError: The model has no readable tokenizer, or the text is not UTF-8.
    """
    _check_path("encode", path)
    model_type = _model_type(path)
    if model_type in (LinbiasConfig.model_type, LinbiasSeq2SeqConfig.model_type):
        return Tokenizer.load(path).encode(text)
    if model_type == PaperConfig.model_type:
        words = Dictionary.read(Path(path, "dict.txt"))
        lines = map(words.encode_line, io.StringIO(text.decode(), newline=None))
        return np.fromiter((word for line in lines for word in line), np.int64)
    ids = load_tokenizer(path)(text.decode(), add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, np.int64)


def _config_and_class(path: str | Path) -> tuple[PreTrainedConfig, Any]:
    """The configuration at a path, and what loads its model."""
    if (own := _own_mpt_config(path)) is not None:
        return own, LinbiasMptForCausalLM
    config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    return config, _auto_class(config)


def _own_mpt_config(path: str | Path) -> LinbiasMptConfig | None:
    """That of an MPT model which Transformers refuses or leaves parts out of; None for all other models."""
    settings, _ = PreTrainedConfig.get_config_dict(str(path))
    if settings.get("model_type") != "mpt" or runs_in_transformers(settings):
        return None
    return LinbiasMptConfig.from_dict(settings)


def _model_type(path: str | Path) -> str | None:
    """What config.json says; None for a model id, and where the file is no such record."""
    try:
        record = json.loads(Path(path, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return record.get("model_type") if isinstance(record, dict) else None


def _check_is_record(function: str, path: str | Path) -> None:
    """Refuse a config.json that holds something else than a JSON object."""
    try:
        record = json.loads(Path(path, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # a model id, or a file that Transformers refuses
    if not isinstance(record, dict):
        reason = ValueError(f"config.json must hold a JSON object, got {record!r:.40}")
        raise _cannot_read(function, path, reason)


def _check_path(function: str, path: str | Path) -> None:
    """Refuse a path that is neither a model's folder nor looks like an id of the Hub."""
    may_be_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(path)) and not Path(path).exists()
    if not may_be_id and not Path(path, "config.json").is_file():
        raise ValueError(
            f"{function}: path must be a folder with a config.json, got {str(path)!r}"
        )
    _check_is_record(function, path)


def _cannot_read(function: str, path: str | Path, error: Exception) -> ValueError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if not Path(path).exists():
        reason = f"there is no such folder, and on the Hugging Face Hub: {reason}"
    return ValueError(f"{function}: cannot read a model at {str(path)!r}: {reason}")


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep Transformers from drawing a progress bar while it loads or saves; warnings are left alone."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
