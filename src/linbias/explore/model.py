"""Which trained models the page shows on which text, and what the text's tokens are.

`reading.py` measures what one model makes of the text.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from linbias.explore import reading
from linbias.explore.reading import Ids
from linbias.methods import METHODS
from linbias.models.limits import position_limit
from linbias.models.loading import Files, encode, load, load_tokenizer

MAX_WEIGHTS = 3 * 2**20  # of all models: 6 MiB, which are 8 MiB in the text of the page
MAX_TOKENS = 1024
_DIGITS = 5  # decimals of bits and of probabilities
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def read(model: str | Path, text: Path, *, limit_tokens: int = 256) -> dict[str, Any]:
    """Do what `linbias.explore.read_model` says."""
    if not 1 <= limit_tokens <= MAX_TOKENS:
        raise ValueError(f"explore: limit_tokens must be in [1, {MAX_TOKENS}], got {limit_tokens}")
    content, has_more = _read_text(text, num_bytes=64 * limit_tokens)
    main, folders = _models_of_run(model)
    files = Files.at("explore", main, "model")
    loaded = load(files, device="cpu").float()
    if loaded.config.is_encoder_decoder:
        raise ValueError(
            f"explore: model must read one text, got {main}, which reads one and writes another"
        )
    ids = encode(files, content).astype(np.int64)
    if not len(ids):
        raise ValueError(f"explore: text must hold at least one token, got none in {text}")
    num_tokens, why = _part_shown(loaded, ids, limit_tokens)
    notes = [why] if why else []
    shown = _Text(content, ids[:num_tokens], load_tokenizer(files))

    summaries = {main: _summary(loaded, main, shown, MAX_WEIGHTS)}
    for folder in folders:
        if folder != main:
            room = MAX_WEIGHTS - sum(one["num_weights"] for one in summaries.values())
            try:
                summaries[folder] = _summary(_load_beside(folder, shown), folder, shown, room)
            except ValueError as error:
                name = _name(folder)
                notes.append(f"{name} is left out: {str(error).replace(folder, name)}.")
    order = [folder for folder in folders if folder in summaries]
    return {
        "text": text.name,
        "whole": num_tokens == len(ids) and not has_more,
        "notes": notes,
        "tokens": [_readable(token) for token in shown.tokens],
        "places": [shown.index_of(i) for i in shown.ids.tolist()],  # of the tokens in `vocabulary`
        "separator": " " if "WordPiece" in _decoder(shown.tokenizer) else "",
        "unit": "token" if shown.sizes is None else "byte",
        "vocabulary": shown.names,
        "blind": math.log2(loaded.config.get_text_config().vocab_size),  # bits of a blind guess
        "models": [summaries[folder] for folder in order],
        "chosen": order.index(main),
    }


def _models_of_run(model: str | Path) -> tuple[str, list[str]]:
    """The model to show, and it with those that differ in their method alone, ordered as METHODS.

    Of a run it is the first with linear biases, or else the first one.
    """
    path = Path(model).resolve()
    of_run = (path / "models").is_dir() and not _is_finished(path)
    methods = _methods_in(path / "models" if of_run else path.parent)
    if not of_run and path not in methods:
        return str(model), [str(model)]

    def rank(folder: Path) -> tuple[Any, ...]:
        method, length, seed = methods[folder]
        return seed, length, not METHODS[method].linear

    main = min(filter(_is_finished, methods), key=rank, default=None) if of_run else path
    if main is None:
        raise ValueError(f"explore: model must be a run with a finished model, got {model}")
    same = [folder for folder in methods if methods[folder][1:] == methods[main][1:]]
    return str(main), [str(folder) for folder in same]


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _methods_in(folder: Path) -> dict[Path, tuple[str, int, int]]:
    """Method, training length and seed of the models in a run's `models`, ordered as METHODS."""
    methods = {}
    for method in METHODS if folder.name == "models" else ():
        for path in sorted(folder.glob(f"{method}-L*-s*")):
            if match := re.fullmatch(r"-L(\d+)-s(\d+)", path.name.removeprefix(method)):
                methods[path] = method, int(match[1]), int(match[2])
    return methods


