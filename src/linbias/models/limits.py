"""How long an input a model can read, of any family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from linbias.methods import METHODS
from linbias.models.decoder.config import LinbiasConfig

_DEFAULT_LENGTH = 1024  # of a model whose configuration says nothing
# The names under which configurations say for which length a model was made.
_STATED = ("train_length", "n_positions", "max_position_embeddings", "max_seq_len", "seq_length")
_TABLES = ("wpe", "embed_positions", "position_embeddings")


def stated_length(config: PreTrainedConfig) -> int | None:
    """The length that a configuration says its model was made for; None where it says none."""
    lengths = (getattr(config, name, None) for name in _STATED)
    return next((length for length in lengths if isinstance(length, int)), None)


def default_length(model: PreTrainedModel) -> int:
    """The length that a model was trained with, or the one it was made for, 1,024 at most."""
    config = model.config.get_text_config()
    if hasattr(config, "train_length"):
        return int(config.train_length)
    return min(stated_length(config) or _DEFAULT_LENGTH, _DEFAULT_LENGTH)


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest input that the model's learned position table allows; None without one."""
    config = model.config.get_text_config()
    if isinstance(config, LinbiasConfig):
        return int(config.train_length) if METHODS[config.method].has_table else None
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in _TABLES and isinstance(module, nn.Embedding):
            return int(getattr(config, "max_position_embeddings", module.num_embeddings))
    return None


@contextmanager
def able_to_read(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Let a model read inputs of some length within the block, or say that it cannot."""
    config = model.config.get_text_config()
    stated = stated_length(config)
    with _widened(config, length):
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            if stated is None or length <= stated:
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"evaluate: length must be one that the model reads, got {length}; its "
                f"configuration says {stated}, and at {length} it fails ({reason})"
            ) from error


@contextmanager
def _widened(config: PreTrainedConfig, length: int) -> Iterator[None]:
    """MPT makes its bias anew in every forward pass, as a table of `max_seq_len` distances."""
    if config.model_type != "mpt":
        yield
        return
    before = config.max_seq_len
    config.max_seq_len = max(before, length)
    try:
        yield
    finally:
        config.max_seq_len = before
