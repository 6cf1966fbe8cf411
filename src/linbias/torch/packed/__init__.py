"""Packed sequences, several texts in one row without padding: `attention_varlen` and nested
tensors.
"""
