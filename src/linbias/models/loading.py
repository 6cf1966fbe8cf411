"""`load`: models and their tokenizers from a folder or the Hugging Face Hub, or one clear error.

    name -> files -> config.json, once -> family -> names and shapes of weights, compared -> weights -> model, fused

Nothing that is loaded is executed: weights are safetensors, or pickles read with weights_only.
"""

import copy
import errno
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, logging

from linbias._run.hub import answers
from linbias.models.families import TASKS, families, find_family, is_plain
from linbias.models.family import Weights
from linbias.models.fields import check_sizes
from linbias.models.fused import fuse
from linbias.models.fused.family import Options

_FILES = ("model.safetensors", "pytorch_model.bin")
_WEIGHTS = tuple(name + end for name in _FILES for end in ("", ".index.json"))
Shapes = dict[str, tuple[list[int], list[int]]]
_OPTIONS_OF_FUSE = {field.name for field in fields(Options)}
# What heads add to a model. A model without the head leaves them where they are.
_HEADS = tuple("transform. norm. decoder. classifier. cls. pooler. lm_head. score.".split())
# Buffers that older versions of Transformers saved.
_BUFFERS = re.compile(r"(position_ids|inv_freq|\.attn\.(masked_)?bias)$")


def load(
    folder: "str | Path | Files",
    *,
    task: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    new_head: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """Load a model with ALiBi of any family, ready to evaluate: it runs on `linbias.torch.attention`.

    The families: what linbias trains and the paper's model; BLOOM, Falcon with `alibi=True`, MPT, Baichuan, JAIS;
    jina-embeddings-v2, MosaicBERT, DNABERT-2. No code that lies beside weights is run. Causal models of Transformers without
    ALiBi (GPT-2) are loaded too, to compare with, on Transformers' own attention.

    Args:
        folder: With config.json and weights (safetensors, or a pickle that is read with weights_only); what is no folder
            here is the name of a model on the Hugging Face Hub.
        task: What is made of the weights: "causal", "masked" or "seq2seq" give logits, "sequence" and "token"
            classify, "base" is the model without a head. None: what the folder was made for; an encoder without a head.
        device: None: the first CUDA device, or else the CPU.
        dtype: Of the weights, as such or by name; None: as they are stored. `torch_dtype` is its former name.
        new_head: Start what a task adds to the model from fresh weights if the folder lacks it, to train it.
        changes: For BLOOM, Falcon and MPT options of `fuse`, such as rounding and slope_scale; else, and beside them,
            fields of the configuration, such as slope_scale, num_labels and hidden_dropout.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: There is no such model, or it is of no family above; weights are missing, unknown, of another shape than the
            configuration asks for, no floating numbers, NaN or infinite; a file is damaged, or lies outside the folder; or an
            argument breaks a rule.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> folder = tempfile.mkdtemp()
        >>> LinbiasForCausalLM(LinbiasConfig(hidden_size=32, num_attention_heads=2)).save_pretrained(folder)
        >>> model = load(folder, device="cpu", slope_scale="interpolate")
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"load: task must be one of {TASKS}, got {task!r}")
    dtype = _as_dtype(_once(dtype, changes))
    files = Files.at("load", folder)
    with _one_error("load", files.name), no_bars():
        model = _load(files, task, dtype, new_head, changes)
        _check_numbers(model)
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _load(
    files: "Files",
    task: str | None,
    dtype: torch.dtype | None,
    new_head: bool,
    changes: dict[str, Any],
) -> PreTrainedModel:
    settings = files.settings
    family, names = find_family(settings, set()), set[str]()
    if family is None:
        if is_plain(settings):
            return _load_plain(files, task, dtype, changes)
        if files.model_type is None or "bert" in str(files.model_type):
            names = set(files.look_at_weights())  # which alone tell original encoders
        family = find_family(settings, names)
    if family is None:
        all_names = ", ".join(dict.fromkeys(family.name for family in families()))
        raise ValueError(
            f"load: {files.name!r} must hold a model of a family that is known ({all_names}), "
            f"or a causal one of Transformers, got model_type {files.model_type!r}"
        )
    config = family.read_config(settings, names)
    stored = files.look_at_weights()
    _check_kinds(stored)
    options = {name: changes.pop(name) for name in _OPTIONS_OF_FUSE & set(changes) if family.fused}
    tasks = tuple(family.classes) if family.tasks is None else family.tasks(config)
    task = task or tasks[0]
    if task not in tasks:
        raise ValueError(
            f"load: task must be one of {tasks} for {files.name!r}, a {family.name} model, got "
            f"{task!r}"
        )
    if family.fields_of_task is not None:
        changes = {**family.fields_of_task(task, set(stored)), **changes}
    config = _changed(config, changes)
    check_sizes(config.get_text_config())
    kind = family.classes[task]
    with torch.device("meta"):
        wanted = kind(copy.deepcopy(config))
    wanted.tie_weights()
    given = stored if family.rename is None else family.rename(stored)
    _check_fit(files.name, wanted, given, new_head)
    floating = (x for x in given.values() if x.is_floating_point())
    dtype = dtype or max(floating, key=Tensor.numel).dtype
    if family.rename is None:
        model = kind.from_pretrained(files.name, config=config, dtype=dtype, **files.options)
    else:
        weights = _aligned(wanted, family.rename(files.read_weights()))
        if "decoder.weight" in weights:
            raise ValueError(
                f"load: {files.name!r} has unknown weights: decoder.weight, which is not that of its embedding"
            )
        known = {name: x for name, x in weights.items() if name in wanted.state_dict()}
        model = kind.from_pretrained(None, config=config, state_dict=known, dtype=dtype)
    return fuse(model, **options) if family.fused else model


def _load_plain(
    files: "Files", task: str | None, dtype: torch.dtype | None, changes: dict[str, Any]
) -> PreTrainedModel:
    """A causal model of Transformers without ALiBi."""
    if task not in (None, "causal"):
        raise ValueError(
            f"load: task must be 'causal' for {files.name!r}, which has no ALiBi, got {task!r}"
        )
    config = CONFIG_MAPPING[files.settings["model_type"]].from_dict(dict(files.settings))
    config = _changed(config, changes)
    check_sizes(config.get_text_config())
    stored = files.look_at_weights()
    if "quantization_config" not in files.settings:  # whose weights are stored in another way
        with torch.device("meta"):
            wanted = AutoModelForCausalLM.from_config(config)
        asked = dict(wanted.named_parameters())
        known = {name: x for name, x in _aligned(wanted, stored).items() if name in asked}
        _check_kinds(known)
        _report(files.name, [], [], _other_shapes(known, asked))
    model, info = AutoModelForCausalLM.from_pretrained(
        files.name,
        config=config,
        dtype=dtype or "auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # said below, with names
        **files.options,
    )
    shapes = {name: (list(there), list(asked)) for name, there, asked in info["mismatched_keys"]}
    _report(files.name, info["missing_keys"], [], shapes)
    return model


def load_tokenizer(folder: "str | Path | Files") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; a ValueError says that there is none, or it is not readable.

    Args:
        folder: As for `load`.
    """
    files = Files.at("load_tokenizer", folder)
    with _one_error("load_tokenizer", files.name):
        family = find_family(files.settings, set())
        writer = None if family is None else family.needs_tokenizer_json
        if writer is not None and not Path(files.name, "tokenizer.json").is_file():
            raise ValueError(
                "load_tokenizer: path must hold the tokenizer.json of its words, got "
                f"{files.name!r} without (`{writer}` writes it)"
            )
        # Without a configuration Transformers would read that of the folder, which it may refuse.
        config = None if family is None else family.read_config(files.settings, set())
        options = {"trust_remote_code": False, "local_files_only": files.local_files_only}
        return AutoTokenizer.from_pretrained(files.name, config=config, **options)


def encode(folder: "str | Path | Files", text: bytes) -> NDArray[Any]:
    """Turn a text of any size into the tokens of a model, without special tokens.

    The tokens are those that the model's own training made of its text; each line of a
    `linbias-paper` model's text ends in </s>.

    Args:
        folder: As for `load`.
        text: UTF-8; else it is a ValueError, as where there is no readable tokenizer.
    """
    return encoder(folder)(text)


def encoder(folder: "str | Path | Files") -> Callable[[bytes], NDArray[Any]]:
    """`encode` for many texts of one model, whose tokenizer is loaded once."""
    files = Files.at("encode", folder)
    family = find_family(files.settings, set())
    if family is not None and family.encoder is not None:
        return family.encoder(files.name)
    tokenizer = load_tokenizer(files)

    def encode_text(text: bytes) -> NDArray[Any]:
        ids = tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int64)

    return encode_text


