"""The families of models that `load` knows: how a folder is recognised, and what it becomes.

To add a decoder of Transformers: a module in `fused/` (see `bloom.py`), its name in `MODEL_TYPES`
of `fused/family.py`, its `FAMILY` in `fused/__init__.py`. Any other: a configuration, blocks and
two models (see `decoder/baichuan.py`), and tests (tests/models/test_models_released.py). Then its
row here and in docs/guides/existing-models.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from linbias.data.tokenizers import Tokenizer
from linbias.models import fused
from linbias.models.decoder import baichuan, linbias, seq2seq
from linbias.models.decoder.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.encoders import bert, original
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.files import Weights
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM

# By task, the Auto class that makes a model for it.
_AUTO = {
    "base": "AutoModel",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
}
TASKS = tuple(_AUTO)
Settings = Mapping[str, Any]  # the contents of a config.json
Classes = Mapping[str, type[PreTrainedModel]]  # by task, the one of the folder's own first
# Rooms that bring a family of their own, in their module `family`; nothing else here knows them.
_ROOMS = ("linbias.paper",)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that are recognised and loaded alike."""

    name: str
    # Both are given a config.json and the names of the weights beside it.
    recognises: Callable[[Settings, set[str]], bool]
    read_config: Callable[[Settings, set[str]], PreTrainedConfig]
    classes: Classes
    tasks: Callable[[Any], tuple[str, ...]] | None = None  # of a configuration; None: all classes
    config: type[PreTrainedConfig] | None = None  # what `install` makes known, with the classes
    rename: Callable[[Weights], Weights] | None = None  # original weights under our names
    # The fields of the configuration that a task means, given the names of the weights.
    fields_of_task: Callable[[str, set[str]], dict[str, Any]] | None = None
    fused: bool = False  # whether the model is one of Transformers, that `fuse` then runs
    # What turns a text into tokens, given the folder; None: a tokenizer of Transformers.
    encoder: Callable[[str], Callable[[bytes], NDArray[Any]]] | None = None
    needs_tokenizer_json: str | None = None  # the command that writes tokenizer.json


def own_family(kind: type[PreTrainedConfig], classes: Classes, **more: Any) -> Family:
    """A family whose configuration and weights are as our classes have them."""
    return Family(
        name=kind.model_type,
        recognises=lambda settings, _: settings.get("model_type") == kind.model_type,
        read_config=lambda settings, _: kind.from_dict(dict(settings)),
        classes=classes,
        config=kind,
        **more,
    )


def find_family(settings: Settings, names: set[str]) -> Family | None:
    return next((family for family in families() if family.recognises(settings, names)), None)


def is_plain(settings: Settings) -> bool:
    """Whether a folder is a causal model of Transformers that has no ALiBi, such as GPT-2."""
    kind = settings.get("model_type")
    return isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind != "bert"


def _of_transformers(model_type: str, stem: str) -> Family:
    """A family of Transformers' own classes, which are fused."""
    names = {"causal": "ForCausalLM", "base": "Model", "sequence": "ForSequenceClassification"}
    names["token"] = "ForTokenClassification"
    config = getattr(transformers, f"{stem}Config")

    def recognises(settings: Settings, _: set[str]) -> bool:
        # Falcon without it rotates queries and keys, and is a plain model.
        has_alibi = model_type != "falcon" or settings.get("alibi") is True
        return settings.get("model_type") == model_type and has_alibi

    return Family(
        name=model_type,
        recognises=recognises,
        read_config=lambda settings, _: config.from_dict(dict(settings)),
        classes={task: getattr(transformers, stem + name) for task, name in names.items()},
        fused=True,
    )


def _is_mpt_of_ours(settings: Settings, _: set[str]) -> bool:
    """Whether the class of Transformers refuses a model of MPT, or leaves out parts of it."""
    if settings.get("model_type") != "mpt":
        return False
    try:
        config = transformers.MptConfig.from_dict(dict(settings))
        fused.mpt.check_supported(config, "load")
        fused.mpt.check_whole(config, "load")
    except (ValueError, TypeError, AttributeError, StrictDataclassError):
        return True
    return False


