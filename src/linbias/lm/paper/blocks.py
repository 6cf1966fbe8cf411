"""A text's ids cut into blocks, and the blocks as batches in the order of the paper's code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linbias.data.dictionary import Dictionary


def blocks(num_ids: int, length: int) -> NDArray[np.int64]:
    """Where each block of a text starts and stops; the last may be shorter.

    Args:
        num_ids: N, ids of the text.
        length: Ids that a block predicts.

    Returns:
        [ceil(N / length), 2].

    Example:
        >>> blocks(7, 3).tolist()
        [[0, 3], [3, 6], [6, 7]]
    """
    starts = np.arange(0, num_ids, length, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + length, num_ids)], axis=1)


def block_tokens(
    ids: NDArray[Any], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a model reads and predicts of a block: the same ids, shifted by one.

    The first id that is read is the last of the block before; the first block reads </s> first.

    Args:
        ids: [N], integers, the whole text.
        start: Of the block.
        stop: One past the block's last id.

    Returns:
        Inputs and targets, each [stop - start].

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
    """The batches of one pass over a text: numbers of blocks, in the original's order.

    Blocks are shuffled once for all passes, the short one put first, and cut into batches of as
    many as `max_tokens` allows; each pass shuffles the batches. Both shuffles draw from NumPy's
    legacy generator, seeded with `seed` and with `seed + epoch`. `Recipe` checks the numbers.

    Args:
        num_ids: N, ids of the text.
        length: Ids that a block predicts.
        max_tokens: Most ids in a batch, as if all its blocks were as long as the longest; it must
            allow for one block.
        seed: Of the run.
        epoch: Number of the pass, from 1.
        multiple: Batches have fewer than this many blocks, or a multiple of it: the original's
            `--required-batch-size-multiple`, which is 8 by default; the paper's README gives 1.

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
