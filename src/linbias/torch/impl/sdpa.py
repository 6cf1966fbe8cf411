"""PyTorch's own `scaled_dot_product_attention` with the bias as its mask.

The mask is float32 for 16-bit inputs too: in 16 bits slope * distance would be off by more than
the results are. A key or value that is not finite shows in every row of its head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from linbias._dispatch import Abilities
from linbias.torch.impl.scores import bias_of, blank_outside, per_query_head
from linbias.torch.operators.direct import unobserved
from linbias.torch.operators.operator import Inputs

NAME = "sdpa"
ABILITIES = Abilities(
    runs_on="any PyTorch device",
    how="PyTorch's own attention, the bias as its mask",
    memory="length x length",
    has=("mask", "added", "positions", "any_order"),
)
why_not = ABILITIES.lacks
# Biases of slopes and lengths alone are kept, up to so many numbers each.
_BESIDES = ("key_range", "query_start", "mask", "positions", "query_range", "own_key")
_MAX_KEPT, _MAX_NUMBERS = 8, 1 << 22
_kept: dict[Any, Tensor] = {}


def attention(inputs: Inputs, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return out [B, H, T, E] in q's dtype and, if wanted, lse [B, H, T], wide."""
    q, k, v = inputs[:3]
    (H, D), (G, E) = q.shape[1::2], v.shape[1::2]
    # Not where a program is made, nor under `functionalize`, the one transform that comes here.
    recorded = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() and not recorded:
        q, k, v = FirstDerivatives.apply(q, k, v)
    k, v = blank_outside(k, inputs.key_range), blank_outside(v, inputs.key_range)
    lse = None
    bias = _bias(inputs)
    if with_lse:
        wide = bias.dtype
        score = q.to(wide) @ per_query_head(k.to(wide), inputs).mT * inputs.scale + bias
        lse = _log_sum_exp(score)
    # Away from the CPU a mask must have the dtype of q.
    if q.device.type != "cpu" and q.dtype != bias.dtype:
        q, k, v = (x.to(bias.dtype) for x in (q, k, v))
    # Head sizes that differ would cost the fast way.
    q, k, v = (pad(x, (0, max(D, E) - x.shape[3])) if D != E else x for x in (q, k, v))
    # A compiler's comparison of symbols is not taken for a bool.
    grouped = {"enable_gqa": True} if H != G else {}
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=inputs.scale, **grouped)
    return out[..., :E].to(inputs.q.dtype), lse


def _log_sum_exp(score: Tensor) -> Tensor:
    """Over the last axis, -inf where nothing is seen, which passes no gradient on."""
    empty = (score == -torch.inf).all(-1)
    return score.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, -torch.inf)


def _bias(inputs: Inputs) -> Tensor:
    """[B or 1, H, T, S], kept where it is of slopes and lengths alone, which can be read."""
    left, right = inputs.left, inputs.right
    T, S = inputs.q.shape[2], inputs.k.shape[2]
    if (
        left.device.type != "cpu"
        or any(getattr(inputs, name) is not None for name in _BESIDES)
        or (
            torch.is_grad_enabled()
            and any(s is not None and s.requires_grad for s in (left, right))
        )
        or not unobserved(left, right)
        or left[..., 0].numel() * left.shape[-1] * T * S > _MAX_NUMBERS
    ):
        return bias_of(inputs)
    sides = tuple(None if s is None else (*s.shape, *s.flatten().tolist()) for s in (left, right))
    key = *sides, left.dtype, T, S
    bias = _kept.get(key)  # looked up once: another thread may drop it
    if bias is None:
        with torch.inference_mode(False), torch.no_grad():
            bias = bias_of(inputs)
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        _kept[key] = bias
    return bias


class FirstDerivatives(torch.autograd.Function):
    """Pass q, k and v on, and their gradients, but refuse to differentiate these."""

    @staticmethod
    def forward(ctx: Any, *arrays: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in arrays)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Refused.apply(*gradients) if torch.is_grad_enabled() else gradients


class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError(
            "attention: sdpa gives first derivatives only; implementation='dense' gives all"
        )
