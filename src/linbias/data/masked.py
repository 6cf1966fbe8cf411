"""Sequences of which some tokens are masked, to be told from those on both sides.

15 % of the tokens are replaced by the mask token and predicted; all others are read only. (To
leave some as they were or replace them by others, as the first such training did, brings nothing:
Wettig, Gao, Zhong and Chen, arXiv 2202.08005.)
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
    """The ids that a masked sequence needs beside those of its text."""

    begin: int  # begins every sequence
    mask: int  # stands for a masked token

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MaskTokens:
        """Those of a tokenizer; a `ValueError` says that it has none."""
        begin, mask = tokenizer.special_ids.get("bos_token_id"), tokenizer.mask_id
        if begin is None or mask is None:
            raise ValueError(
                "MaskTokens: tokenizer must have a token that begins a text and one that stands "
                f"for a masked one, got {begin} and {mask}"
            )
        return cls(begin, mask)


class MaskedSegments(HidingSegments):
    """Segments of a run with as many masked tokens in each, drawn by seed and number."""

    tokens: MaskTokens

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """As of `Segments`; `labels` are -100 where nothing is predicted."""
        text = super().__getitems__(indices)["input_ids"].numpy()
        chosen = np.stack([self._chosen(index) for index in indices])
        return masked_rows(text, chosen, self.tokens)

    def _chosen(self, index: int) -> NDArray[np.bool_]:
        count = max(1, round(MASK_SHARE * self.length))
        chosen = np.zeros(self.length, bool)
        order = np.random.default_rng((self.seed, 1, index)).permutation(self.length)
        chosen[order[:count]] = True
        return chosen


def masked_rows(
    text: NDArray[Any], chosen: NDArray[np.bool_], tokens: MaskTokens
) -> dict[str, Tensor]:
    """Read and said of a text [rows, width] whose `chosen` tokens are masked: int64 [rows, width +
    1].
    """
    read, labels = np.full((2, len(text), text.shape[1] + 1), -100, np.int64)
    read[:, 0], read[:, 1:] = tokens.begin, np.where(chosen, tokens.mask, text)
    labels[:, 1:][chosen] = text[chosen]
    return {"input_ids": torch.from_numpy(read), "labels": torch.from_numpy(labels)}
