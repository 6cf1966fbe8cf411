"""The batches of a run with the paper's recipe, as a data set of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from linbias.data.dictionary import Dictionary
from linbias.lm.paper.blocks import block_tokens, blocks


class Batches(Dataset[dict[str, Any]]):
    """All batches of a run, one after another: item i belongs to step i // per_step.

    Every pass over the text has an order of its own. The last step of a pass may lack batches;
    empty ones, of a single target that is not scored, stand for them, so that every process has
    its share. There is no state to save: step n reads the batches from n * per_step on.

    Args:
        ids: [N], the ids of a split.
        length: Tokens per block.
        order: From the number of a pass, counted from 1, to its batches, each a list of block
            numbers. All passes have equally many batches.
        per_step: Batches per step.
        steps: Steps of the run; None: those of one pass.

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
    ) -> None:
        self.ids, self.spans, self.per_step = ids, blocks(len(ids), length), per_step
        self.order = lru_cache(maxsize=2)(order)
        self.steps_per_pass = math.ceil(len(order(1)) / per_step)
        self.steps = steps or self.steps_per_pass

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A batch: input_ids and targets, int64 [rows, longest block], and the step's targets.

        Rows are padded on the right: <pad> is read there, and the target is -100, which is not
        scored.
        """
        step, slot = divmod(index, self.per_step)
        batches = self._batches(step)
        batch = batches[slot] if slot < len(batches) else []
        rows = [block_tokens(self.ids, *self.spans[block]) for block in batch]
        shape = max(1, len(rows)), max((len(targets) for _, targets in rows), default=1)
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