@dataclass(frozen=True)
class Files:
    """The files of a model, here or on the Hub; config.json is read once.

    Attributes:
        name: A folder, or the name of a model on the Hugging Face Hub.
        settings: The contents of config.json.
        local_files_only: Do not ask the Hub: the files are here, or it does not answer.
    """

    name: str
    settings: Mapping[str, Any]
    local_files_only: bool

    @classmethod
    def at(cls, caller: str, folder: "str | Path | Files", argument: str = "folder") -> "Files":
        """Find a folder, or ask the Hub for it, once. Errors name the caller and its argument.

        Raises:
            ValueError: There is no such folder, nor can it be a name of the Hub; or it has no config.json with a record.
        """
        if isinstance(folder, Files):
            return folder
        name, is_here = str(folder), Path(folder).exists()
        may_be_id = not is_here and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name)
        if not may_be_id and not Path(folder, "config.json").is_file():
            raise ValueError(
                f"{caller}: {argument} must be a folder with a config.json, got {name!r}"
            )
        found = cls(name, {}, is_here or not answers())
        with _one_error(caller, name):
            if is_here:
                _check_folder(Path(folder))
            path = found.file("config.json")
            if path is None:
                raise ValueError("it has no config.json")
            try:
                settings = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise ValueError(f"config.json must be JSON ({error})") from error
            if not isinstance(settings, dict):
                raise ValueError(f"config.json must hold a JSON object, got {settings!r:.40}")
        return replace(found, settings=settings)

    @property
    def model_type(self) -> object:
        """As config.json says."""
        return self.settings.get("model_type")

    @property
    def options(self) -> dict[str, Any]:
        """For `from_pretrained`."""
        local = self.local_files_only
        return {"local_files_only": local, "weights_only": True, "trust_remote_code": False}

    def file(self, *names: str) -> Path | None:
        """The first of these files that there is."""
        for name in names:
            if Path(self.name).is_dir():
                if (path := Path(self.name) / name).is_file():
                    _check_inside(Path(self.name), path)
                    return path
                continue
            found = cached_file(
                self.name,
                name,
                local_files_only=self.local_files_only,
                _raise_exceptions_for_missing_entries=False,
            )
            if found is not None:
                return Path(found)
        return None

    def look_at_weights(self) -> Weights:
        """The weights by name, without their numbers: on the device "meta"."""
        return self._read(_look_at, "meta")

    def read_weights(self) -> Weights:
        """The weights by name, on the CPU."""
        return self._read(load_file, "cpu")

    def _read(self, read_safetensors: Callable[[Path], Weights], device: str) -> Weights:
        weights: Weights = {}
        for part in self._parts():
            try:
                if part.suffix == ".safetensors":
                    found = read_safetensors(part)
                else:
                    found = torch.load(part, map_location=device, weights_only=True)
                twice = sorted(found.keys() & weights)
                weights |= found
            except Exception as error:  # damaged or hostile files can raise anything
                is_pickle = part.suffix != ".safetensors"
                asks = ", or asks for code, which was not run" if is_pickle else ""
                raise ValueError(f"{part.name} is damaged{asks}") from error
            if twice:
                raise ValueError(f"{twice[0]} must lie in one file, got another in {part.name}")
        return weights

    def _parts(self) -> list[Path]:
        path = self.file(*_WEIGHTS)
        if path is None:
            raise ValueError(f"it has no {' or '.join(_WEIGHTS)}")
        if not path.name.endswith(".index.json"):
            return [path]
        try:
            names = set(json.loads(path.read_bytes())["weight_map"].values())
            outside = [name for name in names if not _is_inside(name)]
            parts = [] if outside else [self.file(name) for name in sorted(names)]
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path.name} is damaged") from error
        if outside:
            raise ValueError(
                f"weight_map of {path.name} must name files of the folder, got {outside[0]!r:.80}"
            )
        if None in parts:
            raise ValueError(f"it has not all parts that {path.name} names")
        return [part for part in parts if part is not None]


