"""What a user could run instead, where it is to be had: each name with what makes its call.

FlexAttention with an ALiBi score_mod, with a window per head as BlockMask, and on FlashAttention
4; SDPA's cuDNN and flash backends with more columns that carry the bias, with the bias as a mask,
and without a bias (for scale only); flash_attn with alibi_slopes.

Making one may fail, for want of a package or of a backend: whoever makes it says so and goes on.
In a dry run FlexAttention is not compiled; on a CPU it has no backward pass.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import linbias
from gpu.timing import Call, Makers
from linbias._request import TOLERANCE

MASK_LIMIT_BYTES = 8 * 2**30
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def biased(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Makers:
    """Peers of causal attention with linear biases; of plain attention where the slopes are 0."""
    torch.compiler.reset()  # else the second length is compiled for all lengths, and is slower
    found: Makers = {
        f"sdpa {n}, no bias": lambda b=b: partial(sdpa, q, k, v, b) for n, b in BACKENDS.items()
    }
    if not slopes.any():
        return {"flex": lambda: flex(q, k, v), **found}
    (H, T), S = q.shape[1:3], k.shape[2]
    fall = falling(slopes, S - T)
    found["flex"] = lambda: flex(q, k, v, fall)
    found["flex, window mask"] = lambda: flex(q, k, v, fall, window=window_per_head(q, k, slopes))
    if has_flash_backend():
        found["flex flash"] = lambda: flex(q, k, v, fall, backend="FLASH")
    if T == S:
        for name, b in BACKENDS.items():
            found[f"sdpa {name}, bias columns"] = lambda b=b: columns(q, k, v, slopes, b)
    if H * T * S * q.element_size() < MASK_LIMIT_BYTES:
        found["sdpa, mask"] = lambda: masked(q, k, v, slopes)
    if importlib.util.find_spec("flash_attn"):
        found["flash_attn"] = lambda: flash_attn(q, k, v, slopes)
    return found


def falling(slopes: Tensor, before: int = 0, causal: bool = True) -> Score:
    """The score_mod of attention whose queries stand at key `before` and on."""
    if not causal:
        return lambda s, b, h, i, j: s - slopes[h] * (i + before - j).abs()
    return lambda s, b, h, i, j: s - slopes[h] * (i + before - j)


def gated(q: Tensor, k: Tensor, v: Tensor, log_gates: Tensor) -> Makers:
    """Peers of attention whose scores fall by sums of -log f over forget gates f, [B, H, T]."""
    torch.compiler.reset()
    at = -log_gates.double().cumsum(-1).float()
    return {
        "flex": lambda: flex(q, k, v, lambda s, b, h, i, j: s - (at[b, h, i] - at[b, h, j])),
        "sdpa cudnn, no bias": lambda: partial(sdpa, q, k, v, BACKENDS["cudnn"]),
    }


def among_points(q: Tensor, k: Tensor, v: Tensor, points: Tensor, slopes: Tensor) -> Makers:
    """Peers of attention whose scores fall with the distance of points [N, 2], float32."""
    torch.compiler.reset()
    x, y = points.T.contiguous()

    def fall(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - slopes[h] * ((x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2).sqrt()

    def made_in_the_call() -> Tensor:
        bias = (torch.cdist(points, points) * -slopes[:, None, None]).to(q.dtype)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias[None])

    found: Makers = {"flex": lambda: flex(q, k, v, fall, causal=False)}
    if q.shape[1] * len(points) ** 2 * 4 < MASK_LIMIT_BYTES:
        found["sdpa mask, made"] = lambda: made_in_the_call
    found["sdpa, no bias"] = lambda: partial(scaled_dot_product_attention, q, k, v)
    return found


def flex(q: Tensor, k: Tensor, v: Tensor, score: Score | None = None, **options: Any) -> Call:
    return partial(flex_like(q, k, score, **options), q, k, v)


def flex_like(
    q: Tensor,
    k: Tensor,
    score: Score | None,
    *,
    window: Tensor | None = None,
    causal: bool = True,
    backend: str | None = None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention for arrays of these sizes: a BlockMask hides the future and far keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, S = q.shape[2], k.shape[2]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        away = i + (S - T) - j
        near = away >= 0 if causal else i >= 0
        return near if window is None else near & (away.abs() <= window[h])

    def compiled(function: Any) -> Any:
        return function if os.environ.get("TRITON_INTERPRET") == "1" else torch.compile(function)

    options: dict[str, Any] = {"score_mod": score}
    if causal or window is not None:
        heads = None if window is None else q.shape[1]
        make_mask = compiled(create_block_mask)
        options["block_mask"] = make_mask(seen, None, heads, T, S, device=q.device.type)
    if backend is not None:
        options["kernel_options"] = {"BACKEND": backend}
    return partial(compiled(flex_attention), **options)


def has_flash_backend() -> bool:
    """Whether FlexAttention finds FlashAttention 4, which it can run on."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # no flash_attn at all
        return False


def window_per_head(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    """The reach that the largest norms allow, in whole keys: [H]."""
    norms = tuple(float(torch.linalg.vector_norm(x.float(), dim=-1).max()) for x in (q, k))
    lead, tolerance = (
        2 * q.shape[-1] ** -0.5 * norms[0] * norms[1],
        TOLERANCE[str(q.dtype).removeprefix("torch.")],
    )
    reach = linbias.near_to_far.reach(
        slopes.tolist(), lead, tolerance=tolerance, num_keys=k.shape[2]
    )
    return torch.from_numpy(reach).ceil().clamp(max=k.shape[2]).long().to(q.device)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, scale: float | None = None
) -> Tensor:
    """PyTorch's attention without a bias, by one of its backends; on a CPU by its only one."""
    with sdpa_kernel(backend) if q.is_cuda else nullcontext():
        causal = q.shape[2] > 1  # of one row every key is visible
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def columns(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, backend: SDPBackend) -> Call:
    """SDPA with 8 more columns, of which two make the bias: positions in two digits, exact."""
    B, H, T, D = q.shape
    at = torch.arange(T, device=q.device)
    more_q, more_k = q.new_zeros(2, B, H, T, 8)
    more_q[..., :2] = (slopes * D**0.5)[:, None, None]
    more_k[..., :2] = torch.stack((at // 256 * 256, at % 256), -1).to(q.dtype)

    def run() -> Tensor:
        wide_q, wide_k = torch.cat((q, more_q), -1), torch.cat((k, more_k), -1)
        wide_v = torch.nn.functional.pad(v, (0, 8))  # for backends that want heads of one size
        return sdpa(wide_q, wide_k, wide_v, backend, D**-0.5)[..., :D]

    return run


def masked(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Call:
    """SDPA with the bias as its mask, made before the call."""
    T, S = q.shape[2], k.shape[2]
    away = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    bias = -slopes[:, None, None] * away
    bias = bias.masked_fill(away < 0, -math.inf).to(q.dtype)[None]
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Call:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    options = {"causal": True, "alibi_slopes": slopes.float()}

    def run() -> Tensor:
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return run


def log_gates(B: int, H: int, T: int, device: str) -> Tensor:
    """Of forget gates sigmoid(N(4, 1.5)), about 0.98: float32."""
    return logsigmoid(torch.randn(B, H, T, device=device) * 1.5 + 4)
