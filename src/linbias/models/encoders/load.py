"""`from_pretrained`: encoders from original folders and from our own, without running code that lies in them."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from linbias._run.hub import caches_if_unreachable
from linbias.models.encoders import original
from linbias.models.encoders.bert import (
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasBertModel,
    LinbiasBertPreTrainedModel,
)
from linbias.models.encoders.bert_config import LinbiasBertConfig

Head = Literal["base", "masked", "sequence", "token"]

HEADS: dict[str, type[LinbiasBertPreTrainedModel]] = {
    "base": LinbiasBertModel,
    "masked": LinbiasBertForMaskedLM,
    "sequence": LinbiasBertForSequenceClassification,
    "token": LinbiasBertForTokenClassification,
}
_WITH_FUSE = "AutoModelForCausalLM.from_pretrained loads it and linbias.models.fuse runs it here"
_BY_IMPORT = "AutoModelForCausalLM.from_pretrained loads it after `import linbias.models`"
_DECODERS = {
    **dict.fromkeys(("bloom", "falcon"), _WITH_FUSE),
    "mpt": "linbias.models.LinbiasMptForCausalLM.from_pretrained loads it",
    **dict.fromkeys(("baichuan", "jais", "btlm", "linbias", "linbias-paper"), _BY_IMPORT),
}
# What the other heads have, which a model without them leaves where it is.
_OTHER_HEADS = ("transform.", "norm.", "decoder.", "classifier.", "cls.", "encoder.pooler.")


def from_pretrained(
    folder: str | Path,
    head: Head = "base",
    *,
    new_head: bool = False,
    dtype: torch.dtype | str | None = None,
    **settings: Any,
) -> LinbiasBertPreTrainedModel:
    """Load an ALiBi encoder: jina-embeddings-v2 (also code), MosaicBERT, DNABERT-2, or one saved by `save_pretrained`.

    The original folders hold code that current versions of Transformers cannot import, or that gives a BERT with
    random layers without `trust_remote_code`. None of it is run, or needed.

    Args:
        folder: With config.json and weights (safetensors, or a pickle that is read with weights_only), or the id of a
            model on the Hugging Face Hub.
        head: "base" gives `last_hidden_state`, and `pooler_output` where the weights have a pooler; "masked" is the
            masked language model, "sequence" and "token" are classifiers.
        new_head: Start what a head adds to the encoder from fresh weights if the folder lacks it, to train it.
        dtype: Of the weights, as such or by name; None or "auto": as they are stored.
        settings: Fields of `LinbiasBertConfig` to change, such as num_labels, slope_scale or hidden_dropout.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: It is no such model, weights are missing or unknown (the message names them), or a setting breaks
            its rule.

    Example:
        >>> import tempfile
        >>> config = LinbiasBertConfig(vocab_size=99, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
        >>> folder = tempfile.mkdtemp()
        >>> LinbiasBertForMaskedLM(config).save_pretrained(folder)
        >>> type(from_pretrained(folder, "masked")).__name__
        'LinbiasBertForMaskedLM'
    """
    if head not in HEADS:
        raise ValueError(f"from_pretrained: head must be one of {tuple(HEADS)}, got {head!r}")
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"from_pretrained: dtype must be a floating type of PyTorch, got {dtype!r}"
        )
    config, weights, _ = read_folder(folder)
    for name in settings:
        if name not in LinbiasBertConfig.__annotations__ and not hasattr(config, name):
            raise ValueError(f"from_pretrained: LinbiasBertConfig has no field {name!r}")
    has_pooler = "encoder.pooler.weight" in weights
    settings = {"pooler": has_pooler or head == "sequence", **settings}
    if head in ("masked", "token"):
        settings["pooler"] = False
    config = LinbiasBertConfig.from_dict({**config.to_dict(), **settings})
    model = HEADS[head](config)
    _load(model, weights, folder, new_head)
    if dtype is None:
        dtype = weights["encoder.embeddings.words.weight"].dtype
    return model.to(dtype).eval()


def read_folder(folder: str | Path) -> tuple[LinbiasBertConfig, dict[str, Tensor], str | None]:
    """Read configuration and weights under our names, and the family of an original folder (None: our own).

    Raises:
        ValueError: As `from_pretrained`.
    """
    with caches_if_unreachable(folder):
        settings = _read_settings(folder)
        if (advice := _DECODERS.get(str(settings.get("model_type")))) is not None:
            raise ValueError(
                f"from_pretrained: {str(folder)!r} must hold an encoder, got a {settings['model_type']} model, which is a "
                f"decoder: {advice}"
            )
        stored = _read_weights(folder)
    if settings.get("model_type") == LinbiasBertConfig.model_type:
        prefix = "" if any(name.startswith("encoder.") for name in stored) else "encoder."
        weights = {prefix + name: tensor for name, tensor in stored.items()}
        return LinbiasBertConfig.from_dict(settings), weights, None
    family = original.recognise(settings, set(stored))
    if family is None:
        raise ValueError(
            f"from_pretrained: {str(folder)!r} must hold one of jina-embeddings-v2, MosaicBERT, DNABERT-2 or a "
            f"linbias_bert model, got model_type {settings.get('model_type')!r} with other weights"
        )
    config = original.read_config(settings, family)
    prefix = "bert." if any(name.startswith("bert.") for name in stored) else ""
    config.original = {"family": family, "prefix": prefix, "config": settings}
    return config, original.to_ours(stored, family), family


def _load(
    model: LinbiasBertPreTrainedModel,
    weights: dict[str, Tensor],
    folder: str | Path,
    new_head: bool,
) -> None:
    """Copy weights into a model of which they must fill every part."""
    if isinstance(model, LinbiasBertModel):
        weights = {name.removeprefix("encoder."): tensor for name, tensor in weights.items()}
    wanted = model.state_dict()
    wanted.pop("decoder.weight", None)  # the embedding
    unknown = [
        name for name in weights if name not in wanted and not f"encoder.{name}".startswith(_others(model))
        and not name.startswith(_others(model))
    ]  # fmt: skip
    missing = [name for name in wanted if name not in weights]
    if new_head:
        missing = [name for name in missing if _is_of_encoder(model, name)]
    for what, names in (("lacks", missing), ("has unknown weights:", unknown)):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(
                f"from_pretrained: {str(folder)!r} {what} {shown} ({len(names)} of {len(wanted)})"
            )
    for name, tensor in weights.items():
        if name in wanted and tensor.shape != wanted[name].shape:
            raise ValueError(
                f"from_pretrained: {name} of {str(folder)!r} must have shape {list(wanted[name].shape)}, "
                f"got {list(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in weights.items():
            if name in wanted:
                wanted[name].copy_(tensor)
    model.tie_weights()


def _others(model: LinbiasBertPreTrainedModel) -> tuple[str, ...]:
    return tuple(
        name for name in _OTHER_HEADS if not (name == "decoder." and hasattr(model, "decoder"))
    )


def _is_of_encoder(model: LinbiasBertPreTrainedModel, name: str) -> bool:
    whole = name if name.startswith("encoder.") else f"encoder.{name}"
    inside = isinstance(model, LinbiasBertModel) or name.startswith("encoder.")
    return inside and not whole.startswith("encoder.pooler.")


def _read_settings(folder: str | Path) -> dict[str, Any]:
    try:
        settings = json.loads(_file(folder, ("config.json",)).read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"from_pretrained: config.json of {str(folder)!r} must be JSON ({error})"
        ) from error
    if not isinstance(settings, dict):
        raise ValueError(
            f"from_pretrained: config.json of {str(folder)!r} must hold a JSON object, got {settings!r:.40}"
        )
    return settings


def _read_weights(folder: str | Path) -> dict[str, Tensor]:
    path = _file(
        folder,
        (
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
        ),
    )
    if path.name.endswith(".index.json"):
        try:
            names = set(json.loads(path.read_bytes())["weight_map"].values())
            parts = [_file(folder, (Path(name).name,)) for name in sorted(names)]
        except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"from_pretrained: {path.name} of {str(folder)!r} is damaged"
            ) from error
    else:
        parts = [path]
    weights: dict[str, Tensor] = {}
    for part in parts:
        try:
            if part.suffix == ".safetensors":
                weights |= load_file(part)
            else:
                weights |= torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged or hostile files can raise anything
            asks = ", or asks for code, which was not run" if part.suffix != ".safetensors" else ""
            raise ValueError(
                f"from_pretrained: {part.name} of {str(folder)!r} is damaged{asks}"
            ) from error
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor) or not (
            tensor.is_floating_point() or name.endswith("position_ids")
        ):
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"from_pretrained: {name} of {str(folder)!r} must hold floating numbers, got {kind}"
            )
    return weights


def _file(folder: str | Path, names: tuple[str, ...]) -> Path:
    """The first of these files that a folder, or a model on the Hub, has."""
    for name in names:
        if Path(folder).is_dir():
            if (path := Path(folder) / name).is_file():
                return path
            continue
        try:
            found = cached_file(str(folder), name, _raise_exceptions_for_missing_entries=False)
        except OSError:  # no such model, or no access to it
            break
        if found is not None:
            return Path(found)
    if not Path(folder).is_dir():
        raise ValueError(
            "from_pretrained: folder must be one that is here, or the id of a model on the Hugging Face Hub with "
            f"{' or '.join(names)}, got {str(folder)!r}"
        )
    raise ValueError(f"from_pretrained: {str(folder)!r} has no {' or '.join(names)}")
