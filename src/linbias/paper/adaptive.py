"""Adaptive input embeddings, and the adaptive softmax that shares their weights.

Ids are cut into bands (`PaperConfig.bands`), each with a table E_i and a projection P_i. The input
of id w in band i is P_i E_i[w - first id of the band]. The weights exist, and are saved, once.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linbias.paper.config import PaperConfig

# Logits at once: 4 MiB stay in a CPU's cache (52,000 tokens/s on 33,280 types, 25,000 with
# 64 MiB), but fewer rows than these cannot keep a large matrix product busy.
_LOGITS_AT_ONCE, _FEWEST_ROWS = 2**20, 256


class AdaptiveEmbedding(nn.Module):
    """Embed frequent ids in many numbers and rare ones in few, then project all to one width."""

    def __init__(self, config: PaperConfig) -> None:
        super().__init__()
        self.edges = [(start, stop) for start, stop, _ in config.bands]
        self.pad = config.pad_token_id
        self.embeddings = nn.ModuleList(
            # The id of <pad> is taken within each band, as in the original: the second row of
            # every band starts as 0 and learns from being predicted only.
            nn.Sequential(
                nn.Embedding(stop - start, width, padding_idx=self.pad),
                nn.Linear(width, config.hidden_size, bias=False),
            )
            for start, stop, width in config.bands
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table, project in self.bands:
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
            nn.init.zeros_(table.weight[self.pad])
            nn.init.xavier_uniform_(project.weight)

    @property
    def bands(self) -> list[tuple[nn.Embedding, nn.Linear]]:
        """The table (its weight is E_i) and the projection (its weight is P_i) of each band."""
        return cast(Any, [tuple(band.children()) for band in self.embeddings])

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., hidden_size] for ids [...]; IndexError where an id has no embedding."""
        last = len(self.edges) - 1
        parts = []
        for index, (start, stop) in enumerate(self.edges):
            table, project = self.bands[index]
            # The first and the last band are open: an id outside the vocabulary reaches a table.
            outside = ((ids < start) & (index > 0)) | ((ids >= stop) & (index < last))
            rows = table((ids - start).masked_fill(outside, self.pad))
            parts.append(project(rows.masked_fill(outside[..., None], 0.0)))
        return sum(parts[1:], parts[0])


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities in at least float32: of the head, E_0 x and then a class for each tail,
    `class_proj` x; and, for a word of tail i, of its class plus those of E_i (P_i' x).
    """

    def __init__(self, config: PaperConfig) -> None:
        super().__init__()
        self.edges = [(start, stop) for start, stop, _ in config.bands]
        self.pad = config.pad_token_id
        self.ignore_tail_pad = config.ignore_tail_pad
        self.dropout = nn.Dropout(config.softmax_dropout)
        self.class_proj = nn.Parameter(torch.empty(len(config.cutoffs), config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.class_proj)

    def head_weight(self, embedding: AdaptiveEmbedding) -> Tensor:
        """The head's weight: [size of band 0 + tails, hidden_size]."""
        return torch.cat([embedding.bands[0][0].weight, self.class_proj])

    def forward(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Log-probabilities of the whole vocabulary: [..., vocab_size] for hidden [..., width]."""
        head = _logits(hidden, self.head_weight(embedding)).log_softmax(-1)
        size = self.edges[0][1]
        parts = [head[..., :size]]
        for band, (table, project) in enumerate(embedding.bands[1:]):
            tail = _logits(hidden @ project.weight, table.weight).log_softmax(-1)
            parts.append(head[..., size + band, None] + tail)
        return torch.cat(parts, dim=-1)

    def log_probs(self, hidden: Tensor, targets: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """log p(target): [N] for hidden [N, hidden_size] and targets [N]."""
        return -self._nll(hidden, targets, embedding, ignored=None)

    def loss(self, hidden: Tensor, targets: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """The training loss, summed in nats; targets [...] of -100 and <pad> are not scored."""
        scored = (targets != -100) & (targets != self.pad)
        hidden = self.dropout(hidden[scored])
        ignored = self.pad if self.ignore_tail_pad else None
        return self._nll(hidden, targets[scored], embedding, ignored).sum()

    def _nll(
        self, hidden: Tensor, targets: Tensor, embedding: AdaptiveEmbedding, ignored: int | None
    ) -> Tensor:
        """-log p(target), [N], without the tail term of each tail's id number `ignored`."""
        size = self.edges[0][1]
        columns, tails = targets, []
        for band, (table, project) in enumerate(embedding.bands[1:]):
            start, stop = self.edges[band + 1]
            inside = (targets >= start) & (targets < stop)
            columns = columns.masked_fill(inside, size + band)
            if ignored is not None:
                inside &= targets != start + ignored
            (rows,) = inside.nonzero(as_tuple=True)
            narrow = self.dropout(hidden[rows] @ project.weight)
            tails.append((rows, _cross_entropy(narrow, table.weight, targets[rows] - start)))
        nll = _cross_entropy(hidden, self.head_weight(embedding), columns)
        for rows, tail in tails:
            nll = nll.index_add(0, rows, tail)
        return nll


def _cross_entropy(hidden: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
    """-log softmax(hidden weight')[column] of every row, [N], some rows at a time."""
    rows = max(_FEWEST_ROWS, _LOGITS_AT_ONCE // len(weight))
    parts = zip(hidden.split(rows), columns.split(rows), strict=True)
    return torch.cat([F.cross_entropy(_logits(x, weight), c, reduction="none") for x, c in parts])


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
