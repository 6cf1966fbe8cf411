"""The training sequences of a run, as data sets of PyTorch: whole, or with masked tokens."""

from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from linbias.data.tokenizers import TokenIds, Tokenizer

# Masked tokens are never left as they were or replaced by others, as in the first such training:
# it brings nothing (Wettig, Gao, Zhong and Chen, arXiv 2202.08005).
MASK_SHARE = 0.15


class Segments(Dataset[dict[str, Tensor]]):
    """The segments that a run trains on; the seed gives each pass over the text its order."""

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


class InShards(Dataset[dict[str, Any]]):
    """A data set for processes of which each `shards` in a row read one sequence together: batch j
    of the data loaders is shard j % shards, along the tokens, of batch j // shards.
    """

    def __init__(self, whole: Any, shards: int, batch_size: int) -> None:
        self.whole, self.shards, self.batch_size = whole, shards, batch_size

    def __len__(self) -> int:
        return len(self.whole) * self.shards

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        batches = {index // self.batch_size for index in indices}
        assert len(batches) == 1, "a data loader asks for one batch at a time"
        batch, shard = divmod(batches.pop(), self.shards)
        rows = [batch * self.batch_size + index % self.batch_size for index in indices]
        return {
            name: x.tensor_split(self.shards, 1)[shard] if isinstance(x, Tensor) else x
            for name, x in self.whole.__getitems__(rows).items()
        }


@lru_cache(maxsize=2)  # a batch may end one pass and begin the next
def _shuffle(seed: int, pass_number: int, size: int) -> NDArray[np.integer[Any]]:
    return np.random.default_rng((seed, pass_number)).permutation(size)


class MaskTokens(NamedTuple):
    """The ids that a masked sequence needs beside those of its text."""

    begin: int  # begins every sequence
    mask: int  # stands for a masked token

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Those of a tokenizer; a `ValueError` says that it has none."""
        begin, mask = tokenizer.special_ids.get("bos_token_id"), tokenizer.mask_id
        if begin is None or mask is None:
            raise ValueError(
                "MaskTokens: tokenizer must have a token that begins a text and one that stands "
                f"for a masked one, got {begin} and {mask}"
            )
        return cls(begin, mask)


class MaskedSegments(Segments):
    """Segments of a run, each of a token that begins it and length - 1 others, of which as many
    are masked in each, drawn by seed and number.
    """

    def __init__(
        self, ids: TokenIds, *, length: int, num_segments: int, seed: int, tokens: MaskTokens
    ) -> None:
        super().__init__(ids, length=length - 1, num_segments=num_segments, seed=seed)
        self.tokens = tokens

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
    """What is read and said of a text [rows, width] whose `chosen` tokens are masked, int64."""
    read, labels = np.full((2, len(text), text.shape[1] + 1), -100, np.int64)
    read[:, 0], read[:, 1:] = tokens.begin, np.where(chosen, tokens.mask, text)
    labels[:, 1:][chosen] = text[chosen]
    return {"input_ids": torch.from_numpy(read), "labels": torch.from_numpy(labels)}
