"""Linear layers, read in the fastest of PyTorch's own ways on this processor."""
