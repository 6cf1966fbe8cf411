"""Checkpoints of the paper's repository: read, checked, and kept as Transformers folders.

The original saves one pickle: settings (`cfg`, or `args` in older files) and tensors (`model`),
every tied weight twice. Here a model is a folder of Transformers, with every weight once.
"""

import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linbias.models.files import Files, new_folder, refuse_model_in
from linbias.models.loading import load as load_folder
from linbias.models.loading import no_bars
from linbias.paper.config import PaperConfig
from linbias.paper.dictionary import Dictionary
from linbias.paper.model import PaperForCausalLM
from linbias.paper.recipe import RATES, SIZES
from linbias.paper.words import save_word_tokenizer

# Settings that may have one value only, which is that of a checkpoint without them.
_FIXED: dict[str, Any] = {
    "activation_fn": "relu",
    "adaptive_input": True,
    "add_bos_token": False,
    "base_layers": 0,
    "character_embeddings": False,
    "decoder_layers_to_keep": None,
    "decoder_learned_pos": False,
    "decoder_normalize_before": True,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "tie_adaptive_proj": True,
    "tie_adaptive_weights": True,
}
# Settings that must equal another one.
_EQUAL = {
    "adaptive_softmax_cutoff": "adaptive_input_cutoff",
    "adaptive_softmax_factor": "adaptive_input_factor",
    "decoder_input_dim": "decoder_embed_dim",
    "decoder_output_dim": "decoder_embed_dim",
}


def load(path: str | Path, *, position: str | None = None) -> PaperForCausalLM:
    """Loads a float32 model on the CPU from the original's `.pt` file or a folder of linbias."""
    path = Path(path)
    if not path.is_dir():
        config, weights = load_original(path, position=position or "alibi")
        original = _empty(config)
        original.load_state_dict(weights, assign=True)
        return original.eval()
    files = Files.at("load", path, "path")
    if files.model_type != PaperConfig.model_type:
        raise ValueError(
            f"load: path must be a folder whose model_type is {PaperConfig.model_type!r}, "
            f"got {files.model_type!r} ({path})"
        )
    model: PaperForCausalLM = load_folder(files, device="cpu")
    if position not in (None, model.config.position):
        raise ValueError(
            f"load: position must be that of {str(path)!r}, {model.config.position!r}, "
            f"got {position!r}"
        )
    return model


