"""A GGUF file as `load` sees it: settings, as a config.json would hold them, and weights.

Transformers reads it; the only architecture with ALiBi that it knows what to make of is BLOOM.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize
from transformers.integrations.gguf.reader import (
    GgufHeader,
    load_gguf_state_dict,
    read_gguf_metadata,
)

from linbias.models.gguf.architectures import ARCHITECTURES, Architecture, Metadata, Weights
from linbias.models.gguf.tokenizer import read_tokenizer

# By number, the types of tensors that are read, and the names of others.
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_Q8_0 = 8
_TYPE_NAMES = GGML_NAME | {
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: Metadata
    header: GgufHeader

    @classmethod
    def at(cls, path: Path) -> "GgufFile":
        """Read all but the numbers of the tensors."""
        try:
            values, _ = read_gguf_metadata(str(path))
            _check_whole_model(values)
            header = GgufHeader.from_file(str(path))
        except (struct.error, UnicodeDecodeError, ArithmeticError) as error:
            raise ValueError("the file is cut short or damaged") from error
        except ValueError as error:
            if number := re.search(r"ggml type (\d+)", str(error)):
                _refuse_type("tensors", int(number[1]))
            raise
        for info in header.tensors:
            if info.ggml_type not in (*_DTYPES, _Q8_0):
                _refuse_type(info.name, info.ggml_type)
        ends = [header.data_start + info.offset + info.nbytes for info in header.tensors]
        if (last := max(ends, default=0)) > (size := path.stat().st_size):
            raise ValueError(f"the file is cut short: it must have {last} bytes, got {size}")
        return cls(path, Metadata(values), header)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the config.json of such a model would hold."""
        shapes = {info.name: info.shape for info in self.header.tensors}
        if "token_embd.weight" not in shapes:
            raise ValueError("the file must hold token_embd.weight, which it lacks")
        found = {
            "vocab_size": shapes["token_embd.weight"][0],
            "tie_word_embeddings": self._has_tied_output(),
            **self._architecture.settings(self.metadata, shapes),
        }
        for name in ("bos", "eos", "padding"):
            token = self.metadata.values.get(f"tokenizer.ggml.{name}_token_id")
            if token is not None:
                found[f"{name.removesuffix('ding')}_token_id"] = token
        return found

    def look(self) -> Weights:
        """The weights by name, without their numbers: on the device "meta"."""
        return self._weights(
            {
                info.name: torch.empty(
                    info.shape, dtype=_DTYPES.get(info.ggml_type, torch.float32), device="meta"
                )
                for info in self.header.tensors
            }
        )

    def read(self, dtype: torch.dtype) -> Weights:
        """The weights by name, on the CPU; those of 8 bits become `dtype`."""
        stored, weights = load_gguf_state_dict(self.header), {}
        for info in self.header.tensors:
            tensor = stored[info.name][...]
            if info.ggml_type == _Q8_0:
                tensor = dequantize(tensor.flatten(), _Q8_0).to(dtype).reshape(info.shape)
            weights[info.name] = tensor
        return self._weights(weights)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self.path, self.metadata.values)

    @property
    def _architecture(self) -> Architecture:
        return ARCHITECTURES[self.metadata.architecture]

    def _weights(self, tensors: Weights) -> Weights:
        """Under the names of the family, but those that are not known, for an error to name."""
        self._architecture.lay_out(tensors, self.metadata)
        return {_renamed(name, self._architecture.names): x for name, x in tensors.items()}

    def _has_tied_output(self) -> bool:
        """Whether the output weights are those of the embedding: left out, or written twice."""
        stored = load_gguf_state_dict(self.header)
        if "output.weight" not in stored:
            return True
        embedding, output = stored["token_embd.weight"], stored["output.weight"]
        is_alike = embedding.ggml_type == output.ggml_type
        return is_alike and np.array_equal(embedding.data, output.data)


def _check_whole_model(values: Mapping[str, Any]) -> None:
    name = values["general.architecture"]
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        more = " (in GGUF files it has rotary positions only)" if name == "falcon" else ""
        raise ValueError(
            f"general.architecture must be one with ALiBi that is known ({known}), "
            f"got {name!r}{more}"
        )
    parts = values.get("split.count", 1)
    if parts != 1:
        raise ValueError(
            f"split.count must be 1, got {parts}: `llama-gguf-split --merge` joins the parts"
        )


def _refuse_type(name: str, number: int) -> None:
    kind = _TYPE_NAMES.get(number, f"type {number}")
    raise ValueError(f"{name} must be F32, F16, BF16 or Q8_0, got {kind}")


def _renamed(name: str, names: Mapping[str, str]) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    number = layer[1] if layer else ""
    module, _, kind = name.rpartition(".")
    if layer:
        module = "blk.{}." + module.removeprefix(layer[0])
    return f"{names[module].format(number)}.{kind}" if module in names else name
