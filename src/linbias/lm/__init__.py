"""Language models trained short and tested long.

Importing this module makes `LinbiasForCausalLM` known to Transformers' Auto classes. What needs data sets or a
trainer stands in modules of its own: `linbias.lm.corpus`, `train`, `evaluate`, `extrapolate`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from linbias.lm.config import LinbiasConfig
from linbias.lm.model import LinbiasForCausalLM, LinbiasModel

AutoConfig.register("linbias", LinbiasConfig, exist_ok=True)
AutoModel.register(LinbiasConfig, LinbiasModel, exist_ok=True)
AutoModelForCausalLM.register(LinbiasConfig, LinbiasForCausalLM, exist_ok=True)

__all__ = ["LinbiasConfig", "LinbiasForCausalLM", "LinbiasModel"]