def load_original(
    path: str | Path, *, position: str = "alibi"
) -> tuple[PaperConfig, dict[str, Tensor]]:
    """Reads a checkpoint, which does not say its position, without running anything in it: its
    configuration, and float32 tensors by our names.
    """
    path = Path(path)
    if position not in ("alibi", "sinusoidal", "none"):
        raise ValueError(
            "load_original: position must be 'alibi', 'sinusoidal' or 'none', which have no "
            f"weights; got {position!r}"
        )
    record = _read(path)
    weights = _weights(record, path)
    config = _config(record, weights, position, path)
    expected = _empty(config).state_dict()
    names = {name: _original_names(name) for name in expected}
    described = {old: expected[name] for name, olds in names.items() for old in olds}
    missing = [f"{name} is missing" for name in described if name not in weights]
    unexpected = [f"{name} is unexpected" for name in weights if name not in described]
    misshapen = [
        f"{name} has shape {list(weights[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in described.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    _refuse(path, missing + unexpected + misshapen)
    weights = {name: tensor.float() for name, tensor in weights.items()}
    problems = [
        f"{name} has values that are not finite"
        for name, tensor in weights.items()
        if not tensor.isfinite().all()
    ] or [
        f"{copy} differs from {first}, to which it is tied"
        for first, *copies in names.values()
        for copy in copies
        if not torch.equal(weights[first], weights[copy])
    ]
    _refuse(path, problems)
    return config, {name: weights[first] for name, (first, *_) in names.items()}


def convert(
    path: str | Path,
    output: str | Path,
    *,
    dictionary: str | Path | None = None,
    position: str | None = None,
) -> None:
    """Turns a checkpoint, with its dict.txt, into a folder that Transformers loads."""
    output = Path(output)
    refuse_model_in(output, "convert")
    model = load(path, position=position)
    words = None
    if dictionary is not None:
        words = Dictionary.read(Path(dictionary))
        check_dictionary(words, model.config, dictionary, "convert")
    with new_folder(output, "convert") as partial, no_bars():
        model.save_pretrained(partial)
        if words is not None:
            add_words(words, partial)


def add_words(dictionary: Dictionary, folder: Path) -> None:
    """Writes dict.txt and the tokenizer of its words into a model's folder."""
    dictionary.write(folder / "dict.txt")
    save_word_tokenizer(dictionary, folder)


def check_dictionary(
    dictionary: Dictionary, config: PaperConfig, path: str | Path, function: str
) -> None:
    """Refuses a dictionary, read at a path, of another size than the model's."""
    if len(dictionary) != config.vocab_size:
        raise ValueError(
            f"{function}: dictionary must have the model's {config.vocab_size} types, "
            f"got {len(dictionary)} ({path})"
        )


def _settings(record: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The entry that holds the model's settings, of older files all in one, and their values."""
    if record.get("args") is not None:
        return "args", _as_dict(record["args"])
    cfg = _as_dict(record.get("cfg"))
    settings = _as_dict(cfg.get("task"))
    for name, value in _as_dict(cfg.get("model")).items():
        if value is not None or name not in settings:
            settings[name] = value
    return "cfg", settings


def _as_dict(settings: object) -> dict[str, Any]:
    settings = vars(settings) if isinstance(settings, Namespace) else settings
    return dict(settings) if isinstance(settings, Mapping) else {}


def _weights(record: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors, without versions, uninitialised numbers and sinusoids."""
    weights = {
        name: tensor
        for name, tensor in record["model"].items()
        if not str(name).endswith((".version", "._float_tensor", ".embed_positions.weights"))
    }
    no_floats = [
        f"{name} is no tensor of floating-point numbers"
        for name, tensor in weights.items()
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point())
    ]
    _refuse(path, no_floats)
    return weights


def _config(
    record: Mapping[str, Any], weights: dict[str, Tensor], position: str, path: Path
) -> PaperConfig:
    source, settings = _settings(record)
    needed = (*SIZES.values(), "adaptive_input_cutoff")
    lacking = [name for name in needed if name not in settings]
    wrong = _wrong(settings, position)
    if lacking:
        wrong.append(f"{source} has no {', '.join(lacking)}")
    _refuse(path, wrong)
    cutoffs = _cutoffs(settings["adaptive_input_cutoff"]) or []
    vocab_size = _vocab_size(cutoffs, weights)
    try:
        return PaperConfig(
            **{ours: settings[theirs] for ours, theirs in SIZES.items()},
            **{ours: _rate(settings, theirs) for ours, theirs in RATES.items()},
            position=position,
            vocab_size=vocab_size,
            cutoffs=tuple(cutoff for cutoff in cutoffs if cutoff != vocab_size),
            activation_dropout=_rate(settings, "activation_dropout")
            or _rate(settings, "relu_dropout"),
            final_norm=not settings.get("no_decoder_final_norm", False),
        )
    except ValueError as error:
        raise ValueError(f"load_original: cannot use {str(path)!r}: {error}") from error


def _wrong(settings: dict[str, Any], position: str) -> list[str]:
    """List, in words, the settings that this model does not support."""
    wrong = [
        f"{name} must be {value!r}, got {settings[name]!r}"
        for name, value in _FIXED.items()
        if settings.get(name, value) != value
    ]
    none = "no_token_positional_embeddings"
    if position == "sinusoidal" and settings.get(none):
        wrong.append(f"{none} must be False for position {position!r}, got {settings[none]!r}")
    names = ("adaptive_input_cutoff", "adaptive_softmax_cutoff")
    cutoffs = {name: _cutoffs(settings[name]) for name in names if name in settings}
    converted = settings | cutoffs
    wrong += [
        f"{name} must be {other}, {converted[other]!r}, got {converted[name]!r}"
        for name, other in _EQUAL.items()
        if name in converted and other in converted and converted[name] != converted[other]
    ]
    wrong += [
        f"{name} must be ids with commas between, got {settings[name]!r}"
        for name, ids in cutoffs.items()
        if ids is None
    ]
    return wrong


def _rate(settings: dict[str, Any], name: str) -> float:
    """A rate of dropout: 0 where it is absent, None or 1, since evaluation has no dropout."""
    rate: float | None = settings.get(name)
    return 0.0 if rate is None or rate == 1 else rate


def _cutoffs(written: Any) -> list[int] | None:
    """The numbers in "20000,60000"; very old files hold a list instead."""
    parts = written.split(",") if isinstance(written, str) else written
    try:
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        return None


def _vocab_size(cutoffs: list[int], weights: dict[str, Tensor]) -> int:
    """One past the largest id, from the last band's weights or, without those, the last cutoff."""
    start = [0, *cutoffs][-1]
    for name in _original_names(f"model.embed_tokens.embeddings.{len(cutoffs)}.0.weight"):
        if name in weights and weights[name].dim() > 0:
            return start + len(weights[name])
    return start


def _empty(config: PaperConfig) -> PaperForCausalLM:
    """A model without values in its tensors."""
    with torch.device("meta"):
        return PaperForCausalLM(config)


def _original_names(name: str) -> list[str]:
    """The original's names of one of our tensors; two names where it is tied to another."""
    if name == "adaptive_softmax.class_proj":
        return ["decoder.adaptive_softmax.head.class_proj.weight"]
    original = "decoder." + name.removeprefix("model.")
    tied = re.fullmatch(r"decoder\.embed_tokens\.embeddings\.(\d+)\.([01])\.weight", original)
    if tied is None:
        return [original]
    band, part = int(tied[1]), int(tied[2])
    if band > 0:
        return [original, f"decoder.adaptive_softmax.tail.{band - 1}.{2 - 2 * part}.weight"]
    return [original, "decoder.adaptive_softmax.head.word_proj.weight"][: 2 - part]


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"load_original: cannot use {str(path)!r}: {'; '.join(problems)}")


# Reading a .pt file without running anything in it


class _Unread:
    """Replaces an object that does not matter for the model; its content is ignored."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _Dtype(_Unread):
    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name if isinstance(name, str) else ""


def _scalar(dtype: object = None, raw: object = None, *_: object) -> object:
    """A number of NumPy as a plain one."""
    if isinstance(dtype, _Dtype) and re.fullmatch("f[248]|[iu][1248]|b1", dtype.name):
        number = np.dtype(dtype.name)
        if isinstance(raw, bytes) and len(raw) == number.itemsize:
            return np.frombuffer(raw, number)[0].item()
    return _Unread()


def _dict(*_: object) -> dict[Any, Any]:
    return {}


# What the original saves besides tensors and plain values: options, and metrics of NumPy. Numbers
# are read, and nothing is called.
_HARMLESS: list[Any] = [
    Namespace,
    (_dict, "collections.defaultdict"),
    *((_Unread, f"builtins.{name}") for name in ("dict", "float", "int", "list")),
    (_Dtype, "numpy.dtype"),
    (_Unread, "numpy.ndarray"),
    *(
        (stand_in, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")  # until NumPy 2, and since
        for name, stand_in in (("_reconstruct", _Unread), ("scalar", _scalar))
    ),
]


def _read(path: Path) -> Mapping[str, Any]:
    """The file's content, a record of tensors and plain values; or why it cannot be read."""
    if not path.is_file():
        raise ValueError(f"load_original: path must be a file, got {str(path)!r}")
    try:
        damaged = _damaged_entry(path)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_HARMLESS):
            warnings.simplefilter("ignore")  # about the pickle's protocol
            record = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        asks = code and f"it asks for {code[1]}, which was not run"
        raise _no_checkpoint(path, asks or "it is damaged or foreign") from error
    if damaged:
        raise _no_checkpoint(path, f"its entry {damaged} is damaged")
    if not isinstance(record, Mapping) or not isinstance(record.get("model"), Mapping):
        raise ValueError(
            f"load_original: path must be a checkpoint with an entry 'model', got {str(path)!r}"
        )
    return record


def _damaged_entry(path: Path) -> str | None:
    """The first entry of a zip file, if it is one, whose checksum is wrong; torch checks none."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":
            return None
    with zipfile.ZipFile(path) as entries:
        return entries.testzip()


def _no_checkpoint(path: Path, reason: str) -> ValueError:
    return ValueError(
        "load_original: path must be a checkpoint of tensors and plain values, "
        f"got {str(path)!r} ({reason})"
    )