def _name(folder: str) -> str:
    """A folder's name, not where it lies on somebody's machine; of the Hub the whole."""
    return Path(folder).resolve().name if Path(folder).is_dir() else folder


def _load_beside(folder: str, shown: _Text) -> PreTrainedModel:
    if not _is_finished(Path(folder)):
        raise ValueError("its training has not finished")
    files = Files.at("explore", folder, "model")
    ids = encode(files, shown.content)[: len(shown.ids)]
    if not np.array_equal(ids, shown.ids):
        raise ValueError("its tokenizer makes other tokens of the text")
    return load(files, device="cpu").float()


def _read_text(path: Path, num_bytes: int) -> tuple[bytes, bool]:
    """The beginning of a text in whole characters, and whether there is more of it."""
    try:
        with open(path, "rb") as file:
            data = file.read(num_bytes + 1)
    except OSError as error:
        reason = f"{path} ({error.strerror or error})"
        raise ValueError(f"explore: text must be a file that can be read, got {reason}") from error
    has_more = len(data) > num_bytes
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = decoder.decode(data[:num_bytes], final=not has_more)
    except UnicodeDecodeError as error:
        place = f"{error.start} of {path}"
        raise ValueError(f"explore: text must be UTF-8, got another byte at {place}") from error
    if not text:
        raise ValueError(f"explore: text must hold at least one token, got the empty file {path}")
    return text.encode(), has_more


def _part_shown(model: PreTrainedModel, ids: Ids, limit_tokens: int) -> tuple[int, str | None]:
    """How many tokens the page shows, and why no more, where the reader set no such limit."""
    num_tokens, why = min(len(ids), limit_tokens), None
    limit = position_limit(model)
    if limit is not None and limit < num_tokens:
        num_tokens, why = limit, "the model has no rows for later positions."
    fitting = most_tokens(*reading.shape_of(model, ids))
    if fitting < num_tokens:
        num_tokens, why = fitting, f"it holds {MAX_WEIGHTS:,} weights."
    return num_tokens, why and f"The page shows the first {num_tokens:,} tokens: {why}"


def _num_weights(num_tokens: int, causal: bool) -> int:
    return num_tokens * (num_tokens + 1) // 2 if causal else num_tokens**2


def most_tokens(num_matrices: int, causal: bool) -> int:
    """How many tokens the page can hold of so many matrices, at least 1."""
    each = MAX_WEIGHTS // num_matrices
    T = math.isqrt(2 * each if causal else each)
    return max(1, T - (_num_weights(T, causal) > each))


@dataclass
class _Text:
    """The part of a text that the page shows, and tokens' `names`, each of them once."""

    content: bytes
    ids: Ids
    tokenizer: PreTrainedTokenizerBase
    names: list[str] = field(default_factory=list)
    _indices: dict[int, int] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> list[bytes]:
        return token_bytes(self.tokenizer, self.ids.tolist())

    @cached_property
    def sizes(self) -> list[int] | None:
        """Bytes that each token stands for; None where tokens are not the text's own bytes."""
        is_text = self.content.startswith(b"".join(self.tokens).removeprefix(b" "))
        return [len(token) for token in self.tokens] if is_text else None

    def index_of(self, id: int) -> int:
        """The index of a token's name."""
        if id not in self._indices:
            self._indices[id] = len(self.names)
            self.names.append(_readable(*token_bytes(self.tokenizer, [id])))
        return self._indices[id]


