"""Existing ALiBi encoders, without their remote code: jina-embeddings-v2, MosaicBERT, DNABERT-2.

config.py     what they disagree on
model.py      one encoder and its heads
rows.py       a batch without its padding
original.py   the names and configurations of the original folders
load.py       from_pretrained
convert.py    folders of both forms
embed.py      vectors of documents, which documents.py reads and vectors.py writes
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from linbias.models.encoders.bert import (
    LinbiasBertForMaskedLM,
    LinbiasBertForSequenceClassification,
    LinbiasBertForTokenClassification,
    LinbiasBertModel,
)
from linbias.models.encoders.bert_config import LinbiasBertConfig

AutoConfig.register(LinbiasBertConfig.model_type, LinbiasBertConfig, exist_ok=True)
for _auto, _class in (
    (AutoModel, LinbiasBertModel),
    (AutoModelForMaskedLM, LinbiasBertForMaskedLM),
    (AutoModelForSequenceClassification, LinbiasBertForSequenceClassification),
    (AutoModelForTokenClassification, LinbiasBertForTokenClassification),
):
    _auto.register(LinbiasBertConfig, _class, exist_ok=True)
