"""Near-to-far attention for CUDA GPUs, written in Triton: the counterpart of `csrc/` (derivations: docs/math.md).

- `tile.py`: what a tile of scores is made of: slopes, positions, distances, loads, the dropout mask
- `certificate.py`: bounds on the keys not visited yet, as a number of blocks to visit
- `forward.py`, `decode.py`, `backward.py`: the kernels, each with the function that launches it
- `launch.py`: what these functions share: the call, and a kernel's arguments
- `sizes.py`: tile sizes, and which devices have room for them

Tensors are needed for launching only; nothing here waits for the device, so that calls can be captured in CUDA graphs.
Source of the idea: DESIGN section 2; near tiles and the online softmax: FlashAttention-2 (arXiv 2307.08691).
Measured: nothing yet on a GPU. The tests run every kernel in Triton's interpreter and compile it for sm_90:
`python -m triton_compile` in tests/ prints what the machine code is.
"""