def _decoder(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(getattr(tokenizer, "backend_tokenizer", tokenizer).decoder)


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> list[bytes]:
    """What each token stands for; of byte-level tokenizers bytes that need not be characters."""
    pieces: list[str] = tokenizer.convert_ids_to_tokens(list(ids))
    decoder = _decoder(tokenizer)

    def content(id: int, piece: str) -> bytes:
        if "ByteLevel" in decoder and _BYTE_OF.keys() >= set(piece):
            return bytes(map(_BYTE_OF.__getitem__, piece))
        if "ByteLevel" in decoder:
            return piece.encode()
        if "▁" in decoder and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        if "▁" in decoder:  # SentencePiece
            return piece.replace("▁", " ").encode()
        return tokenizer.decode([id], clean_up_tokenization_spaces=False).encode()

    return list(map(content, ids, pieces))


def _readable(token: bytes) -> str:
    """A token as text; a byte that is no character is written as in Python, \\xe2."""
    return token.decode("utf-8", "backslashreplace")


def _summary(model: PreTrainedModel, folder: str, shown: _Text, room: int) -> dict[str, Any]:
    """What the page shows of one model on as much of the text as it can read.

    With room for too few weights they are left out.
    """
    ids = shown.ids[: position_limit(model)]
    weights, logits = reading.run(model, ids)
    num_matrices, causal = reading.shape_of(model, ids)
    left, right = reading.slopes_of(model, len(ids)) or (None, None)
    reach_alone = departure = None
    if left is not None:
        alone = reading.weights_of_bias(left, right, len(ids), causal)
        reach_alone = reading.reach(alone[None])[0]
        departure = reading.departure(weights, alone).tolist()
    num_weights = num_matrices * _num_weights(len(ids), causal)
    fits = num_weights <= room
    method = getattr(model.config, "method", getattr(model.config, "position", None))
    kind = method or model.config.model_type
    train_length = getattr(model.config, "train_length", None)
    return {
        "name": _name(folder),
        "method": method if method in METHODS else None if left is None else "alibi",
        "note": _note(kind, causal, left is not None, logits is not None),
        "num_tokens": len(ids),
        "num_layers": weights.shape[0],
        "num_heads": weights.shape[1],
        "causal": causal,
        "slopes": _finite(left),  # [H] or None
        "right_slopes": _finite(right),
        "num_weights": num_weights if fits else 0,
        "weights": reading.pack(weights, causal) if fits else None,
        "reach": reading.reach(weights),
        "alone": reach_alone,  # of each head's bias without any content
        "departure": departure,  # of each layer and head from it
        "train_length": train_length,
        **_expected(logits if causal else None, ids, shown, train_length),
    }


def _expected(logits: Any, ids: Ids, shown: _Text, train_length: int | None) -> dict[str, Any]:
    """What a causal model expected of the text: `bits`, `losses`, `guesses`."""
    if logits is None:
        return {"bits": None, "losses": None, "guesses": None}
    bits, guesses, probabilities = reading.forecast(logits, ids)
    sizes = shown.sizes or [1] * len(ids)

    def guess(id: int, probability: float) -> list[float]:
        return [shown.index_of(id), round(probability, _DIGITS)]

    rows = zip(guesses.tolist(), probabilities.tolist(), strict=True)
    return {
        "bits": [None, *(round(x, _DIGITS) for x in bits.tolist())],
        "losses": reading.losses(bits, sizes[: len(ids)], train_length),
        "guesses": [list(map(guess, *row)) for row in rows],
    }


def _note(kind: str, causal: bool, has_slopes: bool, has_logits: bool) -> str | None:
    """What to know of a model that is not what the page is made for."""
    notes = []
    if not has_slopes:
        notes.append(
            f"This model ({kind}) has no linear biases by distance alone, so that its heads have "
            "no slopes: what is shown is the reach that they learned."
        )
    if not causal:
        notes.append(
            "This model is not causal: a row also weighs the keys after the query, distances "
            "count both ways, and there is no next token to guess, so that there are no losses."
        )
    elif not has_logits:
        notes.append("This model has no output for the next token, so that there are no losses.")
    return " ".join(notes) or None


def _finite(slopes: npt.NDArray[np.float64] | None) -> list[float | None] | None:
    """Slopes as JSON knows them: None for a side that is hidden."""
    return None if slopes is None else [x if math.isfinite(x) else None for x in slopes.tolist()]
