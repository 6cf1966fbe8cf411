"""Text to numbers and back: bytes, or byte pairs learned from a corpus.

Both encode every text, which decodes to itself; `transformers.AutoTokenizer` reads their files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

KINDS = ("bytes", "bpe")
TokenIds = npt.NDArray[np.unsignedinteger[Any]]

_FILE = "tokenizer.json"
_MASK = "\x1a"
# Characters that texts do not use, in the roles that ASCII gave them. Nothing adds them unasked.
_ROLES = {"pad_token": "\0", "bos_token": "\2", "eos_token": "\3", "mask_token": _MASK}
# The library encodes the pieces of a batch in parallel, which takes much more memory than their
# ids do. So it gets a text in batches of pieces, each of which is made of whole lines.
_PIECE_BYTES = 1 << 14
_BATCH_PIECES = 64


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of which no token crosses a line end, so that a text is encoded part by part."""

    backend: tokenizers.Tokenizer

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size:,})"

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of padding, begin and end of a text, by the names of a model's configuration."""
        ids = {f"{role}_id": self.backend.token_to_id(token) for role, token in _ROLES.items()}
        return {role: id for role, id in ids.items() if id is not None and role != "mask_token_id"}

    @property
    def mask_id(self) -> int | None:
        """The id of the token that stands for a masked one; None where there is none."""
        return self.backend.token_to_id(_MASK)

    def encode(self, text: str | bytes) -> TokenIds:
        """The ids of a string or of UTF-8 bytes, in the narrowest of uint8, uint16 and uint32."""
        data = text.encode() if isinstance(text, str) else text
        if isinstance(self.backend.model, models.BPE) and self.vocab_size == 256:
            return np.frombuffer(data, np.uint8)  # no merges: the ids are the bytes
        dtype = np.min_scalar_type(self.vocab_size - 1)
        ids = [
            np.asarray(piece.ids, dtype)
            for batch in _batches(data)
            for piece in self.backend.encode_batch(batch)
        ]
        return np.concatenate(ids) if ids else np.empty(0, dtype)

    def decode(self, ids: Iterable[int] | TokenIds) -> str:
        """Decodes ids; bytes that form no UTF-8 character become U+FFFD."""
        return str(self.backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and the `tokenizer_config.json` that AutoTokenizer needs."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **_ROLES,
            "padding_side": "left",  # generation goes on from the last token of each row
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        Path(folder, _FILE).write_text(self.backend.to_str(), encoding="utf-8")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        path = Path(folder, _FILE)
        if not path.is_file():
            raise ValueError(f"Tokenizer.load: folder must hold {_FILE}, got {folder}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception for a damaged file
            raise ValueError(f"Tokenizer.load: {path} is damaged ({error})") from error


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose ids are the 256 byte values."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(_special_tokens())
    return Tokenizer(backend)


def train_bpe(text: bytes, vocab_size: int) -> Tokenizer:
    """Learns byte pair encoding of `vocab_size` tokens, with the 256 bytes, from a text."""
    if vocab_size <= 256:
        raise ValueError(f"train_bpe: vocab_size must be above 256 (the bytes), got {vocab_size}")
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=[c for c in _byte_characters() if c not in _ROLES.values()],
        special_tokens=_special_tokens(),
        show_progress=False,
    )
    backend.train_from_iterator(_batches(text), trainer)
    return Tokenizer(backend)


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _special_tokens() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in _ROLES.values()]


def _byte_characters() -> list[str]:
    """The character that stands for each byte: as in GPT-2, itself where it can be seen, and else
    one from 256 on. But a byte with a role stands for itself too, so that a text can have its
    token.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(256)
    characters = [chr(byte if byte in visible else next(spare)) for byte in range(256)]
    return [chr(i) if chr(i) in _ROLES.values() else c for i, c in enumerate(characters)]


def _batches(data: bytes) -> Iterator[list[str]]:
    pieces = _pieces(data)
    while batch := list(islice(pieces, _BATCH_PIECES)):
        yield batch


def _pieces(data: bytes) -> Iterator[str]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _PIECE_BYTES) + 1 or len(data)
        yield data[start:end].decode()
        start = end
