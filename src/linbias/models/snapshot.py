"""Whether a weight still is what something was computed from.

PyTorch's count of changes leaves out those of fused optimizers and those through `.data`. So a
lazy copy is kept, which shares the memory of the weight until something asks to write there.
"""

from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """A weight as it was. Copies and pickles hold nothing, and show no weight.

    Memory of a file cannot be shared so: there some numbers are compared. Writers that PyTorch
    does not know, such as a NumPy array made before, are noticed in neither.
    """

    _kept: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        self._is_shared = weight.untyped_storage().resizable()
        self._keep(weight.detach())

    def _keep(self, weight: Tensor) -> None:
        self._kept = torch._lazy_clone(weight) if self._is_shared else weight
        self._sample = _sample(weight).clone()
        self._state = _state(weight)

    def shows(self, weight: Tensor | None) -> bool:
        """Whether this weight is as it was; once it is not, never again."""
        kept = self._kept
        if kept is None:
            return False
        if weight is not None and _state(weight) == self._state:
            if self._is_shared or torch.equal(_sample(weight), self._sample):
                return True
        elif weight is not None and self._is_shared and _are_equal(weight, kept):
            self._keep(
                weight.detach()
            )  # what might have written only read, as when a model is saved
            return True
        self._kept = None
        return False

    def __getstate__(self) -> None:
        return None


def _state(weight: Tensor) -> tuple[Any, ...]:
    """Where a weight lies, asked without a right to write there."""
    version = None if weight.is_inference() else weight._version
    core: Any = torch._C  # whose types leave this out
    return core._data_address(weight), weight.stride(), version


def _sample(weight: Tensor) -> Tensor:
    """Sixteen numbers of a weight, or a few more, of rows and columns that lie evenly."""
    rows, columns = (max(1, size // 16) for size in weight.shape)
    return weight.detach()[::rows, ::columns].diagonal()


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
