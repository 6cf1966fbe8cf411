"""Existing ALiBi encoders, without their remote code: jina-embeddings-v2, MosaicBERT, DNABERT-2.

original.py has the names and configurations of the original folders.
"""
