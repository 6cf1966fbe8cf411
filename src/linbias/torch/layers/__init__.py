"""Layers: `MultiheadAttention`, also in the place of PyTorch's own, and `PointAttention`."""
