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
    """All segments that a run trains on, one after another, pass after pass over the text.

    Segment i of the text reads tokens i * length to (i + 1) * length - 1 and predicts the token
    after each; the tokens left over at the end are not used. Every pass has an order of its own,
    drawn from the seed and the number of the pass. So there is no state to save: step n reads the
    segments from n * batch_size on. `num_segments` are those of the whole run.

    Example:
        >>> segments = Segments(np.arange(7, dtype=np.uint8), length=3, num_segments=9, seed=0)
        >>> batch = segments.__getitems__([0])
        >>> (batch["labels"] - batch["input_ids"]).tolist()
        [[1, 1, 1]]
    """

    def __init__(self, ids: TokenIds, *, length: int, num_segments: int, seed: int) -> None:
        self.ids, self.length, self.num_segments, self.seed = ids, length, num_segments, seed
        self.per_pass = (len(ids) - 1) // length

    def __len__(self) -> int:
        return self.num_segments

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """The segments of a whole batch at once: `input_ids` and `labels`, int64 [batch, length]."""
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
    """Segments for processes of which each `pieces` in a row read one sequence, a piece each.

    Data loaders give process r of a run the batches r, r + processes, and so on, of `batch_size`.
    Here batch j is piece j % pieces of batch j // pieces of the segments: as many columns of it as
    the others have, or one more.
    """

    def __init__(self, segments: Segments, pieces: int, batch_size: int) -> None:
        self.segments, self.pieces, self.batch_size = segments, pieces, batch_size

    def __len__(self) -> int:
        return len(self.segments) * self.pieces

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """The piece of a batch: `input_ids` and `labels`, int64 [batch, about length / pieces]."""
        batches = {index // self.batch_size for index in indices}
        assert len(batches) == 1, "a data loader asks for one batch at a time"
        batch, piece = divmod(batches.pop(), self.pieces)
        rows = [batch * self.batch_size + index % self.batch_size for index in indices]
        whole = self.segments.__getitems__(rows)
        return {name: x.tensor_split(self.pieces, 1)[piece] for name, x in whole.items()}


@lru_cache(maxsize=2)  # a batch may end one pass and begin the next
def _shuffle(seed: int, pass_number: int, size: int) -> npt.NDArray[np.integer[Any]]:
    return np.random.default_rng((seed, pass_number)).permutation(size)
