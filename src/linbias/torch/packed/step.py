"""A step of a model whose layers keep keys in pages: what they have in common, checked once.

An engine calls attention once for each layer, with the same sequences, tables and slots; for one
token to check all of it again takes longer than to compute.
"""

from typing import Any

from torch import Tensor

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
        >>> out = torch.empty(1, 1, 2)
        >>> step.attention(new, *pages, torch.tensor([0.5]), norms, out, scale=1.0)
        >>> out.tolist()
        [[[2.0, 2.0]]]
    """

    def __init__(
        self, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, slots: Tensor
    ) -> None:
        self._where = block_table, seq_lens, cu_seqlens_q
        self._slots = slots
        self._writers: dict[Any, paged.Write] = {}
        self._layers: dict[Any, offsets.Layers | None] = {}

    def write(
        self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_norms: Tensor | None
    ) -> None:
        """`write_pages` to the slots of the step, checked where none of its form was before."""
        arrays = k, v, k_pages, v_pages, page_norms
        form = tuple(map(_form, arrays))
        if form not in self._writers:
            self._writers[form] = paged.writer("write_pages", self._slots, *arrays)
        self._writers[form](*arrays)

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slopes: Tensor,
        page_norms: Tensor | None,
        out: Tensor,
        *,
        scale: float,
        window: tuple[int, int] | None = None,
    ) -> None:
        """Fill `out` [total_q, H, E] with `attention_paged` of a layer, checked where no layer of
        its form was before.

        Args:
            slopes: [H], in float32 (float64 for q in float64).
            page_norms: Likewise, or None.
            out: In q's dtype.
        """
        arrays = q, k_pages, v_pages, slopes, page_norms, out
        form = scale, window, *map(_form, arrays)
        if form not in self._layers:
            self._layers[form] = self._describe(*arrays, {"scale": scale, "window": window})
        layers = self._layers[form]
        if layers is not None:
            layers.compute(*arrays)
        else:
            call = q, k_pages, v_pages, *self._where[:2], slopes
            how = {"cu_seqlens_q": self._where[2], "page_norms": page_norms}
            out.copy_(paged.attention_paged(*call, **how, scale=scale, window=window))

    def _describe(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slopes: Tensor,
        page_norms: Tensor | None,
        out: Tensor,
        options: paged.Options,
    ) -> offsets.Layers | None:
        """None: the core does not take arrays of this form as they lie."""
        block_table, seq_lens, cu_seqlens_q = self._where
        given = q, k_pages, v_pages, block_table, seq_lens, slopes, cu_seqlens_q, page_norms
        asked = offsets.prepare(*paged.check("attention_paged", given, "auto", options))
        if (
            asked is None
            or not offsets.takes_as_they_lie(q, out, k_pages, v_pages, page_norms)
            or not out.is_contiguous()
            or (out.shape, out.dtype) != ((*q.shape[:2], v_pages.shape[-1]), q.dtype)
        ):
            return None
        return offsets.Layers(asked)


def _form(x: Tensor | None) -> Any:
    """All that decides how the core reads an array, but for its address."""
    if x is None:
        return None
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg()
