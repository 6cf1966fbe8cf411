"""The training sequences of a run, as a data set of PyTorch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from linbias.data.tokenizers import TokenIds


class Segments(Dataset[dict[str, Tensor]]):
    """All segments that a run trains on: pass after pass over the text, each in an order of its
    own, drawn from the seed and the pass's number. So there is no state to save.
    """

    def __init__(self, ids: TokenIds, *, length: int, num_segments: int, seed: int) -> None:
        self.ids, self.length, self.num_segments, self.seed = ids, length, num_segments, seed
        self.per_pass = (len(ids) - 1) // length

    def __len__(self) -> int:
        return self.num_segments

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        in_passes = [divmod(index, self.per_pass) for index in indices]
        order = [_shuffle(self.seed, number, self.per_pass)[index] for number, index in in_passes]
        starts = np.array(order)[:, None] * self.length
        tokens = self.ids[starts + np.arange(self.length + 1)].astype(np.int64)
        segments = torch.from_numpy(tokens)
        return {"input_ids": segments[:, :-1], "labels": segments[:, 1:]}


class HidingSegments(Segments):
    """Segments of which some text is hidden: a token that begins each, and length - 1 others."""

    def __init__(
        self, ids: TokenIds, *, length: int, num_segments: int, seed: int, tokens: Any
    ) -> None:
        super().__init__(ids, length=length - 1, num_segments=num_segments, seed=seed)
        self.tokens = tokens


class InPieces(Dataset[dict[str, Tensor]]):
    """Segments for processes of which each `pieces` in a row read one sequence, a part each: batch
    j of the data loaders is part j % pieces of batch j // pieces.
    """

    def __init__(self, segments: Segments, pieces: int, batch_size: int) -> None:
        self.segments, self.pieces, self.batch_size = segments, pieces, batch_size

    def __len__(self) -> int:
        return len(self.segments) * self.pieces

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        batches = {index // self.batch_size for index in indices}
        assert len(batches) == 1, "a data loader asks for one batch at a time"
        batch, piece = divmod(batches.pop(), self.pieces)
        rows = [batch * self.batch_size + index % self.batch_size for index in indices]
        whole = self.segments.__getitems__(rows)
        return {name: x.tensor_split(self.pieces, 1)[piece] for name, x in whole.items()}


@lru_cache(maxsize=2)  # a batch may end one pass and begin the next
def _shuffle(seed: int, pass_number: int, size: int) -> npt.NDArray[np.integer[Any]]:
    return np.random.default_rng((seed, pass_number)).permutation(size)
