"""`load`: models and their tokenizers, of a folder or the Hub, or one clear error.

    name -> files -> config.json, once -> family -> names and shapes of weights -> model, fused

Nothing that is loaded is executed: weights are safetensors, or pickles read with weights_only.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from linbias.models.families import TASKS, families, find_family, is_plain
from linbias.models.fields import check_num_labels, check_numbers, check_tokens
from linbias.models.files import Files as Files
from linbias.models.files import Weights, one_error
from linbias.models.fused import fuse
from linbias.models.fused.family import Options

Shapes = dict[str, tuple[list[int], list[int]]]
_OPTIONS_OF_FUSE = {field.name for field in fields(Options)}
# What heads add to a model. A model without the head leaves them where they are.
_HEADS = tuple("transform. norm. decoder. classifier. cls. pooler. lm_head. score.".split())
# Buffers that older versions of Transformers saved.
_BUFFERS = re.compile(r"(position_ids|inv_freq|\.attn\.(masked_)?bias)$")


def load(
    folder: str | Path | Files,
    *,
    task: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    new_head: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """Load a model with ALiBi of any family, ready to evaluate: it runs on
    `linbias.torch.attention`.

    The families: what linbias trains and the paper's model; BLOOM, Falcon with `alibi=True`, MPT,
    Baichuan; jina-embeddings-v2, MosaicBERT, DNABERT-2. No code that lies beside weights is
    run. Causal models of Transformers without ALiBi (GPT-2) are loaded too, on Transformers' own
    attention.

    Args:
        folder: With config.json and weights (safetensors, or a pickle that is read with
            weights_only); what is no folder here is the name of a model on the Hugging Face Hub.
        task: What is made of the weights: "causal", "masked" or "seq2seq" give logits, "sequence"
            and "token" classify, "base" is the model without a head. None: what the folder was
            made for; an encoder without a head.
        device: None: the first CUDA device, or else the CPU.
        dtype: Of the weights, as such or by name; None: as they are stored.
        new_head: Start what a task adds to the model from fresh weights if the folder lacks it.
        changes: For BLOOM, Falcon and MPT options of `fuse`, such as heads; else, and beside
            them, fields of the configuration, such as slope_scale, num_labels and hidden_dropout.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: There is no such model, or it is of no family above; weights are missing,
            unknown, of another shape than the configuration asks for, no floating numbers, NaN or
            infinite; a file is damaged, or lies outside the folder; or an argument breaks a rule.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> folder = tempfile.mkdtemp()
        >>> config = LinbiasConfig(hidden_size=32, num_attention_heads=2)
        >>> LinbiasForCausalLM(config).save_pretrained(folder)
        >>> model = load(folder, device="cpu", slope_scale="interpolate")
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"load: task must be one of {TASKS}, got {task!r}")
    dtype = _as_dtype(dtype)
    files = Files.at("load", folder)
    with one_error("load", files.name), no_bars():
        model = _load(files, task, dtype, new_head, changes)
        _check_numbers(model)
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def _load(
    files: Files,
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
    check_numbers(config)
    check_tokens(config)
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
        weights = files.read_weights()
        weights = _aligned(wanted, weights if family.rename is None else family.rename(weights))
        if "decoder.weight" in weights:
            raise ValueError(
                f"load: {files.name!r} has unknown weights: decoder.weight, "
                "which is not that of its embedding"
            )
        known = {name: x for name, x in weights.items() if name in wanted.state_dict()}
        model = kind.from_pretrained(None, config=config, state_dict=known, dtype=dtype)
    return fuse(model, **options) if family.fused else model


def _load_plain(
    files: Files, task: str | None, dtype: torch.dtype | None, changes: dict[str, Any]
) -> PreTrainedModel:
    if task not in (None, "causal"):
        raise ValueError(
            f"load: task must be 'causal' for {files.name!r}, which has no ALiBi, got {task!r}"
        )
    config = CONFIG_MAPPING[files.settings["model_type"]].from_dict(dict(files.settings))
    config = _changed(config, changes)
    check_numbers(config.get_text_config())
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


def load_tokenizer(folder: str | Path | Files) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; a ValueError says that there is none, or it is not readable.

    Args:
        folder: As for `load`.
    """
    files = Files.at("load_tokenizer", folder)
    with one_error("load_tokenizer", files.name):
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


def encode(folder: str | Path | Files, text: bytes) -> NDArray[Any]:
    """Turn UTF-8 of any size into the tokens that a model's own training made of its text.

    Special tokens are left out, but for the </s> that ends each line of a `linbias-paper` model's.
    """
    return encoder(folder)(text)


def encoder(folder: str | Path | Files) -> Callable[[bytes], NDArray[Any]]:
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


def _check_kinds(weights: Mapping[str, Any]) -> None:
    for name, x in weights.items():
        is_floating = isinstance(x, Tensor) and x.is_floating_point()
        if not (is_floating or _BUFFERS.search(name)):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must hold floating numbers, got {kind}")


def _check_numbers(model: PreTrainedModel) -> None:
    """Raise a ValueError about the first parameter that is not finite, without a copy."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            continue  # quantised
        if parameter.numel() and not parameter.is_meta:
            ends = torch.stack(torch.aminmax(parameter.detach()))
            if not ends.isfinite().all():
                kind = "NaN" if ends.isnan().any() else "infinity"
                raise ValueError(f"{name} must hold finite numbers, got {kind}")


def _as_dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that is asked for; None for the stored one."""
    found = getattr(torch, asked, asked) if isinstance(asked, str) else asked
    if found is None or asked == "auto":
        return None
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"load: dtype must be a floating type of PyTorch, got {asked!r}")
    return found


_DOWNLOAD = "give the folder that huggingface_hub.snapshot_download returns, which takes it"
# What from_pretrained of Transformers takes, and what to do instead.
_INSTEAD = {
    "torch_dtype": "say dtype",
    "device_map": "device= names one device, and accelerate.dispatch_model spreads a loaded model",
    "trust_remote_code": "leave it out: no code of a folder is ever run",
    "low_cpu_mem_usage": "leave it out: weights are read without a copy",
    "attn_implementation": "leave it out: models with ALiBi run on linbias.torch.attention",
    "quantization_config": "quantise the loaded model",
    "rounding": "a model that is not fused rounds its bias as its checkpoint did",
    **dict.fromkeys(("revision", "cache_dir", "token", "local_files_only"), _DOWNLOAD),
}


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration with other values in some fields, of its parts as well."""
    check_num_labels("load", changes)
    fields = {*config.to_dict(), *config.attribute_map, "num_labels"}
    for name in changes:
        if name not in fields:
            advice = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ValueError(f"load: {type(config).__name__} has no field {name!r}{advice}")
    parts = {
        name: _changed(getattr(config, name), changes[name]).to_dict()
        for name in config.sub_configs
        if isinstance(changes.get(name), Mapping)
    }
    return type(config).from_dict({**config.to_dict(), **changes, **parts}) if changes else config


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
    """Compare what is stored with what a model asks for, before it is built."""
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
def no_bars() -> Iterator[None]:
    """Keep Transformers from drawing a progress bar while it loads or saves."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
