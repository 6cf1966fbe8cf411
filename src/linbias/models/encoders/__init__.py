"""Existing ALiBi encoders, without their remote code: jina-embeddings-v2, MosaicBERT, DNABERT-2.

bert_config.py   what they disagree on
bert.py          one encoder and its heads
original.py      the names and configurations of the original folders
"""