# What is read of a folder, here or by Transformers.
_READ = (".json", ".safetensors", ".bin", ".model", ".jinja")
_WORDS = ("dict.txt", "vocab.txt", "merges.txt")


def _check_folder(folder: Path) -> None:
    """Check every file that a loader may read, whichever does: none waits for a writer, none lies elsewhere."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ or path.name in _WORDS:
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path.name} must be a file, got a pipe, socket or device")
            _check_inside(folder, path)


def _check_inside(folder: Path, path: Path) -> None:
    """Raise a ValueError if a file leads out of its folder by a link.

    What the cache of the Hugging Face Hub keeps of a model may be spread in its own folder:
    models--a--b/snapshots/c/config.json -> models--a--b/blobs/d.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:  # of which resolve() says nothing from Python 3.13 on
            raise ValueError(f"{path.name} must be a file, got a loop of links") from error
    found = path.resolve()
    if not found.is_relative_to(root):
        raise ValueError(f"{path.name} must lie in the folder, got a link to {str(found)!r}")


def _is_inside(name: str) -> bool:
    """Whether an entry of an index names a file below its folder."""
    path = Path(name)
    return name != "" and not path.is_absolute() and ".." not in path.parts


_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64},
}


def _look_at(part: Path) -> Weights:
    found = {}
    with safe_open(part, "pt") as file:
        for name in file.keys():  # no dictionary
            header = file.get_slice(name)
            dtype = _DTYPES.get(header.get_dtype(), torch.int8)
            found[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
    return found


def _check_kinds(weights: Mapping[str, Any]) -> None:
    for name, x in weights.items():
        is_floating = isinstance(x, Tensor) and x.is_floating_point()
        if not (is_floating or _BUFFERS.search(name)):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must hold floating numbers, got {kind}")


def _check_numbers(model: PreTrainedModel) -> None:
    """Raise a ValueError about the first parameter that is not finite. All are read once, without a copy."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            continue  # quantised
        if parameter.numel() and not parameter.is_meta:
            ends = torch.stack(torch.aminmax(parameter.detach()))
            if not ends.isfinite().all():
                kind = "NaN" if ends.isnan().any() else "infinity"
                raise ValueError(f"{name} must hold finite numbers, got {kind}")


def _once(dtype: torch.dtype | str | None, changes: dict[str, Any]) -> torch.dtype | str | None:
    """The dtype, which may be given by Transformers' former name."""
    former: torch.dtype | str | None = changes.pop("torch_dtype", None)
    if None not in (dtype, former):
        raise ValueError(f"load: dtype must be given once, got torch_dtype={former} beside it")
    return dtype if former is None else former


def _as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if found is None or found == "auto":
        return None
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"load: dtype must be a floating type of PyTorch, got {dtype!r}")
    return found


