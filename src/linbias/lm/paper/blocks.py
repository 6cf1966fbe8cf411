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

    Raises:
        ValueError: `length` is below 1.

    Example:
        >>> blocks(7, 3).tolist()
        [[0, 3], [3, 6], [6, 7]]
    """
    if length < 1:
        raise ValueError(f"blocks: length must be positive, got {length}")
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
    rank: int = 0,
    world: int = 1,
) -> list[list[int]]:
    """The batches of one pass over a text: numbers of blocks, in the original's order.

    Blocks are shuffled once for all passes, the short one put first, and cut into batches of as
    many as `max_tokens` allows; each pass shuffles the batches. Both shuffles draw from NumPy's
    legacy generator, seeded with `seed` and with `seed + epoch`.

    Args:
        num_ids: N, ids of the text.
        length: Ids that a block predicts.
        max_tokens: Most ids in a batch, as if all its blocks were as long as the longest.
        seed: Of the run.
        epoch: Number of the pass, from 1.
        multiple: Batches have fewer than this many blocks, or a multiple of it: the original's
            `--required-batch-size-multiple`, which is 8 by default; the paper's README gives 1.
        rank: Number of the process among `world`: it gets the batches rank, rank + world, ...
        world: Number of processes. All get equally many batches; the last one may be empty.

    Raises:
        ValueError: An argument is out of range; `max_tokens` must allow for one block.

    Example:
        >>> batch_order(10, length=2, max_tokens=4, seed=1, epoch=1)
        [[2], [0, 4], [3, 1]]
    """
    _check(length, max_tokens, epoch, multiple, rank, world)
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
    share = batches[rank::world]
    return share + [[]] * (-(-len(batches) // world) - len(share))


def _allowed_rows(rows: int, multiple: int) -> int:
    """The largest number of rows, up to `rows`, that a batch may have."""
    return rows if rows < multiple else rows - rows % multiple


def _check(length: int, max_tokens: int, epoch: int, multiple: int, rank: int, world: int) -> None:
    counts = {"length": length, "epoch": epoch, "multiple": multiple, "world": world}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"batch_order: {name} must be positive, got {value}")
    if max_tokens < length:
        raise ValueError(
            f"batch_order: max_tokens must be at least length = {length}, got {max_tokens}"
        )
    if not 0 <= rank < world:
        raise ValueError(f"batch_order: rank must be in [0, world = {world}), got {rank}")
