"""Near-to-far attention for CUDA GPUs, written in Triton: the counterpart of `csrc/`
(derivations: docs/math.md).

Tensors are needed for launching only; nothing here waits for the device, so that calls can be
captured in CUDA graphs. Near tiles and the online softmax: FlashAttention-2 (arXiv 2307.08691).
`python -m triton_compile` in tests/support prints what the machine code is.
"""
