"""A step of decoding in one call of the core: new tokens enter a cache and attend to all it holds.

Between two tokens a model reads all its weights, so that the code and data of whatever else runs
come from memory, and at short contexts took longer than the attention itself.
"""

import torch
from torch import Tensor

from linbias import _request
from linbias.kernels import core
from linbias.kernels.core import FEW_QUERIES as FEW_QUERIES
from linbias.torch.addresses import array
from linbias.torch.call import check_slopes
from linbias.torch.impl import cpu
from linbias.torch.operators.direct import unobserved
from linbias.torch.operators.operator import Inputs
from linbias.torch.shard import shard_here

# What calls may lose unless they say otherwise.
TOLERANCES = {getattr(torch, name): value for name, value in _request.TOLERANCE.items()}


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    num_cached: int,
    key_bound: Tensor,
    slopes: Tensor,
    scale: float | None = None,
) -> Tensor | None:
    """Append new tokens [B, H or G, T, size] to a cache [B, G, room, size], and attend.

    `key_bound` [B, G], at least the norms of the cached keys, is raised. None, and nothing is
    written, where `attention` must be called: for many tokens, odd arrays, or an onlooker.
    """
    if (
        core.WHY_MISSING
        or q.shape[2] > FEW_QUERIES
        or max(q.shape[3], v.shape[3]) > (core.ABILITIES.largest_head or 0)
        or not (q.is_cpu and k.is_cpu and v.is_cpu and keys.is_cpu)
        or not (q.dtype == k.dtype == v.dtype == keys.dtype == values.dtype)
        or not _fit(q, k, v, keys, values, num_cached, key_bound, slopes)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or shard_here() is not None
        or not unobserved(q, k, v, keys, slopes)
    ):
        return None
    check_slopes("decode", "slopes", slopes)
    S = num_cached + q.shape[2]
    keys, values = keys.narrow(2, 0, S), values.narrow(2, 0, S)
    if scale is None:
        scale = q.shape[3] ** -0.5
    inputs = Inputs(
        q=q,
        k=keys,
        v=values,
        left=slopes,
        key_bound=key_bound,
        scale=scale,
        tolerance=TOLERANCES[q.dtype],
    )
    call, alive = cpu.describe_call(inputs)
    narrow = q.dtype == torch.bfloat16  # written in it at once
    out = (q if narrow else slopes).new_empty((*q.shape[:3], v.shape[3]))
    new = core.NewTokens(k=array(k, alive), v=array(v, alive), key_bound=key_bound.data_ptr())
    core.forward(call, new, core.Forward(out=out.data_ptr(), narrow=narrow))
    return out.to(q.dtype)


def _fit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    num_cached: int,
    key_bound: Tensor,
    slopes: Tensor,
) -> bool:
    """Whether arrays are as `decode` says: the core takes them at their word."""
    (B, H, T, D), (_, G, _, E) = q.shape, v.shape
    last = num_cached + T
    return (
        (k.shape, v.shape) == ((B, G, T, D), (B, G, T, E))
        and (*keys.shape[:2], keys.shape[3]) == (B, G, D)
        and (*values.shape[:2], values.shape[3]) == (B, G, E)
        and keys.shape[2] >= last
        and values.shape[2] >= last
        and G > 0
        and H % G == 0
        # written in place: a copy would be lost
        and keys.stride(3) == values.stride(3) == 1
        and key_bound.shape == (B, G)
        and key_bound.is_contiguous()
        and slopes.shape in ((H,), (B, H))
        and slopes.dtype == key_bound.dtype
    )