_BERT: Classes = {
    "base": bert.LinbiasBertModel,
    "masked": bert.LinbiasBertForMaskedLM,
    "sequence": bert.LinbiasBertForSequenceClassification,
    "token": bert.LinbiasBertForTokenClassification,
}


def _pooler_of_task(task: str, names: set[str]) -> dict[str, Any]:
    """The pooler that tasks need, and else the one that is there."""
    has_pooler = task == "sequence" or any("pooler." in name for name in names)
    return {"pooler": has_pooler and task in ("base", "sequence")}


def _original_encoder(name: str, family: str) -> Family:
    """A family of encoders whose own code lies beside the weights, and is not run."""

    return Family(
        name=name,
        recognises=lambda settings, names: original.recognise(settings, names) == family,
        read_config=lambda settings, _: original.read_config(settings, family),
        classes=_BERT,
        rename=lambda weights: original.to_ours(weights, family),
        fields_of_task=_pooler_of_task,
    )


def _encoder(folder: str) -> Callable[[bytes], NDArray[Any]]:
    return Tokenizer.load(folder).encode


@cache
def families() -> tuple[Family, ...]:
    """All families; the rooms of some are imported now."""
    return (
        own_family(
            LinbiasConfig,
            {
                "causal": linbias.LinbiasForCausalLM,
                "masked": linbias.LinbiasForMaskedLM,
                "base": linbias.LinbiasModel,
            },
            tasks=lambda config: ("masked" if config.encoder_position else "causal", "base"),
            encoder=_encoder,
        ),
        own_family(
            LinbiasSeq2SeqConfig,
            {
                "seq2seq": seq2seq.LinbiasForConditionalGeneration,
                "base": seq2seq.LinbiasSeq2SeqModel,
            },
            encoder=_encoder,
        ),
        *(import_module(f"{room}.family").FAMILY for room in _ROOMS),
        own_family(LinbiasBertConfig, _BERT, fields_of_task=_pooler_of_task),
        own_family(
            baichuan.BaichuanConfig,
            {"causal": baichuan.BaichuanForCausalLM, "base": baichuan.BaichuanModel},
        ),
        _of_transformers("bloom", "Bloom"),
        _of_transformers("falcon", "Falcon"),
        Family(
            name="mpt",
            recognises=_is_mpt_of_ours,
            read_config=lambda settings, _: LinbiasMptConfig.from_dict(dict(settings)),
            classes={"causal": LinbiasMptForCausalLM},
            fused=True,
        ),
        _of_transformers("mpt", "Mpt"),
        _original_encoder("jina-embeddings-v2", "jina"),
        _original_encoder("jina-embeddings-v2-code", "jina-code"),
        _original_encoder("MosaicBERT or DNABERT-2", "mosaic"),
    )


def install() -> None:
    """Make the families known to Transformers, for the whole process; more calls change nothing.

    Then its Auto classes, and what is built on them (pipelines, sentence_transformers), load the
    models that linbias makes and those of Baichuan; and `from_pretrained(...,
    attn_implementation="linbias")` gives BLOOM, Falcon and MPT fused, with default options. `load`
    needs none of this.

    Example:
        >>> install()
        >>> from transformers import AutoModelForCausalLM
        >>> config = LinbiasConfig(hidden_size=32, num_attention_heads=2)
        >>> type(AutoModelForCausalLM.from_config(config)).__name__
        'LinbiasForCausalLM'
    """
    fused.install()
    for family in families():
        if family.config is not None:
            transformers.AutoConfig.register(family.name, family.config, exist_ok=True)
            for task, kind in family.classes.items():
                auto = getattr(transformers, _AUTO[task])
                auto.register(family.config, kind, exist_ok=True)
