"""The one place that decides whether Python may look at the values of a tensor.

None are there in fake and meta tensors, under `vmap` and `functionalize`; and what a compiler or a
tracer records is a program for other values.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from linbias.torch.operators import direct, transforms

_modes, _mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
_PYTHON, _BEFORE_DISPATCH = direct.bits("Python"), direct.bits("PreDispatch")


def readable(x: Tensor) -> Tensor | None:
    """The tensor whose `tolist` has the values of x, whatever transforms wrap it; None if none.

    Example:
        >>> torch.func.grad(lambda x: x.sum() * readable(x).item())(torch.tensor([3.0]))
        tensor([3.])
    """
    if torch.compiler.is_compiling():  # first: the compiler reads no further
        return None
    on_thread = torch._C._dispatch_tls_local_include_set().raw_repr()
    if on_thread & _BEFORE_DISPATCH:
        return None
    if on_thread & _PYTHON and any(map(_mode, (_modes.FAKE, _modes.FUNCTIONAL, _modes.PROXY))):
        return None
    inner = torch.func.debug_unwrap(x) if transforms.active() else x
    return inner if direct.is_plain(inner) and inner.shape == x.shape else None


def known_values(x: Tensor) -> np.ndarray[Any, Any] | None:
    """The values of a tensor, where reading them does not wait for a device."""
    inner = readable(x) if x.device.type == "cpu" else None
    if inner is None:
        return None
    if transforms.active():  # where detach would wrap it again
        return np.array(inner.tolist()).reshape(x.shape)
    return inner.detach().numpy()


def may_read(x: Tensor) -> bool:
    """Whether operations that read x and wait for it may run here."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not capturing and not transforms.active() and readable(x) is not None
