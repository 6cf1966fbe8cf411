"""The families of models that `load` knows: how a folder is recognised, what it becomes, and how it comes to run on our attention.

A family is a row of `FAMILIES`: how a folder is recognised, its configuration, its classes, other names of weights. Where configuration
and weights are as our classes have them, it is a line in `_OWN`, and `install` knows the family as well.

To add a decoder of Transformers: a module in `fused/` (see `bloom.py`), its name in `MODEL_TYPES` of `fused/family.py`, its `FAMILY` in
`fused/__init__.py`, where a class of remote code gets a line in `_INSTEAD`. Any other decoder: a configuration, blocks and two
models (see `baichuan.py`), of the parts in `decoder.py`; the configuration has what `Alibi` reads. Then its row here; tests against the
original code or a plain restatement, of padding, caches and a saved folder (tests/models/test_models_released.py,
tests/fused/test_transformers_fused.py, tests/models/test_models_loading.py); its row in docs/guides/existing-models.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from linbias.models import fused
from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM, BaichuanModel
from linbias.models.decoder.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.decoder.jais import (
    BtlmConfig,
    BtlmForCausalLM,
    BtlmModel,
    JaisConfig,
    JaisForCausalLM,
    JaisModel,
)
from linbias.models.decoder.linbias import LinbiasForCausalLM, LinbiasForMaskedLM, LinbiasModel
from linbias.models.decoder.seq2seq import LinbiasForConditionalGeneration, LinbiasSeq2SeqModel
from linbias.models.encoders import original
from linbias.models.encoders.bert import (
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasBertModel,
)
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM, PaperModel

Settings = Mapping[str, Any]  # the contents of a config.json
Weights = dict[str, Tensor]  # by name; of a folder that is only looked at, on the device "meta"
Classes = dict[str, type[PreTrainedModel]]  # by task, the one of the folder's own first

TASKS = ("base", "causal", "masked", "seq2seq", "sequence", "token")


@dataclass(frozen=True)
class Family:
    """Models that are recognised and loaded alike.

    Attributes:
        name: For errors and tables.
        recognises: Whether a config.json, and the names of the weights beside it, are of such a model.
        read_config: The configuration that they mean; ValueError where it asks for what is not built.
        classes: What can be made of a model with this configuration.
        rename: Original weights under our names; None where they have these names.
        fused: Whether the model is one of Transformers, that `fuse` then runs on our attention.
    """

    name: str
    recognises: Callable[[Settings, set[str]], bool]
    read_config: Callable[[Settings, set[str]], PreTrainedConfig]
    classes: Callable[[PreTrainedConfig], Classes]
    rename: Callable[[Weights], Weights] | None = None
    fused: bool = False


def find_family(settings: Settings, names: set[str]) -> Family | None:
    """The first family that recognises a folder; None if none does.

    Args:
        settings: Its config.json.
        names: Of its weights.
    """
    return next((family for family in FAMILIES if family.recognises(settings, names)), None)


def is_plain(settings: Settings) -> bool:
    """Whether a folder is a causal model of Transformers that has no ALiBi, such as GPT-2."""
    kind = settings.get("model_type")
    return isinstance(kind, str) and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind != "bert"


def _own(kind: type[PreTrainedConfig], classes: Classes) -> Family:
    """A family whose configuration and weights are as our classes have them."""

    def fitting(config: PreTrainedConfig) -> Classes:
        if not isinstance(config, LinbiasConfig) or len(classes) < 3:
            return classes
        task = "causal" if config.encoder_position is None else "masked"
        return {name: classes[name] for name in (task, "base")}

    return Family(
        kind.model_type,
        lambda settings, _: settings.get("model_type") == kind.model_type,
        lambda settings, _: kind.from_dict(dict(settings)),
        fitting,
    )


def _of_transformers(model_type: str, stem: str) -> Family:
    """A family of Transformers' own classes, which are fused."""
    kinds = {
        "causal": "ForCausalLM",
        "base": "Model",
        "sequence": "ForSequenceClassification",
        "token": "ForTokenClassification",
    }
    config = getattr(transformers, f"{stem}Config")

    def recognises(settings: Settings, _: set[str]) -> bool:
        # Falcon without it rotates queries and keys, and is a plain model.
        has_alibi = model_type != "falcon" or settings.get("alibi") is True
        return settings.get("model_type") == model_type and has_alibi

    return Family(
        model_type,
        recognises,
        lambda settings, _: config.from_dict(dict(settings)),
        lambda _: {task: getattr(transformers, stem + kind) for task, kind in kinds.items()},
        fused=True,
    )


