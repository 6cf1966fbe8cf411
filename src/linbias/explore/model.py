"""What the explorer page shows of trained models on a text: of one, and of those that its run trained beside it.

`reading.py` measures what one model makes of the text; here is which models, which text, and what its tokens are.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
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
    """Do what `linbias.explore.read_model` says.

    The values: `text`; `whole`, whether all of it is shown; `notes`, sentences on what is left out; `tokens` and the `separator` between them;
    the `unit` of losses, "byte" or "token"; `vocabulary`, names of tokens, and `places`, those of the text in it; `blind`, the bits of a token
    that is guessed blindly; `models`, each as `_summary` gives it; and `chosen`, which of them was asked for.
    """
    if not 1 <= limit_tokens <= MAX_TOKENS:
        raise ValueError(f"explore: limit_tokens must be in [1, {MAX_TOKENS}], got {limit_tokens}")
    content, has_more = _read_text(text, num_bytes=64 * limit_tokens)
    main, folders = models_of_run(model)
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
    has_more |= num_tokens < len(ids)
    ids, notes = ids[:num_tokens], [why] if why else []
    shown = _Text(content, ids, load_tokenizer(files))

    found = {main: _summary(loaded, main, shown, MAX_WEIGHTS)}
    for folder in folders:
        if folder not in found:
            room = MAX_WEIGHTS - sum(one["num_weights"] for one in found.values())
            try:
                found[folder] = _summary(_load_beside(folder, shown), folder, shown, room)
            except ValueError as error:
                name = _name(folder)
                notes.append(f"{name} is left out: {str(error).replace(folder, name)}.")
    order = [folder for folder in folders if folder in found]
    return {
        "text": text.name,
        "whole": not has_more,
        "notes": notes,
        "tokens": [_readable(token) for token in shown.tokens],
        "places": [shown.vocabulary.place(int(i)) for i in shown.ids],
        "separator": " " if loaded.config.model_type == "linbias-paper" else "",
        "unit": "token" if shown.sizes is None else "byte",
        "vocabulary": shown.vocabulary.names,
        "blind": math.log2(loaded.config.get_text_config().vocab_size),
        "models": [found[folder] for folder in order],
        "chosen": order.index(main),
    }


def models_of_run(model: str | Path) -> tuple[str, list[str]]:
    """Find the model to show, and those of its run that differ from it in their position method alone.

    Args:
        model: The folder of a model, its name on the Hub, or the folder of a run of `linbias extrapolate`, of which
            the first model with linear biases is shown, or else the first one.

    Returns:
        The model, and all that are shown, itself among them, in the order of `METHODS`.

    Raises:
        ValueError: The run has no finished model.
    """
    path = Path(model).resolve()
    of_run = is_run(path)
    places = _places(path / "models" if of_run else path.parent)
    if not of_run and path not in places:
        return str(model), [str(model)]

    def rank(folder: Path) -> tuple[Any, ...]:
        method, length, seed = places[folder]
        return seed, length, not METHODS[method].linear

    main = min(filter(_is_finished, places), key=rank, default=None) if of_run else path
    if main is None:
        raise ValueError(f"explore: model must be a run with a finished model, got {model}")
    same = [folder for folder in places if places[folder][1:] == places[main][1:]]
    return str(main), [str(folder) for folder in same]


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run of `linbias extrapolate`, and no model."""
    return (folder / "models").is_dir() and not _is_finished(folder)


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _places(folder: Path) -> dict[Path, tuple[str, int, int]]:
    """The models in a run's folder `models`, in the order of METHODS, with their method, training length and seed."""
    places = {}
    for method in METHODS if folder.name == "models" else ():
        for path in sorted(folder.glob(f"{method}-L*-s*")):
            if found := re.fullmatch(r"-L(\d+)-s(\d+)", path.name.removeprefix(method)):
                places[path] = method, int(found[1]), int(found[2])
    return places


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
        raise ValueError(
            f"explore: text must be a file that can be read, got {path} ({error.strerror or error})"
        ) from error
    has_more = len(data) > num_bytes
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = decoder.decode(data[:num_bytes], final=not has_more)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"explore: text must be UTF-8, got another byte at {error.start} of {path}"
        ) from error
    if not text:
        raise ValueError(f"explore: text must hold at least one token, got the empty file {path}")
    return text.encode(), has_more


def _part_shown(model: PreTrainedModel, ids: Ids, limit_tokens: int) -> tuple[int, str | None]:
    """How many tokens the page shows, and why no more, where that is not the reader's own limit."""
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


@dataclass(frozen=True)
class _Text:
    """The part of a text that the page shows, and what its tokens stand for."""

    content: bytes
    ids: Ids
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def tokens(self) -> list[bytes]:
        return token_bytes(self.tokenizer, self.ids)

    @cached_property
    def sizes(self) -> list[int] | None:
        """How many bytes of the text each token stands for; None where tokens are not the text's own bytes."""
        is_text = self.content.startswith(b"".join(self.tokens).removeprefix(b" "))
        return [len(token) for token in self.tokens] if is_text else None

    @cached_property
    def vocabulary(self) -> _Vocabulary:
        return _Vocabulary(self.tokenizer)


class _Vocabulary:
    """The tokens that models guess, each named once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.names: list[str] = []
        self._tokenizer = tokenizer
        self._places: dict[int, int] = {}

    def place(self, id: int) -> int:
        """The index of a token's name."""
        if id not in self._places:
            self._places[id] = len(self.names)
            self.names.append(_readable(*token_bytes(self._tokenizer, [id])))
        return self._places[id]


