"""Models with ALiBi: those of every family, and models to train.

`load` reads a folder or a name of the Hugging Face Hub; `fuse` and `unfuse` take a BLOOM, Falcon
or MPT model at hand; `embed` makes vectors of documents and their passages; `convert` writes
encoders as folders that Transformers reads alone; `WindowCache` reads endless texts.
`LinbiasForCausalLM`, `LinbiasForMaskedLM` and `LinbiasForConditionalGeneration` are models to
train. Importing this changes nothing in Transformers; `install` makes the families known to its
Auto classes.
"""

# ruff: noqa: F401  # not all that is made here is listed below

from linbias import _extras

_extras.require("linbias.models")

from linbias.models.convert import convert
from linbias.models.decoder.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.decoder.linbias import LinbiasForCausalLM, LinbiasForMaskedLM, LinbiasModel
from linbias.models.decoder.seq2seq import LinbiasForConditionalGeneration, LinbiasSeq2SeqModel
from linbias.models.encoders.bert import (
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasBertModel,
)
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.families import install
from linbias.models.fused import fuse, unfuse
from linbias.models.loading import load, load_tokenizer
from linbias.models.passages import Embedded, embed
from linbias.models.window_cache.cache import WindowCache

# What a program calls. The other names above are those of models that `load` and training make.
__all__ = [
    "LinbiasConfig",
    "LinbiasForCausalLM",
    "LinbiasForConditionalGeneration",
    "LinbiasForMaskedLM",
    "LinbiasSeq2SeqConfig",
    "WindowCache",
    "convert",
    "embed",
    "fuse",
    "install",
    "load",
    "load_tokenizer",
    "unfuse",
]

_GONE = {
    "prepack": "PyTorch's compiler with frozen weights reads as fast (docs/kernels.md)",
    **dict.fromkeys(("Document", "read_documents"), "embed takes texts, which datasets reads"),
}


def __getattr__(name: str) -> object:
    if name in _GONE:
        raise ImportError(f"linbias.models has no {name}: {_GONE[name]}")
    raise AttributeError(f"module 'linbias.models' has no attribute {name!r}")