def _is_mpt_of_ours(settings: Settings, _: set[str]) -> bool:
    """Whether the class of Transformers refuses a model of MPT, or leaves out parts of it."""
    if settings.get("model_type") != "mpt":
        return False
    try:
        fused.mpt.check_supported(
            config := transformers.MptConfig.from_dict(dict(settings)), "load"
        )
        fused.mpt.check_whole(config, "load")
    except (ValueError, TypeError, AttributeError, StrictDataclassError):
        return True
    return False


_BERT: Classes = {
    "base": LinbiasBertModel,
    "masked": LinbiasBertForMaskedLM,
    "sequence": LinbiasBertForSequenceClassification,
    "token": LinbiasBertForTokenClassification,
}


def _original_encoder(name: str, family: str) -> Family:
    """A family of encoders whose own code lies beside the weights, and is not run."""

    def read_config(settings: Settings, names: set[str]) -> LinbiasBertConfig:
        config = original.read_config(settings, family)
        prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
        config.original = {"family": family, "prefix": prefix, "config": dict(settings)}
        return config

    return Family(
        name,
        lambda settings, names: original.recognise(settings, names) == family,
        read_config,
        lambda _: _BERT,
        lambda weights: original.to_ours(weights, family),
    )


_OWN: dict[type[PreTrainedConfig], Classes] = {
    LinbiasConfig: {
        "causal": LinbiasForCausalLM,
        "masked": LinbiasForMaskedLM,
        "base": LinbiasModel,
    },
    LinbiasSeq2SeqConfig: {
        "seq2seq": LinbiasForConditionalGeneration,
        "base": LinbiasSeq2SeqModel,
    },
    PaperConfig: {"causal": PaperForCausalLM, "base": PaperModel},
    LinbiasBertConfig: _BERT,
    BaichuanConfig: {"causal": BaichuanForCausalLM, "base": BaichuanModel},
    JaisConfig: {"causal": JaisForCausalLM, "base": JaisModel},
    BtlmConfig: {"causal": BtlmForCausalLM, "base": BtlmModel},
}

FAMILIES = (
    *(_own(kind, classes) for kind, classes in _OWN.items()),
    _of_transformers("bloom", "Bloom"),
    _of_transformers("falcon", "Falcon"),
    Family(
        "mpt",
        _is_mpt_of_ours,
        lambda settings, _: LinbiasMptConfig.from_dict(dict(settings)),
        lambda _: {"causal": LinbiasMptForCausalLM},
        fused=True,
    ),
    _of_transformers("mpt", "Mpt"),
    _original_encoder("jina-embeddings-v2", "jina"),
    _original_encoder("jina-embeddings-v2-code", "jina-code"),
    _original_encoder("MosaicBERT or DNABERT-2", "mosaic"),
)
# In words, each once.
NAMES = tuple(dict.fromkeys(family.name for family in FAMILIES))


def install() -> None:
    """Make the families known to Transformers, for the whole process; more calls change nothing.

    Then its Auto classes, and what is built on them (pipelines, sentence_transformers), load the models that linbias
    makes and those of Baichuan, JAIS and BTLM; and `from_pretrained(..., attn_implementation="linbias")` gives BLOOM,
    Falcon and MPT fused, with default options. `load` needs none of this.

    Example:
        >>> install()
        >>> from transformers import AutoModelForCausalLM
        >>> config = LinbiasConfig(hidden_size=32, num_attention_heads=2)
        >>> type(AutoModelForCausalLM.from_config(config)).__name__
        'LinbiasForCausalLM'
    """
    fused.install()
    autos = {
        "base": transformers.AutoModel,
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "sequence": transformers.AutoModelForSequenceClassification,
        "token": transformers.AutoModelForTokenClassification,
    }
    for kind, classes in _OWN.items():
        transformers.AutoConfig.register(kind.model_type, kind, exist_ok=True)
        for task, found in classes.items():
            autos[task].register(kind, found, exist_ok=True)