def token_bytes(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int] | Ids) -> list[bytes]:
    """What each token stands for: of byte-level tokenizers its bytes, which need not be whole characters."""
    ids = [int(i) for i in ids]
    pieces: list[str] = tokenizer.convert_ids_to_tokens(ids)
    decoder = repr(getattr(tokenizer, "backend_tokenizer", tokenizer).decoder)
    if "ByteLevel" in decoder:
        return [
            bytes(map(_BYTE_OF.__getitem__, piece))
            if _BYTE_OF.keys() >= set(piece)
            else piece.encode()
            for piece in pieces
        ]
    if "▁" in decoder:  # SentencePiece
        return [
            bytes([int(piece[3:5], 16)])
            if re.fullmatch("<0x[0-9A-F]{2}>", piece)
            else piece.replace("▁", " ").encode()
            for piece in pieces
        ]
    return [tokenizer.decode([i], clean_up_tokenization_spaces=False).encode() for i in ids]


def _readable(token: bytes) -> str:
    """A token as text; a byte that is no character is written as in Python, \\xe2."""
    return token.decode("utf-8", "backslashreplace")


def _summary(model: PreTrainedModel, folder: str, shown: _Text, room: int) -> dict[str, Any]:
    """What the page shows of one model.

    Args:
        model: As `load` gives it.
        folder: Where it lies, or its name on the Hub.
        shown: The text, of which it reads as much as its table of positions allows.
        room: How many weights the page can still take; with too little, they are left out.

    Returns:
        JSON values. `name`; `method`, one of `METHODS` or None; `note`, a sentence or None; `num_tokens` that it reads;
        `num_layers`, `num_heads`, `causal`; `slopes` and `right_slopes` [H] or None, a side that is hidden as None;
        `weights`, in base64 the little-endian 16-bit rows of layer 0, head 0, then head 1 and so on, `num_weights` of them, or None;
        `reach` of each layer and head; `alone`, that of each head's bias without any content, and `departure` of each layer and head
        from it, both None without slopes; `train_length` or None; `bits` of each token, `losses` in bits per unit and `guesses`,
        pairs of a name's index and a probability after each token: None of a model that is not causal.
    """
    ids = shown.ids[: position_limit(model)]
    weights, logits = reading.run(model, ids)
    num_matrices, causal = reading.shape_of(model, ids)
    found_slopes = reading.slopes_of(model, len(ids))
    left, right = found_slopes or (None, None)
    alone = None
    if left is not None:
        alone = reading.weights_of_bias(left, right, len(ids), causal)
    num_weights = num_matrices * _num_weights(len(ids), causal)
    fits = num_weights <= room
    method = getattr(model.config, "method", getattr(model.config, "position", None))
    train_length = getattr(model.config, "train_length", None)
    return {
        "name": _name(folder),
        "method": method if method in METHODS else None if left is None else "alibi",
        "note": _note(
            method or model.config.model_type, causal, left is not None, logits is not None
        ),
        "num_tokens": len(ids),
        "num_layers": weights.shape[0],
        "num_heads": weights.shape[1],
        "causal": causal,
        "slopes": _finite(left),
        "right_slopes": _finite(right),
        "num_weights": num_weights if fits else 0,
        "weights": reading.pack(weights, causal) if fits else None,
        "reach": reading.reach(weights),
        "alone": None if alone is None else _of_one_layer(reading.reach(alone[None])),
        "departure": None if alone is None else reading.departure(weights, alone).tolist(),
        "train_length": train_length,
        **_expected(logits if causal else None, ids, shown, train_length),
    }


def _expected(logits: Any, ids: Ids, shown: _Text, train_length: int | None) -> dict[str, Any]:
    """What a causal model expected of the text: `bits`, `losses`, `guesses`."""
    if logits is None:
        return {"bits": None, "losses": None, "guesses": None}
    bits, guesses, probabilities = reading.forecast(logits, ids)
    sizes = shown.sizes or [1] * len(ids)
    return {
        "bits": [None, *(round(float(x), _DIGITS) for x in bits)],
        "losses": reading.losses(bits, sizes[: len(ids)], train_length),
        "guesses": [
            [
                [shown.vocabulary.place(int(i)), round(float(p), _DIGITS)]
                for i, p in zip(*row, strict=True)
            ]
            for row in zip(guesses, probabilities, strict=True)
        ],
    }


def _note(kind: str, causal: bool, has_slopes: bool, has_logits: bool) -> str | None:
    """What to know of a model that is not what the page is made for."""
    notes = []
    if not has_slopes:
        notes.append(
            f"This model ({kind}) has no linear biases by distance alone, so that its heads have no slopes: "
            "what is shown is the reach that they learned."
        )
    if not causal:
        notes.append(
            "This model is not causal: a row also weighs the keys after the query, distances count both ways, and "
            "there is no next token to guess, so that there are no losses."
        )
    elif not has_logits:
        notes.append("This model has no output for the next token, so that there are no losses.")
    return " ".join(notes) or None


def _finite(slopes: npt.NDArray[np.float64] | None) -> list[float | None] | None:
    """Slopes as JSON knows them: None for a side that is hidden."""
    return None if slopes is None else [x if math.isfinite(x) else None for x in slopes.tolist()]


def _of_one_layer(found: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    return {name: values[0] for name, values in found.items()}
