"""A text's ids in blocks, and batches of these in the order of the paper's code."""

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
    """Where each block of a text starts and stops, [blocks, 2]; the last may be shorter."""
    starts = np.arange(0, num_ids, length, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + length, num_ids)], axis=1)


def block_tokens(
    ids: NDArray[Any], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a model reads of a block, from the id before it (of the first, </s>), and predicts."""
    targets = np.asarray(ids[start:stop], np.int64)
    before = ids[start - 1] if start else Dictionary.EOS
    return np.concatenate([[before], targets[:-1]], dtype=np.int64), targets


def block_order(sizes: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The numbers of blocks as `seed` shuffles them, those of smaller sizes first."""
    return np.lexsort((np.random.RandomState(seed).permutation(len(sizes)), sizes))


def batch_order(
    num_ids: int, length: int, max_tokens: int, seed: int, epoch: int, *, multiple: int = 1
) -> list[list[int]]:
    """The batches of pass 1, 2, ..., of blocks in `block_order`: fewer than `multiple` in each or
    a multiple of it, shuffled by `seed + epoch`.
    """
    spans = blocks(num_ids, length)
    order = block_order(spans[:, 1] - spans[:, 0], seed)

    def allowed(rows: int) -> int:
        return rows if rows < multiple else rows - rows % multiple

    rows = allowed(max_tokens // length)
    batches = [order[start : start + rows].tolist() for start in range(0, len(order), rows)]
    if batches:
        last = batches.pop()
        kept = allowed(len(last))
        batches += [part for part in (last[:kept], last[kept:]) if part]
    np.random.RandomState(seed + epoch).shuffle(batches)
    return batches


class Batches(Dataset[dict[str, Any]]):
    """All batches of a run, an item each, at least `least_width` tokens wide; the last step of a
    pass is filled up with batches of targets that are not scored.
    """

    def __init__(
        self,
        ids: NDArray[Any],
        length: int,
        order: Callable[[int], list[list[int]]],
        *,
        per_step: int,
        steps: int | None = None,
        least_width: int = 1,
    ) -> None:
        self.ids, self.spans, self.per_step = ids, blocks(len(ids), length), per_step
        self.least_width = least_width
        self.order = lru_cache(maxsize=2)(order)
        self.steps_per_pass = math.ceil(len(order(1)) / per_step)
        self.steps = steps or self.steps_per_pass

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        """Of one batch, input_ids and targets, int64 [rows, longest block], padded on the right,
        and how many targets the step has.
        """
        (index,) = indices
        step, slot = divmod(index, self.per_step)
        batches = self._batches(step)
        batch = batches[slot] if slot < len(batches) else []
        rows = [block_tokens(self.ids, *self.spans[block]) for block in batch]
        longest = max((len(targets) for _, targets in rows), default=1)
        shape = max(1, len(rows)), max(self.least_width, longest)
        all_inputs, all_targets = np.full(shape, Dictionary.PAD), np.full(shape, -100)
        for row, (inputs, targets) in enumerate(rows):
            all_inputs[row, : len(inputs)], all_targets[row, : len(targets)] = inputs, targets
        return {
            "input_ids": torch.from_numpy(all_inputs),
            "targets": torch.from_numpy(all_targets),
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
