"""A step of a model whose layers keep keys in pages: what they have in common, checked once.

An engine calls attention once for each layer, with the same sequences, tables and slots; for one
token to check all of it again takes longer than to compute.
"""

from typing import Any

from torch import Tensor

from linbias.torch.operators.operator import without_autocast
from linbias.torch.packed import offsets, paged


class Step:
    """New tokens of sequences in pages. Its tensors must stay as they are until the step is over.

    Args:
        block_table, seq_lens, cu_seqlens_q: As for `attention_paged`.
        slots: As for `write_pages`.

    Example:
        >>> import torch
        >>> pages, new = torch.zeros(2, 3, 4, 1, 2), torch.ones(1, 1, 2)
        >>> table, ends = torch.tensor([[2]]), torch.tensor([0, 1])
        >>> step = Step(table, torch.tensor([1]), ends, slots=torch.tensor([8]))
        >>> norms = torch.zeros(3, 1)
        >>> step.write(new, 2 * new, *pages, norms)
        >>> step.attention(new, *pages, torch.tensor([0.5]), norms, scale=1.0).tolist()
        [[[2.0, 2.0]]]
    """

    def __init__(
        self, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, slots: Tensor
    ) -> None:
        self._where = block_table, seq_lens, cu_seqlens_q
        self._slots = slots
        self._rows: dict[Any, paged.Rows] = {}
        self._asked: dict[Any, offsets.Sequences | None] = {}

    def write(
        self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_norms: Tensor | None
    ) -> None:
        """`write_pages` to the slots of the step; only these are checked."""
        size = k_pages.shape[:2]
        if size not in self._rows:
            self._rows[size] = paged.rows_of("write_pages", self._slots, k_pages)
        paged.write_rows(k, v, k_pages, v_pages, self._rows[size], page_norms)

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slopes: Tensor,
        page_norms: Tensor | None,
        *,
        scale: float,
        window: tuple[int, int] | None = None,
    ) -> Tensor:
        """`attention_paged` of a layer, checked where no layer of its shapes was before.

        Args:
            slopes: [H], in float32 (float64 for q in float64).
            page_norms: Likewise; given by all layers or by none.

        Returns:
            [total_q, H, E].
        """
        block_table, seq_lens, cu_seqlens_q = self._where
        arguments = q, k_pages, v_pages, block_table, seq_lens, slopes
        kind = window, q.shape, q.dtype, k_pages.shape, v_pages.shape
        if kind not in self._asked:
            call, placed, pages = paged.check(
                "attention_paged",
                (*arguments, cu_seqlens_q, page_norms),
                "auto",
                {"window": window},
            )
            self._asked[kind] = offsets.prepare(call, placed, pages)
        asked = self._asked[kind]
        if asked is None:
            out = paged.attention_paged(
                *arguments,
                cu_seqlens_q=cu_seqlens_q,
                page_norms=page_norms,
                scale=scale,
                window=window,
            )
            assert isinstance(out, Tensor)
            return out
        asked = asked._replace(
            q=q,
            k=k_pages,
            v=v_pages,
            left=slopes.expand_as(asked.left),
            scale=scale,
            page_norms=page_norms,
        )
        with without_autocast(q.device):
            return offsets.compute(asked, with_lse=False)[0]
