"""Which implementation "auto" takes, and why."""

import functools
import math
import re
import types
from typing import NamedTuple

import torch

from linbias import _dispatch
from linbias._checks import FLOATS, Described, Problem, check
from linbias.kernels import core
from linbias.kernels.fastest import SDPA_IS_FASTER
from linbias.torch import blocked, cpu, dense, sdpa, triton

# In the order in which "auto" asks them. On the CPU, Triton's interpreter can run `triton`, for tests: that comes last.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (triton, cpu, blocked, sdpa, dense)
_ON_CPU = (cpu, blocked, sdpa, dense, triton)
_SHORT_ON_CPU = (sdpa, cpu, blocked, dense, triton)
_ELSEWHERE = (triton, sdpa, blocked, dense, cpu)
# Numbers in a bias up to which, away from the CPU, one call of PyTorch's attention is preferred to many small ones: 256 MB.
# Not measured.
_LARGEST_BIAS = 1 << 26


def asked_in_turn(problem: Problem) -> tuple[types.ModuleType, ...]:
    """The implementations in the order in which "auto" asks them."""
    if torch.compiler.is_compiling():  # what is compiled, or exported, runs at other lengths, too
        return _ON_CPU if problem.device == "cpu" else IMPLEMENTATIONS
    if problem.device != "cpu":
        small = problem.B * problem.H * problem.T * problem.S <= _LARGEST_BIAS
        return _ELSEWHERE if small else IMPLEMENTATIONS
    return _ON_CPU if why_not_sdpa_first(problem) else _SHORT_ON_CPU


def why_not_sdpa_first(problem: Problem) -> str | None:
    """Say why the compiled core is to be preferred to PyTorch's attention on the CPU, or None if it is not."""
    if problem.placed or problem.mask:
        return "its bias would be made anew at each call"
    if problem.slope_gradients:
        return "it is slow where slopes are learned"
    if problem.lse:
        return "it does not give lse"
    if problem.T != problem.S:
        return "only as many queries as keys were measured"
    size = max(problem.D, problem.E)
    lengths = _measured_lengths(core.target(), problem.dtype, problem.gradients, size)
    if isinstance(lengths, str):
        return lengths
    shortest, longest = lengths
    if problem.T < shortest:
        return f"nothing shorter than {shortest} was measured"
    if problem.T > longest:
        return f"it was faster up to length {longest} only" if longest else "it was never faster"
    return None


@functools.cache
def _measured_lengths(
    target: str | None, dtype: str, gradients: bool, size: int
) -> tuple[int, int] | str:
    """The entry of SDPA_IS_FASTER for the nearest head size, or why there is none."""
    measured = _BY_KIND.get((target, dtype, gradients))
    if measured is None:
        return f"{dtype} was not measured on {target}"
    nearest = min(measured, key=lambda other: abs(math.log(other / size)))
    if not size / 2 <= nearest <= size * 2:
        return f"no head size near {size} was measured"
    return measured[nearest]


_BY_KIND: dict[tuple[str | None, str, bool], dict[int, tuple[int, int]]] = {}
for (_target, _dtype, _gradients, _size), _lengths in SDPA_IS_FASTER.items():
    _BY_KIND.setdefault((_target, _dtype, _gradients), {})[_size] = _lengths


class Choice(NamedTuple):
    """What "auto" takes for a call, and what is to be said of every implementation: None for the one that is taken."""

    name: str
    reasons: dict[str, str | None]


def explain_choice(call: str) -> Choice:
    """Tell what "auto" takes for a causal call, and why none of the others.

    Args:
        call: "B,H,T,S,D,dtype", and ",backward" where gradients are wanted.

    Raises:
        ValueError: The call is not of this form, or its sizes break a rule of `attention`.

    Example:
        >>> explain_choice("1,8,4096,4096,64,float64,backward").reasons["dense"]
        'cpu is faster, or needs less memory'
    """
    match = re.fullmatch(
        r"(\d+),(\d+),(\d+),(\d+),(\d+),(\w+?)(,backward)?", call.replace(" ", "")
    )
    if match is None or match[6] not in FLOATS:
        raise ValueError(
            f"doctor: call must be B,H,T,S,D,dtype[,backward] with dtype one of {FLOATS}, got {call!r}"
        )
    B, H, T, S, D = map(int, match.groups()[:5])
    q, k = (Described((B, H, n, D), match[6]) for n in (T, S))
    problem = check("doctor", q, k, k, gradients=match[7] is not None)
    turn = asked_in_turn(problem)
    chosen = _dispatch.choose("attention", "auto", problem, turn)
    reasons: dict[str, str | None] = {}
    for implementation in turn:
        reason = implementation.why_not(problem)
        if reason is None and implementation is not chosen:
            reason = f"{chosen.NAME} is faster, or needs less memory"
            if implementation is sdpa and chosen is cpu:
                reason = why_not_sdpa_first(problem)
            elif implementation is cpu and chosen is sdpa:
                reason = f"PyTorch's attention was faster at this length on {core.target()}"
        reasons[implementation.NAME] = reason
    return Choice(chosen.NAME, reasons)
