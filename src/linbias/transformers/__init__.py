"""What a Transformers model needs around attention, so that it can use `linbias.torch.attention`.

`fuse` runs existing BLOOM, Falcon and MPT models on it, and `from_pretrained` loads the ALiBi encoders whose own code no
longer runs. The rest is for models of one's own:
`padding` turns an `attention_mask` into positions and ranges of keys; `packing` tells the texts of a packed row
apart; `cache` keeps the keys and values of earlier tokens, and how large the keys are.
"""

from linbias import _extras

_extras.require("linbias.transformers")

from linbias.transformers.cache import GrowingLayer, key_bound, use_growing_layers
from linbias.transformers.encoders.config import LinbiasBertConfig
from linbias.transformers.encoders.convert import convert
from linbias.transformers.encoders.documents import Document, read_documents
from linbias.transformers.encoders.embed import Embedded, embed
from linbias.transformers.encoders.load import from_pretrained
from linbias.transformers.encoders.model import (
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasBertModel,
)
from linbias.transformers.fused import fuse, unfuse
from linbias.transformers.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from linbias.transformers.packing import Packing, attend_packed, packed_weights
from linbias.transformers.padding import Padding, read_attention_mask

__all__ = [
    "Document",
    "Embedded",
    "GrowingLayer",
    "LinbiasBertConfig",
    "LinbiasBertForMaskedLM",
    "LinbiasBertForSequenceClassification",
    "LinbiasBertForTokenClassification",
    "LinbiasBertModel",
    "LinbiasMptConfig",
    "LinbiasMptForCausalLM",
    "Packing",
    "Padding",
    "attend_packed",
    "convert",
    "embed",
    "from_pretrained",
    "fuse",
    "key_bound",
    "packed_weights",
    "read_attention_mask",
    "read_documents",
    "unfuse",
    "use_growing_layers",
]
