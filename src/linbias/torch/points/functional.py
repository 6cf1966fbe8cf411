"""`attention_points`: attention over points of a line, a plane or space."""

import contextlib
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from linbias import _dispatch, _request
from linbias._request import Request, checks, keywords
from linbias.torch.addresses import without_lost_threads
from linbias.torch.call import Slopes, as_slopes, autocast, describe
from linbias.torch.constant import default_slopes
from linbias.torch.dropout import draw_seed
from linbias.torch.operators import transforms
from linbias.torch.operators.direct import unobserved
from linbias.torch.operators.operator import without_autocast
from linbias.torch.operators.values import known_values
from linbias.torch.points import cpu as points_cpu
from linbias.torch.points import dense as points_dense
from linbias.torch.points import rules
from linbias.torch.points.geometry import NUM_ARRAYS, PointInputs
from linbias.torch.points.units import warn_of_units
from linbias.torch.shard import refuse_shard

Points = Tensor | np.ndarray[Any, Any] | list[list[float]]
Counts = Tensor | np.ndarray[Any, Any] | list[int]

IMPLEMENTATIONS = (points_cpu, points_dense)
_WITHOUT_NUMPY = (torch.bfloat16, torch.float16)
# Scores up to which the whole matrix is taken: 8 MB in float32. Not measured.
_FEW_SCORES = 1 << 21


class Options(TypedDict, total=False):
    metric: str
    global_tokens: int
    num_points: Counts | None
    query_points: Points | None
    scale: float | None
    dropout: float
    tolerance: float | None


_DEFAULTS = {"metric": "euclidean", "global_tokens": 0, "dropout": 0.0}


