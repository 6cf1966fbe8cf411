"""The position methods of models that read in both directions: ALiBi variants, and others.

    symmetric     slopes m on both sides
    directional   half of the heads see earlier keys only, the other half later keys only
    asymmetric    learned slopes, those of the two sides apart; m to begin with
    random        fixed slopes sigmoid(N(-2, 1)), drawn for each head and side
    littlebird    as asymmetric, and a learned bias between the first token and the others
    window        as symmetric, and keys farther than `window` are hidden

Sources: the first four are of the discussion "Modifying ALiBi for Encoder-Attention or Cross-
Attention" in the paper's repository. Its third option draws slopes as `random` does and calls them
learned; no optimizer sees them, so both readings are methods here. littlebird: Lee, Han and Shin,
arXiv 2210.11870, bidirectional ALiBi alone. window: Beltagy, Peters and Cohan, arXiv 2004.05150,
without its global tokens.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import PreTrainedConfig
from transformers import initialization as init

from linbias.models.decoder.positions import AttendOptions, Biased, distances_of, query_start_of
from linbias.models.decoder.slopes import ModelSlopes
from linbias.schedules import variant_slopes
from linbias.torch import attention, merge
from linbias.torch.constant import constant


class Sloped(Biased):
    """Subtract slope * distance from every score, with slopes for each side: `sides`."""

    variant = "symmetric"

    def __init__(self, config: PreTrainedConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        heads, schedule = config.num_attention_heads, config.slope_schedule
        self._fixed = variant_slopes("LinbiasConfig", self.variant, heads, schedule)
        self._scale = ModelSlopes((), config.slope_scale, config.train_length)

    def sides(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slopes towards earlier and later keys, [H] each; inf hides a side."""
        left, right = self._fixed
        return constant(left, dtype, device), constant(right, dtype, device)

    def reset(self) -> None:
        """Fill in parameters and buffers of a fresh model, where weights were not loaded."""

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        """As of `Biased`: slopes scaled as configured, [H], or [B, H] where rows differ."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        scaled = (
            self._scale.apply_scale(side, num_keys, options.key_range)
            for side in self.sides(dtype, q.device)
        )
        return dict(zip(("slopes", "right_slopes"), scaled, strict=True))


class Directional(Sloped):
    """Let half of the heads see earlier keys only, and the others later keys only."""

    variant = "directional"


class Asymmetric(Sloped):
    """Learn the slopes of both sides: exp(log_left) and exp(log_right), [H] each."""

    variant = "asymmetric"

    def __init__(self, config: PreTrainedConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        self.log_left = nn.Parameter(torch.empty(config.num_attention_heads))
        self.log_right = nn.Parameter(torch.empty(config.num_attention_heads))
        self.reset()

    def reset(self) -> None:
        for side, values in zip((self.log_left, self.log_right), self._fixed, strict=True):
            init.copy_(side, torch.tensor(values, dtype=torch.float64).log())

    def sides(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.log_left.to(dtype).exp(), self.log_right.to(dtype).exp()


class RandomSlopes(Sloped):
    """Draw the slopes of both sides once, sigmoid(N(-2, 1)); they are saved, and never trained."""

    left: Tensor
    right: Tensor

    def __init__(self, config: PreTrainedConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        for side in ("left", "right"):
            self.register_buffer(side, torch.empty(config.num_attention_heads))
        self.reset()

    def reset(self) -> None:
        for side in (self.left, self.right):
            if not getattr(side, "_is_hf_initialized", False):
                init.copy_(side, torch.randn_like(side).sub(2.0).sigmoid())

    def sides(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.left.to(dtype), self.right.to(dtype)


class LittleBird(Asymmetric):
    """Learn the slopes of both sides and a bias -first between a row's first token and all others.

    The first token stands nowhere: three calls are merged, for the first key, for the other keys
    near to far, and for the other keys of the first query, which is without slopes.
    """

    def __init__(self, config: PreTrainedConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        self.first = nn.Parameter(torch.zeros(config.num_attention_heads))

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "first"):
            init.zeros_(self.first)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        (B, H, T, D), S = q.shape, k.shape[2]
        slopes = self.fall(q, k.shape[2], options)
        first, end = _ends(options, B, S, q.device)
        start = query_start_of(q, k, options).expand(B, 1)[:, 0]
        others = torch.stack([(first + 1).minimum(end), end], dim=-1)
        how: Any = {"dropout": options.dropout, "implementation": self.implementation}
        how |= {"causal": False, "key_range": others, "return_lse": True}
        run = partial(attention, k=k, v=v, **how)
        out, lse = run(q, **slopes, query_start=start)
        flat, bias = torch.zeros_like(self.first), self.first.to(lse.dtype)[:, None]

        row = (first - start).clamp(0, T - 1)  # of the first token among the queries
        at_row = torch.arange(T, device=q.device) == row[:, None]
        is_first = (at_row & (start + row == first)[:, None])[:, None]  # [B, 1, T]
        own = q.take_along_dim(row[:, None, None, None], dim=2)
        own_out, own_lse = run(own, slopes=flat, right_slopes=flat, query_start=first)
        out = torch.where(is_first[..., None], own_out, out)
        lse = torch.where(is_first, own_lse - bias, lse)

        k_first, v_first = (_at(x, first, H) for x in (k, v))  # [B, H, 1, D]
        score = (q.to(lse.dtype) * k_first.to(lse.dtype)).sum(-1) / math.sqrt(D)
        score = torch.where(is_first, score, score - bias)
        score = score.masked_fill((first >= end)[:, None, None], -math.inf)
        kept = dropout(torch.ones_like(score), options.dropout)[..., None]
        return merge((out, kept.to(v.dtype) * v_first), (lse, score))[0]

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
        B, S = q.shape[0], k.shape[2]
        left, right = (
            x.reshape(-1, x.shape[-1], 1, 1) for x in self.fall(q, k.shape[2], options).values()
        )
        distances = distances_of(q, k, options)[:, None]
        keys = torch.arange(S, device=q.device)
        first = _ends(options, B, S, q.device)[0][:, None, None, None]
        with_first = ((keys == first) | (distances + keys == first)) & (distances != 0)
        bias = -torch.where(distances >= 0, left * distances, right * -distances)
        bias = torch.where(with_first, -self.first.to(bias.dtype)[:, None, None], bias)
        return self._weights_with(bias, q, k, options)


class LocalWindow(Sloped):
    """Hide keys that are farther than `window` from the query, beside symmetric slopes."""

    def __init__(self, config: PreTrainedConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        self._window = config.window, config.window

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        return {**super().fall(q, num_keys, options), "window": self._window}


def _ends(options: AttendOptions, B: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[B] each: the first and one past the last key of each row."""
    if options.key_range is not None:
        return options.key_range.unbind(-1)  # type: ignore[return-value]
    first = torch.zeros(B, dtype=torch.int64, device=device)
    return first, first + S


def _at(x: Tensor, index: Tensor, num_heads: int) -> Tensor:
    """[B, num_heads, 1, D]: a key or value [B, G, S, D] of each row, for every query head."""
    taken = x.take_along_dim(index.clamp(max=x.shape[2] - 1)[:, None, None, None], dim=2)
    return taken.repeat_interleave(num_heads // x.shape[1], dim=1)
