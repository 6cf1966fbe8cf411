"""Slopes that never change, kept on the device that wants them.

A copy from the CPU at every call would wait for the device, and cannot be captured in a CUDA graph.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias.torch import transforms

_MAX_ENTRIES = 256
_kept: dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor] = {}


def constant(
    values: Sequence[float] | NDArray[np.float64], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The values as a tensor [len(values)], on other devices than the CPU the same one each time: not to be changed.

    Example:
        >>> constant((0.5, 0.25), torch.float32, torch.device("cpu"))
        tensor([0.5000, 0.2500])
    """
    # What is made under a transform belongs to it.
    if device.type == "cpu" or torch.compiler.is_compiling() or transforms.active():
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)
    key = tuple(values), dtype, device
    if key not in _kept:
        with torch.inference_mode(False):  # else autograd could not save it later
            tensor = torch.tensor(key[0], dtype=dtype).to(device)
        if type(tensor) is not Tensor:
            return tensor  # of someone who traces
        if len(_kept) == _MAX_ENTRIES:
            _kept.clear()
        _kept[key] = tensor
    return _kept[key]
