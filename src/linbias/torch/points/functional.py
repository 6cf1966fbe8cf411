"""`attention_points`: attention over points of a line, a plane or space."""

import contextlib
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from linbias import _dispatch, _request
from linbias._request import Request
from linbias.torch.addresses import without_lost_threads
from linbias.torch.call import Slopes, as_slopes, autocast, describe
from linbias.torch.constant import default_slopes
from linbias.torch.operators import transforms
from linbias.torch.operators.operator import without_autocast
from linbias.torch.points import blocked as points_blocked
from linbias.torch.points import cpu as points_cpu
from linbias.torch.points import dense as points_dense
from linbias.torch.points.geometry import PointInputs
from linbias.torch.share import refuse_share

Points = Tensor | np.ndarray[Any, Any] | list[list[float]]

IMPLEMENTATIONS = (points_cpu, points_blocked, points_dense)
# Scores up to which the whole matrix is taken: 8 MB in float32. Not measured.
_FEW_SCORES = 1 << 21


@overload
def attention_points(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Points,
    slopes: Slopes | None = ...,
    *,
    metric: str = ...,
    global_tokens: int = ...,
    scale: float | None = ...,
    tolerance: float | None = ...,
    implementation: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_points(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Points,
    slopes: Slopes | None = ...,
    *,
    metric: str = ...,
    global_tokens: int = ...,
    scale: float | None = ...,
    tolerance: float | None = ...,
    implementation: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
def attention_points(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Points,
    slopes: Slopes | None = None,
    *,
    metric: str = "euclidean",
    global_tokens: int = 0,
    scale: float | None = None,
    tolerance: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention among points, whose scores fall linearly with their distance.

    Token i stands at points[i], and every token sees every token:

        score[i, j] = scale * (q[i] . k[j]) - slope * |points[i] - points[j]|
        out[i] = sum over j of softmax(score[i])[j] * v[j]       lse[i] = log sum exp(score[i])

    Points come in any order, also several at one place. The first `global_tokens` tokens stand
    nowhere: nothing is subtracted from their scores, nor from those of others with them. Slopes
    are per unit of the points: for pixels the scores of patches, divide by the patch's size. Query
    head h reads key/value head h // (H // G). Scores, softmax and sums are float32 for 16-bit
    inputs and in q's dtype otherwise; distances are float64. Differentiable in q, k, v and slopes,
    through out and lse; twice, and under `torch.func`, only by `dense`. Autocast works as for
    `scaled_dot_product_attention`.

    Args:
        q: [B, H, N, D], float16, bfloat16, float32 or float64, any strides.
        k: [B, G, N, D], dtype and device of q. H must be a multiple of G.
        v: [B, G, N, E], likewise.
        points: [N, A] for all batch rows, or [B, N, A], with A = 1, 2 or 3: real numbers within
            2^100, or integers within 2^53, without a gradient. Those of global tokens go unread.
        slopes: [H] or [B, H], finite and at least 0. None means `linbias.slopes(H)`; zeros mean no
            bias. Values, and those of points, are checked on the CPU and in eager mode.
        metric: "euclidean", the straight line, or "manhattan", the sum over the axes.
        global_tokens: How many tokens at the front stand nowhere, such as a class token.
        scale: Factor on q . k. None means D ** -0.5.
        tolerance: As for `attention`; 0 reads every key.
        implementation: `cpu` is near to far in compiled code, and `blocked` in PyTorch operations,
            both in memory that is linear in N; `dense` holds arrays of [B, H, N, N]. "auto" takes
            the first that can, but `dense` for few tokens where there is no `cpu`.
        return_lse: Also return lse.

    Returns:
        [B, H, N, E] in q's dtype; with return_lse also lse [B, H, N], float32 (float64 for
        float64 inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument.
        ValueError: A shape, device or value breaks a rule above.
        NotImplementedError: A gradient that is not given, as that of points.

    Example:
        >>> patches = torch.cartesian_prod(torch.arange(3), torch.arange(4))
        >>> q = k = v = torch.ones(1, 2, 12, 8)
        >>> attention_points(q, k, v, patches).shape
        torch.Size([1, 2, 12, 8])

    Source: Press, Smith and Lewis, ICLR 2022, section 3; on planes: Fuller, Millard and Green,
    "CROMA", NeurIPS 2023 (patches of satellite images) and Ding et al., "TITAN", 2024 (tiles of
    pathology slides, and one global token).
    """
    function = "attention_points"
    if unknown:
        _request.refuse_unknown(function, unknown, attention_points)
    refuse_share(function)
    compiles = torch.compiler.is_compiling()  # which knows nothing of processes
    with contextlib.nullcontext() if compiles else without_lost_threads():
        inputs, problem = _prepare(
            function, (q, k, v), points, slopes, metric, global_tokens, scale, tolerance
        )
        turn = IMPLEMENTATIONS
        if problem.B * problem.H * problem.T * problem.S <= _FEW_SCORES:
            turn = IMPLEMENTATIONS[::-1]
        chosen = _dispatch.choose(function, implementation, problem, turn)
        with without_autocast(inputs.q.device):
            out, lse = chosen.attention(inputs)
    return (out, lse) if return_lse else out


def _prepare(
    function: str,
    arrays: tuple[Tensor, ...],
    points: Points,
    slopes: Slopes | None,
    metric: str,
    global_tokens: int,
    scale: float | None,
    tolerance: float | None,
) -> tuple[PointInputs, _request.Problem]:
    """Check the arguments and fill in what they leave open."""
    for name, array in zip("qkv", arrays, strict=True):
        describe(name, array, function)
    q, k, v = autocast(*arrays)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    slope = None if slopes is None else as_slopes(function, "slopes", slopes, wide, q.device)
    given = {"q": q, "k": k, "v": v, "slopes": slope}
    described: Any = {
        name: describe(name, x, function) for name, x in given.items() if x is not None
    }
    problem = _request.check(
        function,
        Request(**described, causal=False, scale=scale, tolerance=tolerance),
        gradients=torch.is_grad_enabled(),
        transformed=transforms.active(),
    )
    B, H, N = problem.B, problem.H, problem.T
    if problem.S != N:
        raise ValueError(
            f"{function}: k has {problem.S} tokens but q has {N}, and every token is both"
            f" (q {list(q.shape)}, k {list(k.shape)})"
        )
    place = _as_points(function, points)
    first = _request.check_points(function, B, N, place, metric, global_tokens)
    place = place[..., first:, :]
    if not torch.compiler.is_compiling():
        _request.warn_of_layout(function, problem)
        _check_values(function, slope, place, first)
    slope = default_slopes(H, wide, q.device) if slope is None else slope
    place = place.to(q.device, torch.float32 if q.device.type == "mps" else torch.float64)
    inputs = PointInputs(
        q=q,
        k=k,
        v=v,
        slopes=slope.expand(B, H),
        points=place if place.dim() == 3 else place[None],
        manhattan=metric == "manhattan",
        global_tokens=first,
        scale=problem.scale,
        tolerance=problem.tolerance,
    )
    return inputs, problem


def _as_points(function: str, points: Points) -> Tensor:
    if not isinstance(points, Tensor):
        return torch.as_tensor(_request.real_array(function, "points", points))
    if points.is_complex() or points.dtype == torch.bool:
        kind = str(points.dtype).removeprefix("torch.")
        raise TypeError(f"{function}: points must hold real numbers, got {kind}")
    if points.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{function}: points have no gradients, and these require them; pass points.detach()"
        )
    return points


def _check_values(function: str, slope: Tensor | None, points: Tensor, first: int) -> None:
    """Check what only the values tell, where reading them does not wait for a device."""
    if slope is not None and slope.device.type == "cpu":
        values = transforms.known_values(slope)
        if values is not None:
            _request.check_slope_values(function, "slopes", values, finite=True)
    if points.device.type == "cpu":
        if points.dtype in (torch.bfloat16, torch.float16):
            points = points.double()
        values = transforms.known_values(points)
        if values is not None:
            _request.check_point_values(function, values, first)
