"""The paper's model as a family that `linbias.models.load` reads."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linbias.models.families import own_family
from linbias.paper.config import PaperConfig
from linbias.paper.dictionary import Dictionary
from linbias.paper.model import PaperForCausalLM, PaperModel


def _encoder(folder: str) -> Callable[[bytes], NDArray[Any]]:
    """What turns a text into the ids of its words, and </s> at the end of each line."""
    words = Dictionary.read(Path(folder, "dict.txt"))

    def encode_lines(text: bytes) -> NDArray[Any]:
        lines = map(words.encode_line, io.StringIO(text.decode(), newline=None))
        return np.fromiter((word for line in lines for word in line), np.int64)

    return encode_lines


FAMILY = own_family(
    PaperConfig,
    {"causal": PaperForCausalLM, "base": PaperModel},
    encoder=_encoder,
    needs_tokenizer_json="linbias paper convert --dict",
)