@overload
def attention_points(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Points,
    slopes: Slopes | None = ...,
    *,
    implementation: str = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_points(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Points,
    slopes: Slopes | None = ...,
    *,
    implementation: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@keywords.show_keywords(Options, _DEFAULTS)
def attention_points(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Points,
    slopes: Slopes | None = None,
    *,
    implementation: str = "auto",
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention among points, whose scores fall linearly with their distance.

    Token i stands at points[i], and every token sees every token:

        score[i, j] = scale * (q[i] . k[j]) - slope * |points[i] - points[j]|
        out[i] = sum over j of softmax(score[i])[j] * v[j]       lse[i] = log sum exp(score[i])

    Points come in any order, also several at one place. The first `global_tokens` tokens stand
    nowhere: nothing is subtracted from their scores, nor from those of others with them. Slopes
    are per unit of the points: for pixels the scores of patches, divide by the patch's size.
    Precision and autocast are as for `attention`; distances are float64. Differentiable in q, k, v
    and slopes, through out and lse; twice, and under `torch.func`, only by `dense`.

    Args:
        q: [B, H, N, D], as for `attention`; with query_points [B, H, T, D].
        k: [B, G, N, D], likewise.
        v: [B, G, N, E], likewise.
        points: [N, A] for all batch rows, or [B, N, A], with A = 1, 2 or 3: real numbers within
            2^100, or integers within 2^53, without a gradient. Those of global tokens go unread.
        slopes: As for `attention`, but finite. Values, here and below, are checked on the CPU and
            in eager mode.
        metric: "euclidean", the straight line, or "manhattan", the sum over the axes.
        global_tokens: How many tokens at the front stand nowhere, such as a class token.
        num_points: [B], integers from 0 to N: how many tokens of each row, global ones among them,
            are no padding, where sets differ in size. Padding comes last and is never read,
            whatever it holds; its own rows are zeros, with lse = -inf. With query_points it counts
            the keys; a row without keys answers with zeros, and lse = -inf.
        query_points: [T, A] or [B, T, A], as points: where the T queries stand if they are other
            tokens, which see the keys and not each other. All stand somewhere, so that
            global_tokens are keys; for those that stand nowhere call `attention` with slopes of
            zero.
        scale, dropout, tolerance: As for `attention`.
        implementation: `cpu` is near to far, in memory that is linear in N, on the CPU and without
            query_points and dropout; `dense`, which takes every call, holds arrays of
            [B, H, T, N]. "auto" takes the first that can, but `dense` for few tokens.
        return_lse: Also return lse.

    Returns:
        [B, H, N or T, E] in q's dtype; with return_lse also lse [B, H, N or T], float32 (float64
        for float64 inputs).

    Raises:
        TypeError: A wrong dtype or kind of argument.
        ValueError: A shape, device or value breaks a rule above.
        NotImplementedError: A gradient that is not given, as that of points.

    Warns:
        UserWarning: Points lie so far apart, as pixels do, that even the flattest head sees
            nothing but the nearest; once for each line that calls.

    Example:
        >>> patches = torch.cartesian_prod(torch.arange(3), torch.arange(4))
        >>> q = k = v = torch.ones(2, 2, 12, 8)
        >>> out = attention_points(q, k, v, patches, num_points=[12, 9])
        >>> out.shape, out[1, :, 9:].abs().sum()
        (torch.Size([2, 2, 12, 8]), tensor(0.))
        >>> between = torch.tensor([[0.5, 1.5]])  # asks the patches around it
        >>> attention_points(q[:, :, :1], k, v, patches, query_points=between).shape
        torch.Size([2, 2, 1, 8])

    Source: Fuller, Millard and Green, "CROMA", NeurIPS 2023 (satellite images); Ding et al.,
    "TITAN", 2024 (pathology slides, with a global token).
    """
    function = "attention_points"
    if not options.keys() <= Options.__annotations__.keys():
        keywords.refuse_unknown(function, options, attention_points)
    refuse_shard(function)
    compiles = torch.compiler.is_compiling()  # which knows nothing of processes
    with contextlib.nullcontext() if compiles else without_lost_threads():
        inputs, problem = _prepare(function, (q, k, v), points, slopes, **options)
        arrays: tuple[Any, ...] = inputs[:NUM_ARRAYS]
        if q.device.type == "cpu" and unobserved(*arrays):  # so that reading waits for nobody
            warn_of_units(function, inputs)
        turn = IMPLEMENTATIONS
        if problem.B * problem.H * problem.T * problem.S <= _FEW_SCORES:
            turn = IMPLEMENTATIONS[::-1]
        chosen = _dispatch.choose(function, implementation, problem, turn)
        with without_autocast(inputs.q.device):
            out, lse = chosen.attention(inputs)
    return (out, lse) if return_lse else out


def weights_among_points(
    q: Tensor, k: Tensor, points: Points, slopes: Slopes | None = None, **options: Unpack[Options]
) -> Tensor:
    """[B, H, T, N], wide: the weights that `attention_points` gives, before dropout."""
    inputs, _ = _prepare("attention_points", (q, k, k), points, slopes, **options)
    with without_autocast(inputs.q.device):
        return points_dense.attention_weights(inputs)[0]


def _prepare(
    function: str,
    arrays: tuple[Tensor, ...],
    points: Points,
    slopes: Slopes | None,
    *,
    metric: str = "euclidean",
    global_tokens: int = 0,
    num_points: Counts | None = None,
    query_points: Points | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
) -> tuple[PointInputs, _request.Problem]:
    """Check the arguments and fill in what they leave open."""
    for name, array in zip("qkv", arrays, strict=True):
        if isinstance(array, Tensor) and array.is_nested:
            raise TypeError(
                f"{function}: {name} is a nested tensor; pad the sets, as"
                " torch.nested.to_padded_tensor does, and say num_points"
            )
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
        Request(**described, causal=False, scale=scale, dropout=dropout, tolerance=tolerance),
        gradients=torch.is_grad_enabled(),
        transformed=transforms.active(),
        query_points=query_points is not None,
    )
    B, H, T, N = problem.B, problem.H, problem.T, problem.S
    if query_points is None and N != T:
        raise ValueError(
            f"{function}: k has {N} tokens but q has {T}, and every token is both, unless"
            f" query_points say where the queries stand (q {list(q.shape)}, k {list(k.shape)})"
        )
    place = as_points(function, "points", points)
    first = rules.check_points(
        function, {"B": B, "N": N}, describe("points", place, function), metric, global_tokens
    )
    place = place[..., first:, :]
    asking = None if query_points is None else as_points(function, "query_points", query_points)
    if asking is not None:
        asked = describe("query_points", asking, function)
        sizes = {"B": B, "T": T, "A": place.shape[-1]}
        _request.check_array(function, "query_points", asked, rules.QUERY_POINTS, sizes)
    counts = None if num_points is None else _as_counts(function, B, num_points)
    if not torch.compiler.is_compiling():
        _request.warn_of_layout(function, problem)
        _check_values(function, slope, counts, place, first, asking)
    slope = default_slopes(H, wide, q.device) if slope is None else slope
    inputs = PointInputs(
        q=q,
        k=k,
        v=v,
        slopes=slope.expand(B, H),
        points=_placed(place, q.device),
        query_points=None if asking is None else _placed(asking, q.device),
        num_points=None if counts is None else counts.to(q.device, torch.int64),
        seed=draw_seed(q.device) if problem.dropout else None,
        manhattan=metric == "manhattan",
        global_tokens=first,
        scale=problem.scale,
        dropout=problem.dropout,
        tolerance=problem.tolerance,
    )
    return inputs, problem


def as_points(function: str, name: str, points: Points) -> Tensor:
    """Points as a tensor, of a list or an array too."""
    if not isinstance(points, Tensor):
        return torch.as_tensor(checks.real_array(function, name, points))
    if points.is_complex() or points.dtype == torch.bool:
        kind = str(points.dtype).removeprefix("torch.")
        raise TypeError(f"{function}: {name} must hold real numbers, got {kind}")
    if points.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{function}: {name} have no gradients, and these require them; pass {name}.detach()"
        )
    return points


def _as_counts(function: str, B: int, num_points: Counts) -> Tensor:
    if not isinstance(num_points, Tensor):
        num_points = torch.as_tensor(checks.real_array(function, "num_points", num_points))
    rules.check_num_points(function, B, describe("num_points", num_points, function))
    return num_points


def _placed(points: Tensor, device: torch.device) -> Tensor:
    """[n, A] or [B, n, A] -> [1 or B, n, A], as wide as the device has it."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    return (points if points.dim() == 3 else points[None]).to(device, wide)


def _check_values(
    function: str,
    slopes: Tensor | None,
    num_points: Tensor | None,
    points: Tensor,
    first: int,
    query_points: Tensor | None,
) -> None:
    """Check what only the values tell, where reading them does not wait for a device."""
    slope, counts = _read(slopes), _read(num_points)
    place, asking = _read(points), _read(query_points)
    if slope is not None:
        checks.check_slope_values(function, "slopes", slope, finite=True)
    if counts is not None:
        rules.check_num_points_values(function, counts, first + points.shape[-2])
    if place is not None and (num_points is None) == (counts is None):
        rules.check_point_values(function, place, first, counts)
    if asking is not None:
        rules.check_point_values(function, asking, name="query_points")


def _read(x: Tensor | None) -> np.ndarray[Any, Any] | None:
    if x is None:
        return None
    return known_values(x.double() if x.dtype in _WITHOUT_NUMPY else x)
