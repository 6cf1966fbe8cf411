"""Packed sequences, several texts in one row without padding: `attention_varlen`, nested tensors,
and caches in pages.
"""
