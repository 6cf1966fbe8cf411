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
from linbias.models.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.jais import (
    BtlmConfig,
    BtlmForCausalLM,
    BtlmModel,
    JaisConfig,
    JaisForCausalLM,
    JaisModel,
)
from linbias.models.linbias import LinbiasForCausalLM, LinbiasForMaskedLM, LinbiasModel
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
    "JaisConfig",
    "JaisForCausalLM",
    "JaisModel",
    "LinbiasConfig",
    "LinbiasForCausalLM",
    "LinbiasForConditionalGeneration",
    "LinbiasForMaskedLM",
    "LinbiasModel",
    "LinbiasSeq2SeqConfig",
    "LinbiasSeq2SeqModel",
    "PaperConfig",
    "PaperForCausalLM",
    "PaperModel",
]
