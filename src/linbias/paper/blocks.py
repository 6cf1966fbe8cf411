"""A text's ids cut into blocks, the blocks as batches in the order of the paper's code, and those as a data set of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from linbias.paper.dictionary import Dictionary


def blocks(num_ids: int, length: int) -> NDArray[np.int64]:
    """Where each block of a text starts and stops, [blocks, 2]; the last may be shorter.

    Example:
        >>> blocks(7, 3).tolist()
        [[0, 3], [3, 6], [6, 7]]
    """
    starts = np.arange(0, num_ids, length, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + length, num_ids)], axis=1)


def block_tokens(
    ids: NDArray[Any], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a model reads and predicts of a block, [stop - start]: the same ids, shifted by one.

    The first id that is read is the last of the block before; the first block reads </s> first.

    Example:
        >>> [part.tolist() for part in block_tokens(np.array([7, 5, 9, 4]), 0, 2)]
        [[2, 7], [7, 5]]
        >>> [part.tolist() for part in block_tokens(np.array([7, 5, 9, 4]), 2, 4)]
        [[5, 9], [9, 4]]
    """
    targets = np.asarray(ids[start:stop], np.int64)
    before = ids[start - 1] if start else Dictionary.EOS
    return np.concatenate([[before], targets[:-1]], dtype=np.int64), targets


def batch_order(
    num_ids: int,
    length: int,
    max_tokens: int,
    seed: int,
    epoch: int,
    *,
    multiple: int = 1,
) -> list[list[int]]:
    """The batches of one pass over a text, as numbers of blocks, in the original's order.

    Blocks are shuffled once for all passes, the short one put first, and cut into batches of as
    many as `max_tokens` allows, fewer than `multiple` or a multiple of it (the original's
    `--required-batch-size-multiple`); each pass, counted from 1, shuffles the batches. Both
    shuffles draw from NumPy's legacy generator, seeded with `seed` and with `seed + epoch`.
    `Recipe` checks the numbers.

    Example:
        >>> batch_order(10, length=2, max_tokens=4, seed=1, epoch=1)
        [[2], [0, 4], [3, 1]]
    """
    spans = blocks(num_ids, length)
    shuffled = np.random.RandomState(seed).permutation(len(spans))
    order = np.lexsort((shuffled, spans[:, 1] - spans[:, 0]))
    rows = _allowed_rows(max_tokens // length, multiple)
    batches = [order[start : start + rows].tolist() for start in range(0, len(order), rows)]
    if batches:
        last = batches.pop()
        kept = _allowed_rows(len(last), multiple)
        batches += [part for part in (last[:kept], last[kept:]) if part]
    np.random.RandomState(seed + epoch).shuffle(batches)
    return batches


def _allowed_rows(rows: int, multiple: int) -> int:
    """The largest number of rows, up to `rows`, that a batch may have."""
    return rows if rows < multiple else rows - rows % multiple


class Batches(Dataset[dict[str, Any]]):
    """All batches of a run, one after another: item i belongs to step i // per_step.

    Every pass over the text has an order of its own. The last step of a pass may lack batches;
    empty ones, of a single target that is not scored, stand for them, so that every process has
    its share. There is no state to save: step n reads the batches from n * per_step on.

    Args:
        ids: [N], the ids of a split.
        length: Tokens per block.
        order: From the number of a pass, counted from 1, to its batches, of block numbers.
        per_step: Batches per step.
        steps: Steps of the run; None: those of one pass.
        pieces: In which a batch is cut along its tokens, for as many processes: item i is then
            piece i % pieces of batch i // pieces.

    Example:
        >>> ids = np.arange(4, 11, dtype=np.uint16)
        >>> batches = Batches(ids, 3, lambda number: [[0, 2], [1]], per_step=2)
        >>> batches[0]["input_ids"].tolist(), batches[0]["targets"].tolist()
        ([[2, 4, 5], [9, 1, 1]], [[4, 5, 6], [10, -100, -100]])
    """

    def __init__(
        self,
        ids: NDArray[Any],
        length: int,
        order: Callable[[int], list[list[int]]],
        *,
        per_step: int,
        steps: int | None = None,
        pieces: int = 1,
    ) -> None:
        self.ids, self.spans, self.per_step = ids, blocks(len(ids), length), per_step
        self.pieces = pieces
        self.order = lru_cache(maxsize=2)(order)
        self.steps_per_pass = math.ceil(len(order(1)) / per_step)
        self.steps = steps or self.steps_per_pass

    def __len__(self) -> int:
        return self.steps * self.per_step * self.pieces

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A batch: input_ids and targets, int64 [rows, longest block], and the step's targets.

        Rows are padded on the right with <pad>, whose target is -100, which is not scored.
        """
        index, piece = divmod(index, self.pieces)
        step, slot = divmod(index, self.per_step)
        batches = self._batches(step)
        batch = batches[slot] if slot < len(batches) else []
        rows = [block_tokens(self.ids, *self.spans[block]) for block in batch]
        longest = max((len(targets) for _, targets in rows), default=1)
        shape = max(1, len(rows)), max(self.pieces, longest)
        all_inputs, all_targets = np.full(shape, Dictionary.PAD), np.full(shape, -100)
        for row, (inputs, targets) in enumerate(rows):
            all_inputs[row, : len(inputs)], all_targets[row, : len(targets)] = inputs, targets
        return {
            "input_ids": torch.from_numpy(all_inputs).tensor_split(self.pieces, 1)[piece],
            "targets": torch.from_numpy(all_targets).tensor_split(self.pieces, 1)[piece],
            "num_items_in_batch": self.num_targets(step),
        }

    def num_targets(self, step: int) -> int:
        """Tokens that a step predicts, over all its batches."""
        numbers = [block for batch in self._batches(step) for block in batch]
        return int(np.diff(self.spans[numbers]).sum())

    def num_tokens(self) -> int:
        """Tokens that the run predicts."""
        passes, rest = divmod(self.steps, self.steps_per_pass)
        first = self.steps - rest
        return passes * len(self.ids) + sum(map(self.num_targets, range(first, self.steps)))

    def _batches(self, step: int) -> list[list[int]]:
        number, step_of_pass = divmod(step, self.steps_per_pass)
        first = step_of_pass * self.per_step
        return self.order(number + 1)[first : first + self.per_step]
