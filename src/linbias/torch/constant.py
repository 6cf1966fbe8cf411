"""Slopes that never change, kept on the device that wants them.

A copy from the CPU at every call would wait for the device, and cannot be captured in a CUDA
graph; and on the CPU a short call would feel it.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias.schedules import slopes
from linbias.torch.operators.direct import unobserved

_MAX_ENTRIES = 256
_kept: dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor] = {}


def constant(
    values: Sequence[float] | NDArray[np.float64], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The values as a tensor [len(values)], the same one each time: not to be changed.

    Example:
        >>> constant((0.5, 0.25), torch.float32, torch.device("cpu"))
        tensor([0.5000, 0.2500])
    """
    if not unobserved():  # what is made under a transform, a mode or a tracer belongs to it
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)
    key = tuple(values), dtype, device
    tensor = _kept.get(key)  # looked up once: another thread may clear them
    if tensor is None:
        with torch.inference_mode(False):  # else autograd could not save it later
            tensor = torch.tensor(key[0], dtype=dtype).to(device)
        if len(_kept) >= _MAX_ENTRIES:
            _kept.clear()
        _kept[key] = tensor
    return tensor


def default_slopes(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The slopes of a call that names none: `linbias.slopes(num_heads)`, none for no heads."""
    num_heads = len(range(num_heads))  # of one program there is one: a length is no symbol
    if torch.compiler.is_compiling():
        return constant(slopes(num_heads) if num_heads else (), dtype, device)
    return constant(_default_values(num_heads), dtype, device)


@functools.cache
def _default_values(num_heads: int) -> tuple[float, ...]:
    return tuple(slopes(num_heads).tolist()) if num_heads else ()
