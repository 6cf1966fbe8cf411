"""Sequences of which some tokens are masked, to be told from those on both sides.

A sequence of `length` tokens is one that begins a text, and `length` - 1 of the text. Of these, 15 % are replaced
by the mask token and predicted; all others are read only. (That the model of the first such training saw a tenth of
them as they were, and a tenth replaced by others, brings nothing: Wettig, Gao, Zhong and Chen, arXiv 2202.08005.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linbias.data.segments import HidingSegments
from linbias.data.tokenizers import Tokenizer

MASK_SHARE = 0.15


class MaskTokens(NamedTuple):
    """The ids that a masked sequence needs beside those of its text.

    Attributes:
        begin: Begins every sequence.
        mask: Stands for a masked token.
    """

    begin: int
    mask: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MaskTokens:
        """Those of a tokenizer; a `ValueError` says that it has none."""
        begin, mask = tokenizer.special_ids.get("bos_token_id"), tokenizer.mask_id
        if begin is None or mask is None:
            raise ValueError(
                "MaskTokens: tokenizer must have a token that begins a text and one that stands for a masked one, "
                f"got {begin} and {mask}"
            )
        return cls(begin, mask)


class MaskedSegments(HidingSegments):
    """The sequences of a whole run, as `Segments`, of which `tokens` mask some.

    Every sequence, of 2 or more tokens, has the same number of masked tokens, so that parts of a
    batch weigh alike. Which ones is a function of the seed and of the sequence's number in the
    run: another pass masks others, and there is no state to save.

    Example:
        >>> ids = np.arange(10, 30, dtype=np.uint8)
        >>> segments = MaskedSegments(ids, length=8, num_segments=9, seed=0, tokens=MaskTokens(2, 26))
        >>> batch = segments.__getitems__([0, 1])
        >>> batch["input_ids"].shape, (batch["labels"] != -100).sum(1).tolist()
        (torch.Size([2, 8]), [1, 1])
    """

    tokens: MaskTokens

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """As of `Segments`; `labels` are -100 where nothing is predicted."""
        text = super().__getitems__(indices)["input_ids"].numpy()
        chosen = np.stack([self._chosen(index) for index in indices])
        return masked_rows(text, chosen, self.tokens)

    def _chosen(self, index: int) -> NDArray[np.bool_]:
        """[length - 1]: which tokens of a sequence are masked."""
        count = max(1, round(MASK_SHARE * self.length))
        chosen = np.zeros(self.length, bool)
        order = np.random.default_rng((self.seed, 1, index)).permutation(self.length)
        chosen[order[:count]] = True
        return chosen


def masked_rows(
    text: NDArray[Any], chosen: NDArray[np.bool_], tokens: MaskTokens
) -> dict[str, Tensor]:
    """What a model reads and is to say: `input_ids` and `labels`, int64 [rows, width + 1].

    `chosen` says which tokens of a text [rows, width] are masked.

    Example:
        >>> rows = masked_rows(np.array([[7, 8]]), np.array([[False, True]]), MaskTokens(2, 26))
        >>> rows["input_ids"].tolist(), rows["labels"].tolist()
        ([[2, 7, 26]], [[-100, -100, 8]])
    """
    read, labels = np.full((2, len(text), text.shape[1] + 1), -100, np.int64)
    read[:, 0], read[:, 1:] = tokens.begin, np.where(chosen, tokens.mask, text)
    labels[:, 1:][chosen] = text[chosen]
    return {"input_ids": torch.from_numpy(read), "labels": torch.from_numpy(labels)}
