"""Language models: importing this makes all families known to Transformers' Auto classes.

`LinbiasForCausalLM` is the project's own decoder with a choice of positions, `LinbiasForMaskedLM` the same blocks
reading in both directions, `LinbiasForConditionalGeneration` an encoder and a decoder of such blocks, and
`PaperForCausalLM` the paper's decoder. `BaichuanForCausalLM`, `JaisForCausalLM` and
`BtlmForCausalLM` read released models with ALiBi.
"""

from linbias import _extras

_extras.require("linbias.models")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from linbias.models.baichuan import BaichuanConfig, BaichuanForCausalLM, BaichuanModel
from linbias.models.cache import GrowingLayer, key_bound, use_growing_layers
from linbias.models.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.encoders.bert import (
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasBertModel,
)
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.encoders.convert import convert
from linbias.models.encoders.documents import Document, read_documents
from linbias.models.encoders.embed import Embedded, embed
from linbias.models.encoders.load import from_pretrained
from linbias.models.fused import fuse, unfuse
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from linbias.models.jais import (
    BtlmConfig,
    BtlmForCausalLM,
    BtlmModel,
    JaisConfig,
    JaisForCausalLM,
    JaisModel,
)
from linbias.models.linbias import LinbiasForCausalLM, LinbiasForMaskedLM, LinbiasModel
from linbias.models.packing import Packing, attend_packed, packed_weights
from linbias.models.padding import Padding, read_attention_mask
from linbias.models.paper import PaperForCausalLM, PaperModel
from linbias.models.paper_config import PaperConfig
from linbias.models.seq2seq import LinbiasForConditionalGeneration, LinbiasSeq2SeqModel

for _config, _base, _language_model in (
    (LinbiasConfig, LinbiasModel, LinbiasForCausalLM),
    (PaperConfig, PaperModel, PaperForCausalLM),
    (BaichuanConfig, BaichuanModel, BaichuanForCausalLM),
    (JaisConfig, JaisModel, JaisForCausalLM),
    (BtlmConfig, BtlmModel, BtlmForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _language_model, exist_ok=True)
AutoModelForMaskedLM.register(LinbiasConfig, LinbiasForMaskedLM, exist_ok=True)
AutoConfig.register(LinbiasSeq2SeqConfig.model_type, LinbiasSeq2SeqConfig, exist_ok=True)
AutoModel.register(LinbiasSeq2SeqConfig, LinbiasSeq2SeqModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(
    LinbiasSeq2SeqConfig, LinbiasForConditionalGeneration, exist_ok=True
)

__all__ = [
    "BaichuanConfig",
    "BaichuanForCausalLM",
    "BaichuanModel",
    "BtlmConfig",
    "BtlmForCausalLM",
    "BtlmModel",
    "Document",
    "Embedded",
    "GrowingLayer",
    "JaisConfig",
    "JaisForCausalLM",
    "JaisModel",
    "LinbiasBertConfig",
    "LinbiasBertForMaskedLM",
    "LinbiasBertForSequenceClassification",
    "LinbiasBertForTokenClassification",
    "LinbiasBertModel",
    "LinbiasConfig",
    "LinbiasForCausalLM",
    "LinbiasForConditionalGeneration",
    "LinbiasForMaskedLM",
    "LinbiasModel",
    "LinbiasMptConfig",
    "LinbiasMptForCausalLM",
    "LinbiasSeq2SeqConfig",
    "LinbiasSeq2SeqModel",
    "Packing",
    "Padding",
    "PaperConfig",
    "PaperForCausalLM",
    "PaperModel",
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
