"""linbias.torch.attention, with the implementation that it takes by itself."""

import numpy as np
import torch

from adapters import parts
from linbias.torch import attention as ours

NAME, PACKAGE, RUNS = "linbias, PyTorch", "linbias", "all"
DTYPES = ("float32", "bfloat16")


def attention(q, k, v, *, dtype, return_lse=False, **arguments):
    qkv = (torch.tensor(x).to(getattr(torch, dtype)) for x in (q, k, v))
    given = parts.for_linbias(q, k, **arguments)
    arrays = {n: torch.tensor(x) for n, x in given.items() if isinstance(x, np.ndarray)}
    out, lse = ours(*qkv, **{**given, **arrays}, return_lse=True)
    out = out.to(torch.float64 if dtype == "float64" else torch.float32).numpy()
    return (out, lse.numpy()) if return_lse else out
