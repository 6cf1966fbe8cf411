"""How a model reads a text that is longer than its input: windows, and batches of equal ones."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias._run.files import Record


class Window(NamedTuple):
    """The model reads the inputs [start, stop); its last `keep` predictions are scored."""

    start: int
    stop: int
    keep: int

    @property
    def width(self) -> int:
        return self.stop - self.start


def equal_windows(windows: Iterable[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Neighbouring windows of one width and keep, in batches of `batch_tokens` or one of them."""
    for (width, _), group in groupby(windows, lambda window: (window.width, window.keep)):
        while batch := list(islice(group, max(1, batch_tokens // width))):
            yield batch


def rows_of(ids: NDArray[Any], batch: list[Window], device: torch.device) -> Tensor:
    """The tokens of equal windows and the one after each: int64 [windows, width + 1]."""
    tokens = np.stack([ids[window.start : window.stop + 1] for window in batch])
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


class Likelihood:
    """What was measured of a text, among it the mean negative log likelihood `nll`, in nats."""

    nll: float

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite where that is beyond a float."""
        return math.inf if self.nll >= 709.0 else math.exp(self.nll)

    def to_dict(self) -> Record:
        """All fields and the perplexity as JSON values."""
        return {**vars(self), "perplexity": self.perplexity}


def check_tokens(function: str, ids: NDArray[Any], vocab_size: int, at_least: int) -> None:
    """Refuses, for a function, what is no text of at least so many ids below the vocabulary."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < at_least:
        raise ValueError(
            f"{function}: ids must be one row of at least {at_least} integer"
            f"{'s' * (at_least > 1)}, got {ids.dtype} {list(ids.shape)}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{function}: ids must lie in [0, {vocab_size}), the model's vocabulary; "
            f"got {ids.min()} to {ids.max()}"
        )
