"""The tokens of a batch without its padding.

    attention_mask    1 1 1 0 0        tokens    a b c d e f g h
                      1 1 1 1 1        offsets   0 3 8

Every layer but attention works token by token, and attention takes packed texts, so that padding costs nothing.
Under `torch.compile` and `torch.export` the number of tokens would be a number of the graph: there the padding stays,
and a key range hides it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from linbias.models.padding import read_attention_mask
from linbias.torch import attention, attention_varlen, attention_weights


@dataclass(frozen=True)
class Rows:
    """How the tokens [N, ...] that a model works on lie in its batch [B, T, ...].

    Attributes:
        shape: B and T.
        is_token: [B, T], False at padding; None where nothing was left out.
        key_range: [B, 2], the tokens of each row, or None where no row has padding.
    """

    shape: tuple[int, int]
    is_token: Tensor | None
    key_range: Tensor | None

    @classmethod
    def read(cls, caller: str, attention_mask: Tensor | None, tokens: Tensor) -> "Rows":
        """From an attention mask [B, T] whose rows each mark one unbroken run, and tokens [B, T, ...].

        Raises:
            ValueError: The mask has another shape, or gaps; the message names the first row that has one.
        """
        key_range = read_attention_mask(caller, attention_mask, tokens, 0).key_range
        B, T = tokens.shape[:2]
        if key_range is None or torch.compiler.is_compiling():
            return cls((B, T), None, key_range)
        assert attention_mask is not None
        return cls((B, T), attention_mask != 0, key_range)

    def to(self, device: torch.device | str | int, **_: object) -> "Rows":
        """On another device: a model that lies on several moves what its layers are given."""
        moved = (None if x is None else x.to(device) for x in (self.is_token, self.key_range))
        return Rows(self.shape, *moved)

    def pack(self, x: Tensor) -> Tensor:
        """[N, ...] of x [B, T, ...]."""
        return x.flatten(0, 1) if self.is_token is None else x[self.is_token]

    def unpack(self, x: Tensor) -> Tensor:
        """[B, T, ...] of x [N, ...], zero at padding."""
        if self.is_token is None:
            return x.unflatten(0, self.shape)
        whole = x.new_zeros(*self.shape, *x.shape[1:])
        whole[self.is_token] = x
        return whole

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, dropout: float, implementation: str
    ) -> Tensor:
        """Let the tokens of each row attend to each other, on both sides: [N, H, D] for q, k, v [N, H, D].

        Args:
            slopes: [H], or [B, H] where rows differ.
            dropout: Probability that a weight is dropped.
            implementation: As in `linbias.torch.attention`.
        """
        if self.is_token is None:
            q, k, v = (self.unpack(x).transpose(1, 2) for x in (q, k, v))
            start = None if self.key_range is None else torch.zeros_like(self.key_range[:, 0])
            out = attention(
                *(q, k, v, slopes),
                causal=False,
                key_range=self.key_range,
                query_start=start,
                dropout=dropout,
                implementation=implementation,
            )
            return out.transpose(1, 2).flatten(0, 1)
        assert self.key_range is not None
        offsets = (self.key_range[:, 1] - self.key_range[:, 0]).cumsum(0)
        offsets = torch.cat([offsets.new_zeros(1), offsets])
        packed = attention_varlen(
            *(q, k, v, offsets, offsets, slopes),
            causal=False,
            dropout=dropout,
            implementation=implementation,
        )
        assert isinstance(packed, Tensor)
        return packed

    def weights(self, q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
        """The weights [B, H, T, T] of `attend` before dropout, zero at padding."""
        q, k = (self.unpack(x).transpose(1, 2) for x in (q, k))
        start = None if self.key_range is None else torch.zeros_like(self.key_range[:, 0])
        found = attention_weights(
            q, k, slopes, causal=False, key_range=self.key_range, query_start=start
        )
        return found if self.is_token is None else found * self.is_token[:, None, :, None]
