"""Language models: importing this makes both families known to Transformers' Auto classes.

`LinbiasForCausalLM` is the project's own decoder with a choice of positions, `LinbiasForMaskedLM` the same blocks
reading in both directions, `PaperForCausalLM` the paper's decoder.
"""

from linbias import _extras

_extras.require("linbias.models")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from linbias.models.config import LinbiasConfig
from linbias.models.linbias import LinbiasForCausalLM, LinbiasForMaskedLM, LinbiasModel
from linbias.models.paper import PaperForCausalLM, PaperModel
from linbias.models.paper_config import PaperConfig

for _config, _base, _language_model in (
    (LinbiasConfig, LinbiasModel, LinbiasForCausalLM),
    (PaperConfig, PaperModel, PaperForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _language_model, exist_ok=True)
AutoModelForMaskedLM.register(LinbiasConfig, LinbiasForMaskedLM, exist_ok=True)

__all__ = [
    "LinbiasConfig",
    "LinbiasForCausalLM",
    "LinbiasForMaskedLM",
    "LinbiasModel",
    "PaperConfig",
    "PaperForCausalLM",
    "PaperModel",
]
