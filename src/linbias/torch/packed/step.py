"""A step of a model whose layers keep keys in pages: what they have in common, checked once.

An engine calls attention once for each layer, with the same sequences, tables and slots; for one
token to check and describe all of it again takes longer than to compute.
"""

from typing import Any

from torch import Tensor

from linbias.torch.impl import cpu
from linbias.torch.packed import offsets, paged
from linbias.torch.packed.varlen import Shared


class Layer:
    """What a layer has in all steps. Its tensors keep their numbers of rows and their places.

    Args:
        k_pages, v_pages, page_norms: As for `attention_paged`.
        slopes: [H], in float32 (float64 for pages in float64).
        scale, window: As for `attention`.
    """

    def __init__(
        self,
        k_pages: Tensor,
        v_pages: Tensor,
        slopes: Tensor,
        page_norms: Tensor | None,
        *,
        scale: float,
        window: tuple[int, int] | None = None,
    ) -> None:
        self.arrays = k_pages, v_pages, slopes, page_norms
        self.options: Shared = {"scale": scale, "window": window}
        self.form = scale, window, *map(_form, self.arrays)
        self._left = slopes[None].contiguous()

    def left(self, num_sequences: int) -> Tensor:
        """[num_sequences, H], contiguous: the same tensor as long as they are as many."""
        left = self._left
        if len(left) != num_sequences:
            left = self._left = self.arrays[2].expand(num_sequences, -1).contiguous()
        return left


class Step:
    """New tokens of sequences in pages. Its tensors must stay as they are until the step is over.

    Args:
        block_table, seq_lens, cu_seqlens_q: As for `attention_paged`.
        slots: As for `write_pages`.

    Example:
        >>> import torch
        >>> pages, new = torch.zeros(2, 3, 4, 1, 2), torch.ones(1, 1, 2)
        >>> layer = Layer(*pages, torch.tensor([0.5]), torch.zeros(3, 1), scale=1.0)
        >>> table, ends = torch.tensor([[2]]), torch.tensor([0, 1])
        >>> step = Step(table, torch.tensor([1]), ends, slots=torch.tensor([8]))
        >>> step.write(layer, new, 2 * new)
        >>> out = torch.empty(1, 1, 2)
        >>> step.attention(layer, new, out)
        >>> out.tolist()
        [[[2.0, 2.0]]]
    """

    def __init__(
        self, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, slots: Tensor
    ) -> None:
        self._where = block_table, seq_lens, cu_seqlens_q
        self._slots = slots
        self._writers: dict[Any, paged.Write] = {}
        self._calls: dict[Any, offsets.Layers | None] = {}

    def write(self, layer: Layer, k: Tensor, v: Tensor) -> None:
        """`write_pages` to the slots of the step, checked where none of this form was before."""
        k_pages, v_pages, _, page_norms = layer.arrays
        form = layer.form, _form(k), _form(v)
        if form not in self._writers:
            arrays = k, v, k_pages, v_pages, page_norms
            self._writers[form] = paged.writer("write_pages", self._slots, *arrays)
        self._writers[form](k, v, k_pages, v_pages, page_norms)

    def attention(self, layer: Layer, q: Tensor, out: Tensor) -> None:
        """Fill `out` [total_q, H, E], in q's dtype, with `attention_paged` of a layer, checked and
        described where none of this form was before.
        """
        k_pages, v_pages, slopes, page_norms = layer.arrays
        form = layer.form, _form(q), _form(out)
        if form not in self._calls:
            self._calls[form] = self._describe(layer, q, out)
        call = self._calls[form]
        if call is not None:
            call.compute(q, k_pages, v_pages, layer.left(call.num_sequences), page_norms, out)
        else:
            block_table, seq_lens, cu_seqlens_q = self._where
            given = q, k_pages, v_pages, block_table, seq_lens, slopes
            how: Any = {"cu_seqlens_q": cu_seqlens_q, "page_norms": page_norms, **layer.options}
            computed = paged.attention_paged(*given, **how)
            assert isinstance(computed, Tensor)  # no lse was asked for
            out.copy_(computed)

    def _describe(self, layer: Layer, q: Tensor, out: Tensor) -> offsets.Layers | None:
        """None: the core does not take arrays of this form as they lie."""
        k_pages, v_pages, slopes, page_norms = layer.arrays
        block_table, seq_lens, cu_seqlens_q = self._where
        given = q, k_pages, v_pages, block_table, seq_lens, slopes, cu_seqlens_q, page_norms
        asked = offsets.prepare(*paged.check("attention_paged", given, "auto", layer.options))
        if (
            asked is None
            or asked.implementation != cpu.NAME
            or not offsets.takes_as_they_lie(q, out, k_pages, v_pages, page_norms)
            or not out.is_contiguous()
            or (out.shape, out.dtype) != ((*q.shape[:2], v_pages.shape[-1]), q.dtype)
            or slopes.dtype != asked.left.dtype
        ):
            return None
        return offsets.Layers(asked)


def _form(x: Tensor | None) -> Any:
    """All that decides how the core reads an array, but for its address."""
    if x is None:
        return None
    return type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg()
