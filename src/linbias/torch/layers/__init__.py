"""Layers: `MultiheadAttention`, and in the place of PyTorch's own."""