_DOWNLOAD = "give the folder that huggingface_hub.snapshot_download returns, which takes it"
# What from_pretrained of Transformers takes, and what to do instead.
_INSTEAD = {
    "device_map": "device= names one device, and accelerate.dispatch_model spreads a loaded model over several",
    "trust_remote_code": "leave it out: no code of a folder is ever run",
    "low_cpu_mem_usage": "leave it out: weights are read without a copy",
    "attn_implementation": "leave it out: models with ALiBi run on linbias.torch.attention",
    "quantization_config": "quantise the loaded model",
    **dict.fromkeys(("revision", "cache_dir", "token", "local_files_only"), _DOWNLOAD),
}


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration with other values in some fields, which are checked like all."""
    fields = {*config.to_dict(), *config.attribute_map, "num_labels"}
    for name in changes:
        if name not in fields:
            advice = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ValueError(f"load: {type(config).__name__} has no field {name!r}{advice}")
    return type(config).from_dict({**config.to_dict(), **changes}) if changes else config


def _aligned(wanted: PreTrainedModel, given: Weights) -> Weights:
    """Weights of a model without head for one with a head, and the other way round."""
    names, prefix = wanted.state_dict(), f"{wanted.base_model_prefix}."
    found = {}
    for name, tensor in given.items():
        inside = name.removeprefix(prefix)
        if name not in names:
            name = next((other for other in (prefix + name, inside) if other in names), name)
        found[name] = tensor
    return found


def _check_fit(folder: str, wanted: PreTrainedModel, given: Weights, new_head: bool) -> None:
    """Compare what is stored with what a model asks for, before it is built.

    Raises:
        ValueError: With the names of all that is missing, unknown or of another shape.
    """
    prefix, given = f"{wanted.base_model_prefix}.", _aligned(wanted, given)
    state = wanted.state_dict(keep_vars=True)
    stored = {id(x) for name, x in state.items() if name in given}  # tied ones count as well
    missing = [name for name, tensor in state.items() if id(tensor) not in stored]
    body, pooler = "" if wanted.base_model is wanted else prefix, (f"{prefix}pooler.", "pooler.")
    of_body = [name for name in missing if name.startswith(body) and not name.startswith(pooler)]
    advice = "" if of_body else " (new_head=True starts them from fresh weights)"
    if new_head:
        missing = of_body
    inner = {name.removeprefix(prefix) for name in state}
    others = tuple(head for head in _HEADS if not any(name.startswith(head) for name in inner))
    ignored = wanted._keys_to_ignore_on_load_unexpected or ()
    unknown = [
        name
        for name in given
        if name not in state
        and not name.removeprefix(prefix).startswith(others)
        and not _BUFFERS.search(name)
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    _report(folder, missing, unknown, _other_shapes(given, state), advice)


def _other_shapes(given: Mapping[str, Tensor], asked: Mapping[str, Tensor]) -> Shapes:
    """By name, the shapes that differ: the stored one and the one that is asked for."""
    both = {name: (x.shape, asked[name].shape) for name, x in given.items() if name in asked}
    return {name: (list(x), list(y)) for name, (x, y) in both.items() if x != y}


def _report(
    folder: str,
    missing: Iterable[str],
    unknown: Iterable[str],
    shapes: Shapes,
    advice: str = "",
) -> None:
    """Raise one error about all weights that do not fit, with advice about missing ones."""
    wrong = [
        f"{name} of shape {there} where it asks for {asked}"
        for name, (there, asked) in sorted(shapes.items())
    ]
    found = []
    for what, names, then in (
        ("lacks", sorted(missing), advice),
        ("has unknown weights:", sorted(unknown), ""),
        ("has", wrong, ""),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            found.append(f"{what} {shown} ({len(names)} in all){then}")
    if found:
        raise ValueError(f"load: {folder!r} must fit its config.json, but {'; '.join(found)}")


@contextmanager
def _one_error(caller: str, name: str) -> Iterator[None]:
    """Whatever goes wrong within the block is a ValueError of one line."""
    try:
        yield
    except pickle.UnpicklingError as error:  # its own words advise to run what is in the file
        reason = "its weights are damaged, or ask for code, which was not run"
        raise ValueError(f"{caller}: cannot read a model at {name!r}: {reason}") from error
    except Exception as error:  # damaged or hostile files can raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, ValueError) and reason.startswith((f"{caller}: ", "fuse: ")):
            raise
        if not Path(name).exists():
            reason = f"there is no such folder, and on the Hugging Face Hub: {reason}"
        raise ValueError(f"{caller}: cannot read a model at {name!r}: {reason}") from error


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
